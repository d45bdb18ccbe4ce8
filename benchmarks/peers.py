"""What people use today for a large output layer, each as a training step ``step(hidden, target)``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], object]


def dense_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """Linear layer, cross-entropy, SGD: exact."""
    linear = nn.Linear(d, D)
    optimizer = torch.optim.SGD(linear.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(linear(hidden), target).backward()
        optimizer.step()

    return step


def sampled_softmax(d: int, D: int, negatives: int, lr: float = 0.1) -> Step:
    """Shared negatives from a log-uniform distribution, corrected for it, sparse gradients: an approximation."""
    weight, bias = nn.Embedding(D, d, sparse=True), nn.Embedding(D, 1, sparse=True)
    optimizer = torch.optim.SGD([*weight.parameters(), *bias.parameters()], lr)

    def log_expected_count(classes: Tensor) -> Tensor:
        c = classes.to(torch.float32)
        return torch.log(torch.log1p(1 / (c + 1)) * (negatives / math.log(D + 1)))

    def step(hidden: Tensor, target: Tensor) -> None:
        noise = (torch.exp(torch.rand(negatives) * math.log(D + 1)).long() - 1).clamp_(0, D - 1)
        classes = torch.cat([target, noise])
        W, b = weight(classes), bias(classes).squeeze(1) - log_expected_count(classes)
        N = len(target)
        positive = (hidden * W[:N]).sum(1) + b[:N]
        negative = torch.addmm(b[N:], hidden, W[N:].T)
        negative = negative.masked_fill(target.unsqueeze(1) == noise, -1e9)  # a target that was drawn as noise
        optimizer.zero_grad()
        F.cross_entropy(torch.cat([positive.unsqueeze(1), negative], 1), torch.zeros(N, dtype=torch.long)).backward()
        optimizer.step()

    return step


def adaptive_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """``nn.AdaptiveLogSoftmaxWithLoss``: a model of its own, with smaller matrices for rarer classes."""
    cutoffs = [c for c in (2_000, 20_000, 200_000) if c < D]
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(d, D, cutoffs)
    optimizer = torch.optim.SGD(adaptive.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        adaptive(hidden, target).loss.backward()
        optimizer.step()

    return step
