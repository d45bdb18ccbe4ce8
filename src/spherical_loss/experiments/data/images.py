"""Image sets in memory: random or official splits, standardized and flipped batch by batch, channels last."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from spherical_loss.experiments.data.image_files import Pixels, TrainTest
from spherical_loss.experiments.errors import UserError


@dataclass(frozen=True)
class Images:
    """Images that stay uint8 in memory; making a batch takes well under a millisecond, so no workers are needed.

    Shapes: ``images`` (N, H, W, C), ``labels`` (N,), ``mean`` and ``scale`` (C, 1, 1).
    """

    images: Tensor
    labels: Tensor
    D: int
    mean: Tensor
    scale: Tensor
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def frequencies(self) -> Tensor:
        """The frequencies that the output bias starts from, ``(D,)``: equal, as in the paper's image networks."""
        return torch.ones(self.D)

    def order(self, epoch: int, generator: Generator) -> Tensor:
        """The rows of a training epoch: all of them, shuffled."""
        return torch.randperm(len(self), generator=generator)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs ``(n, C, H, W)``, in channels-last memory, and targets ``(n,)``.

        With a ``generator`` (training) every image is flipped left to right with probability 1/2, if ``flip`` is set.
        """
        x = self.images.index_select(0, rows).permute(0, 3, 1, 2).to(torch.float32).sub_(self.mean).mul_(self.scale)
        if self.flip and generator is not None:
            flipped = torch.rand(len(rows), generator=generator) < 0.5
            x = torch.where(flipped.to(x.device)[:, None, None, None], x.flip(3), x)
        return x, self.labels.index_select(0, rows)

    def to(self, device: torch.device) -> Images:
        tensors = {name: getattr(self, name).to(device) for name in ("images", "labels", "mean", "scale")}
        return dataclasses.replace(self, **tensors)


class Splits(NamedTuple):
    """What a task gives to the training loop."""

    train: Images
    valid: Images
    test: Images


def split_images(data: TrainTest, D: int, split: str, valid: int, seed: int, flip: bool = False) -> Splits:
    """Training, validation (``valid`` images) and test sets, standardized by the mean and deviation of the training set.

    ``random``: all images are shuffled by ``seed``, and the test set is as large as the official one. ``official``: the
    official test set, and the last ``valid`` of the official training images for validation.
    """
    pooled = Pixels.concatenated([data.train, data.test])
    N, N_test = len(pooled.labels), len(data.test.labels)
    if valid + N_test >= N:
        raise UserError(f"{N} images cannot give {valid} for validation and {N_test} for testing, and some for training")
    order = torch.arange(N)
    if split == "random":
        order = order[torch.randperm(N, generator=Generator().manual_seed(seed))]
    rows = order.split([N - N_test - valid, valid, N_test])
    images, labels = torch.from_numpy(pooled.images), torch.from_numpy(pooled.labels).long()
    mean, scale = standardization(pooled.images, rows[0].numpy())
    parts = [Images(images[r], labels[r], D, mean, scale, flip) for r in rows]
    return Splits(*parts)


def standardization(images: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of each channel, each ``(C, 1, 1)``; in blocks, since float images take 4x the memory."""
    total = np.zeros((2, images.shape[-1]))
    for start in range(0, len(rows), 1000):
        block = images[rows[start : start + 1000]].astype(np.float64)
        total += block.sum((0, 1, 2)), np.square(block).sum((0, 1, 2))
    mean, square = total / (len(rows) * images.shape[1] * images.shape[2])
    deviation = np.sqrt(np.maximum(square - mean**2, 1e-12))
    return tuple(torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, 1 / deviation))  # type: ignore[return-value]
