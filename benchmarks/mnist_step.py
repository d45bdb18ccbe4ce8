"""Our MNIST training step against a plain PyTorch script of the same network, with the same random images.

The two take turns, step by step. The data pipeline is timed separately, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import Work, interleaved, ratio_cells, readable
from spherical_loss.experiments.data.images import Images
from spherical_loss.experiments.models import image_networks as models
from spherical_loss.experiments.models.loss_names import make_loss
from spherical_loss.experiments.table import Table, show

Row = dict[str, Any]

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
    """What one would write without this package: images as float tensors, torch's own network, loss and optimizer."""
    x_all = ((data.images.permute(0, 3, 1, 2).float() - 33) / 78).contiguous(memory_format=torch.channels_last)
    network = plain_network()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub leaves it out
    optimizer = torch.optim.SGD(network.parameters(), LR, momentum=0.9, nesterov=True)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(x_all[rows]), data.labels[rows]).backward()
        optimizer.step()

    return step


def engine_step(data: Images, loss_name: str) -> Callable[[Tensor], None]:
    """The body of ``train_epoch``."""
    loss = make_loss(loss_name, {})
    network = models.start(models.mnist_network(30, 10, "relu"), loss, data.frequencies)
    optimizer = torch.optim.SGD(network.parameters(), LR, momentum=0.9, nesterov=True)

    def step(rows: Tensor) -> None:
        x, target = data.batch(rows, None)
        value = network.objective(x, target, loss)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return step


def compare(loss_name: str, repeats: int) -> Row:
    """The plain step with cross-entropy, the engine's step with this loss, and the time to make a batch, in turns."""
    torch.manual_seed(0)
    data = random_images()
    plain, engine = plain_step(data), engine_step(data, loss_name)
    rows = itertools.cycle(torch.randperm(N).split(BATCH))
    work: dict[str, Work] = {
        "plain": lambda: plain(next(rows)),
        "engine": lambda: engine(next(rows)),
        "data": lambda: data.batch(next(rows)),
    }
    times = interleaved(work, repeats, warmup=3)
    ratio, share = times["engine"].over(times["plain"]), times["data"].over(times["engine"]).median
    return {"loss": loss_name, **{name: t.spread for name, t in times.items()}, "ratio": ratio, "data_share": share}


def run(quick: bool = False, repeats: int = 30) -> list[Row]:
    losses = ("softmax", "taylor") if quick else ("softmax", "taylor", "spherical", "abs", "mse")
    results = [compare(name, 10 if quick else repeats) for name in losses]
    table = [
        [
            r["loss"],
            readable(r["plain"].median),
            readable(r["engine"].median),
            *ratio_cells(r["ratio"]),
            f"{r['data_share']:.2%}",
        ]
        for r in results
    ]
    title = f"MNIST training step, batch {BATCH} (to reach: ratio 1, data 5%)"
    show(Table(title, ["", "plain script", "engine", "ratio", "quartiles", "data / step"], table))
    return results
