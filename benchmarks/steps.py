"""The training steps of our heads that the benchmarks measure, and their data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spherical_loss import FactoredHead, FactoredSGD, TaylorSoftmaxLoss
from spherical_loss.heads.dense import ParameterHead

Row = dict[str, Any]
Step = Callable[[Tensor, Tensor], object]

WORD_MODEL = (250, 300, 793_471)  # N, d, and the vocabulary of One Billion Word


def learning_rate(d: int, D: int) -> float:
    """A rate with the same change of the weights at every size: 30 for the word model, which gives the lowest loss after 400
    steps among 1, 10, 30, 100, 300 and 1,000."""
    return 30 * (D / 793_471) * (300 / d)


def batches(N: int, d: int, D: int, seed: int = 0, count: int = 16) -> Any:
    """An endless cycle of ``count`` batches of hidden vectors, as after a ReLU, and of two million targets, like words.

    All are made beforehand. If the targets repeated as soon as the hidden vectors do, a head would memorize them.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = [(0.3 + 0.5 * torch.randn(N, d, generator=generator)).relu().requires_grad_() for _ in range(count)]
    u = torch.rand(max(N, 2**21 // N * N), generator=generator, dtype=torch.float64)
    targets = (torch.exp(u * math.log(D + 1)).long() - 1).clamp_(0, D - 1).split(N)
    return zip(itertools.cycle(hidden), itertools.cycle(targets), strict=False)


def parameter_step(head: ParameterHead, lr: float) -> Step:
    """A training step of a head with ordinary weights."""
    loss, optimizer = TaylorSoftmaxLoss(), torch.optim.SGD(head.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        loss(head(hidden, target)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class FactoredStep:
    """A training step of the factored head."""

    def __init__(self, N: int, d: int, D: int, lr: float | None = None) -> None:
        self.head = FactoredHead(d, D, init="zero")
        for rows in self.head.V.split(2**18):  # write the memory once: otherwise its page faults would count in the steps
            rows.fill_(0)
        self.optimizer = FactoredSGD(self.head, learning_rate(d, D) if lr is None else lr)
        self.loss, self.batches = TaylorSoftmaxLoss(), batches(N, d, D)

    def __call__(self) -> None:
        hidden, target = next(self.batches)
        self.optimizer.zero_grad()
        self.loss(self.head(hidden, target)).backward()
        self.optimizer.step()


def step_flops(N: int, d: int) -> float:
    """Operations of the matmuls of a step with N > d / 2: six of N d^2 (as if all targets were distinct), two of d^3."""
    return 12 * N * d**2 + 4 * d**3
