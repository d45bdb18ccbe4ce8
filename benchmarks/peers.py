"""What people use today for a large output layer, each as a training step ``step(hidden, target)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps import Step
from spherical_loss.experiments.models.softmax_heads import AdaptiveSoftmax
from spherical_loss.heads import LikelihoodLayer, SampledSoftmax


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
    """Shared negatives from a log-uniform distribution, with its correction, and sparse gradients: an approximation."""
    return trained(SampledSoftmax(d, D, negatives), lr)


class NoiseContrastive(SampledSoftmax):
    """Noise-contrastive estimation, with the outputs as unnormalized log-probabilities: an approximation.

    Reference: A. Mnih, Y. W. Teh, A fast and simple algorithm for training neural probabilistic language models, 2012.
    """

    def training_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        """``log sigma(o_c - log E_c) + sum_k log(1 - sigma(o_k - log E_k))`` over the negatives k, which a batch shares."""
        drawn = self.draw()
        positive, negative = self._outputs(H, classes, drawn)
        expected = self.log_expected_count(torch.cat([classes, drawn])).to(H.dtype)
        positive, negative = positive - expected[: len(classes)], negative - expected[len(classes) :]
        return -F.softplus(-positive) - F.softplus(negative).sum(1)


def noise_contrastive(d: int, D: int, negatives: int, lr: float = 0.1) -> Step:
    return trained(NoiseContrastive(d, D, negatives), lr)


def adaptive_softmax(d: int, D: int, lr: float = 0.1) -> Step:
    """``nn.AdaptiveLogSoftmaxWithLoss``: a different model, with smaller matrices for rarer classes."""
    return trained(AdaptiveSoftmax(d, D), lr)


def trained(layer: LikelihoodLayer, lr: float) -> Step:
    optimizer = torch.optim.SGD(layer.parameters(), lr)

    def step(hidden: Tensor, target: Tensor) -> None:
        layer(hidden, target).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
