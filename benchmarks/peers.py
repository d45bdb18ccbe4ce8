"""What people use today for a large output layer, each as a training step ``step(hidden, target)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss.experiments.softmax_heads import AdaptiveSoftmaxHead, SampledSoftmaxHead

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
    return trained(SampledSoftmaxHead(d, D, negatives=negatives), lr)


def adaptive_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """``nn.AdaptiveLogSoftmaxWithLoss``: a model of its own, with smaller matrices for rarer classes."""
    return trained(AdaptiveSoftmaxHead(d, D), lr)


def trained(head: SampledSoftmaxHead | AdaptiveSoftmaxHead, lr: float) -> Step:
    optimizer = torch.optim.SGD(head.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        head.training_loss(hidden, target).backward()
        optimizer.step()

    return step
