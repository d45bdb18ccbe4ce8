"""Train a model with a million classes on a laptop, from start to end: checkpoints, evaluation, export.

    python examples/million_classes.py --folder runs/million

The task is to predict the next item of a shop with a catalogue of a million. The data are made up, with a structure to find: an
item is a pair (brand, model), popular ones are much more frequent than others, and after an item comes, nine times out of ten,
the one item that goes with it. So no model can be right more often than that, and guessing the most popular item is almost
never right. Stop the program when you like: the same command resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from spherical_loss import AdaptiveSphericalSoftmax, FactoredSGD, files, suggested_lr

DENSE_CLASSES = 16_384  # of the measured dense step, whose time is proportional to them


class Shop:
    """Pairs (last item, next item). Item ``i`` is of brand ``i // models`` and is its model ``i % models``."""

    def __init__(self, items: int) -> None:
        self.items, self.models = items, math.isqrt(items - 1) + 1
        generator = torch.Generator().manual_seed(0)
        self.popularity = 1 / torch.arange(1, self.models + 1)
        self.brand_after, self.model_after = (torch.randperm(self.models, generator=generator) for _ in range(2))

    def batch(self, seed: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        item, other = (self._drawn(size, generator) for _ in range(2))
        goes_with = self.brand_after[item // self.models] * self.models + self.model_after[item % self.models]
        follows = torch.rand(size, generator=generator) < 0.9
        return item, torch.where(follows, goes_with, other) % self.items

    def sales(self, size: int) -> Tensor:
        """How often each item was sold before, (items,)."""
        return torch.bincount(self.batch(-2, size)[1], minlength=self.items)

    def _drawn(self, size: int, generator: torch.Generator) -> Tensor:
        brand, model = torch.multinomial(self.popularity, 2 * size, replacement=True, generator=generator).view(2, size)
        return (brand * self.models + model) % self.items


class Trunk(nn.Module):
    """From an item to a hidden vector of size d: learned vectors of its brand and its model, and two layers."""

    def __init__(self, models: int, d: int) -> None:
        super().__init__()
        self.models = models
        self.brand, self.model = nn.Embedding(models, d), nn.Embedding(models, d)
        self.layers = nn.Sequential(nn.Linear(2 * d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d), nn.LayerNorm(d))

    def forward(self, item: Tensor) -> Tensor:
        pair = torch.cat([self.brand(item // self.models), self.model(item % self.models)], -1)
        return self.layers(pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint and the exported model go")
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--d", type=int, default=64, help="size of a hidden vector")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--frequent", type=int, default=2000, help="items of the softmax; all others are in the tail")
    parser.add_argument("--tail-rate", type=float, default=1.0, help="rate of the tail, as a multiple of the suggested one")
    parser.add_argument("--queries", type=int, default=500, help="held-out examples of an evaluation")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    D, d = options.classes, options.d
    shop = Shop(D)
    trunk = Trunk(shop.models, d)
    layer = AdaptiveSphericalSoftmax(d, D, options.frequent, frequencies=shop.sales(200 * options.batch_size) + 1)
    tail_rate = options.tail_rate * suggested_lr(layer.tail, layer.loss, options.batch_size)
    optimizers = [
        torch.optim.Adam([*trunk.parameters(), *layer.parameters()], lr=2e-3),
        FactoredSGD(layer.tail, lr=tail_rate),
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.05, options.steps) for o in optimizers]

    parts: list[Any] = [trunk, layer, *optimizers, *schedules]
    checkpoint = options.folder / "checkpoint.pt"
    first = load(checkpoint, parts) if checkpoint.exists() else 0
    if first:
        print(f"resuming from step {first}")

    seconds, dense_seconds = [], []
    bar = tqdm(range(first, options.steps), initial=first, total=options.steps, unit="step")
    for step in bar:
        start = time.perf_counter()
        item, target = shop.batch(step, options.batch_size)
        value = layer(trunk(item), target).loss
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        seconds.append(time.perf_counter() - start)
        if step % 100 == 0:
            bar.set_postfix(loss=f"{value.item():.3f}")
            dense_seconds.append(dense_step_seconds(options.batch_size, d, D))
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            save(checkpoint, parts, step + 1)
            top1, top10 = accuracy(shop, trunk, layer, options.queries)
            bar.write(f"step {step + 1}: loss {value.item():.3f}, right {top1:.1%}, among the first ten {top10:.1%}")
    if seconds:
        report_times(seconds, dense_seconds, D)
    export(options.folder, layer)


def save(path: Path, parts: list[Any], step: int) -> None:
    """With a checksum; a program that is killed while writing leaves the last checkpoint intact."""
    files.save({"step": step, "parts": [part.state_dict() for part in parts]}, path)


def load(path: Path, parts: list[Any]) -> int:
    state = files.load(path)
    for part, saved in zip(parts, state["parts"], strict=True):
        part.load_state_dict(saved)
    return int(state["step"])


@torch.no_grad()
def accuracy(shop: Shop, trunk: nn.Module, layer: AdaptiveSphericalSoftmax, queries: int) -> tuple[float, float]:
    """How often the next item is the first, and one of the first ten, of all items; exact."""
    item, target = shop.batch(-1, queries)
    found = layer.topk(trunk(item), 10).classes == target.unsqueeze(1)
    return float(found[:, 0].float().mean()), float(found.any(1).float().mean())


def dense_step_seconds(N: int, d: int, D: int) -> float:
    """A step of ``nn.Linear`` with cross-entropy and SGD, measured with fewer classes and scaled up to D."""
    classes = min(D, DENSE_CLASSES)
    linear, hidden, target = nn.Linear(d, classes), torch.randn(N, d, requires_grad=True), torch.randint(classes, (N,))
    start = time.perf_counter()
    F.cross_entropy(linear(hidden), target).backward()
    torch.optim.SGD(linear.parameters(), lr=0.1).step()
    return (time.perf_counter() - start) * D / classes


def report_times(seconds: list[float], dense_seconds: list[float], D: int) -> None:
    ours, dense = (float(torch.tensor(x).median()) for x in (seconds, dense_seconds))
    print(f"a step, median: {1000 * ours:.1f} ms with all {D:,} classes, the trunk included")
    print(f"a dense output layer alone, estimated from {min(D, DENSE_CLASSES):,} classes: {1000 * dense:.0f} ms")
    print(f"ratio: {dense / ours:.1f}")


def export(folder: Path, layer: AdaptiveSphericalSoftmax) -> None:
    """The trained output layer; a layer of the same sizes loads it, with the order of the items."""
    torch.save(layer.state_dict(), folder / "layer.pt")
    print(f"wrote {folder / 'layer.pt'}, the state of an {type(layer).__name__}({layer.extra_repr()})")


if __name__ == "__main__":
    main()
