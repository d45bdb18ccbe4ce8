"""What people use today for a large output layer, each as a training step ``step(hidden, target)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps import Step
from spherical_loss.experiments.models.softmax_heads import AdaptiveSoftmaxHead, SampledSoftmaxHead


def dense_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """Linear layer, cross-entropy, SGD: exact."""
    linear = nn.Linear(d, D)
    optimizer = torch.optim.SGD(linear.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        F.cross_entropy(linear(hidden), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fused_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """``F.linear_cross_entropy``: exact."""
    linear = nn.Linear(d, D, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        F.linear_cross_entropy(hidden, linear.weight, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sampled_softmax(d: int, D: int, negatives: int, lr: float = 0.1) -> Step:
    """Shared negatives from a log-uniform distribution, corrected for it, sparse gradients: an approximation."""
    return trained(SampledSoftmaxHead(d, D, negatives=negatives), lr)


class NoiseContrastiveHead(SampledSoftmaxHead):
    """Tells targets from noise, with the outputs as unnormalized log-probabilities: an approximation.

    Reference: A. Mnih, Y. W. Teh, A fast and simple algorithm for training neural probabilistic language models, 2012.
    """

    def training_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """``-log sigma(o_c - log E_c) - sum_k log(1 - sigma(o_k - log E_k))`` over the negatives k, which a batch shares."""
        noise = self.noise(target.device)
        classes = torch.cat([target, noise])
        W, b = F.embedding(classes, self.weight, sparse=True), self.bias[classes] - self.log_expected_count(classes)
        N = len(target)
        positive = (hidden * W[:N]).sum(1) + b[:N]
        negative = torch.addmm(b[N:], hidden, W[N:].T)
        return (F.softplus(-positive) + F.softplus(negative).sum(1)).mean()


def noise_contrastive(d: int, D: int, negatives: int, lr: float = 0.1) -> Step:
    return trained(NoiseContrastiveHead(d, D, negatives=negatives), lr)


def adaptive_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """``nn.AdaptiveLogSoftmaxWithLoss``: a model of its own, with smaller matrices for rarer classes."""
    return trained(AdaptiveSoftmaxHead(d, D), lr)


def trained(head: SampledSoftmaxHead | AdaptiveSoftmaxHead, lr: float) -> Step:
    optimizer = torch.optim.SGD(head.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        head.training_loss(hidden, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
