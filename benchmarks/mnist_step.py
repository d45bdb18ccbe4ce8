"""The engine's MNIST training step beside a plain PyTorch script of the same network, with the same random images.

    python -m benchmarks.mnist_step [--steps 30]

A (the plain script) and B (the engine) take turns, step by step, so that what else the machine does hits both alike; the
medians are compared. The data pipeline is timed on its own, as a share of the engine's step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss.experiments import models
from spherical_loss.experiments.images import Images
from spherical_loss.experiments.losses import make_loss

N, BATCH, LR = 10_000, 200, 0.01


def random_images() -> Images:
    images = torch.randint(0, 256, (N, 28, 28, 1), dtype=torch.uint8)
    labels = torch.randint(0, 10, (N,))
    return Images(images, labels, 10, torch.tensor([[[33.0]]]), torch.tensor([[[1 / 78.0]]]))


def plain_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 30, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(5, 2),
        nn.Conv2d(30, 60, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(5, 2),
        nn.Flatten(),
        nn.Linear(960, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def plain_step(data: Images) -> Callable[[Tensor], None]:
    """What one would write without the engine: images as float tensors, torch's own network, loss and optimizer."""
    x_all = ((data.images.permute(0, 3, 1, 2).float() - 33) / 78).contiguous(memory_format=torch.channels_last)
    network = plain_network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), LR, momentum=0.9, nesterov=True)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(x_all[rows]), data.labels[rows]).backward()
        optimizer.step()

    return step


def engine_step(data: Images, loss_name: str) -> Callable[[Tensor], None]:
    """The body of ``train_epoch``."""
    loss = make_loss(loss_name, {})
    network = models.start(models.mnist_network(30, 10, "relu"), loss, data.frequencies).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), LR, momentum=0.9, nesterov=True)

    def step(rows: Tensor) -> None:
        x, target = data.batch(rows, None)
        value = network.objective(x, target, loss)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return step


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(loss_name: str, steps: int) -> dict[str, float]:
    """Median seconds of the plain step, of the engine's step with this loss, and of making a batch."""
    torch.manual_seed(0)
    data = random_images()
    plain, engine = plain_step(data), engine_step(data, loss_name)
    seconds: dict[str, list[float]] = {"plain": [], "engine": [], "data": []}
    for i in range(steps + 3):
        rows = torch.randperm(N)[:BATCH]
        took = {
            "plain": timed(lambda: plain(rows)),  # noqa: B023 (called at once)
            "engine": timed(lambda: engine(rows)),  # noqa: B023
            "data": timed(lambda: data.batch(rows)),  # noqa: B023
        }
        if i >= 3:  # the first ones warm up
            for name, value in took.items():
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="steps of each (default: %(default)s)")
    steps = parser.parse_args().steps
    print(f"MNIST training step, batch {BATCH}, {torch.get_num_threads()} threads, medians of {steps} interleaved steps")
    for loss_name in ("softmax", "taylor", "spherical", "abs", "mse"):
        median = measure(loss_name, steps)
        ratio, share = median["engine"] / median["plain"], median["data"] / median["engine"]
        print(
            f"  {loss_name:<10} plain {1e3 * median['plain']:7.2f} ms   engine {1e3 * median['engine']:7.2f} ms   "
            f"ratio {ratio:.3f}   data pipeline {share:.2%} of the step"
        )


if __name__ == "__main__":
    main()
