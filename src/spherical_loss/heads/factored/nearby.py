"""Weights that differ in the last bit from those of a head, and learn from the same batches: how fast do they part?

With few classes and a rate that is too large, SGD is chaotic: a difference in the last bit of a weight grows some e^0.3-fold in
every step, and after a hundred steps the weights have nothing in common with those of another order of summation, in float64 as
in float32. Such weights are the result of no computation in particular, and nothing in a loss that stays small would tell.

The gradient of the other weights comes from the same backward pass: a loss adds its value for their statistics to its own, and
takes it off again (:meth:`spherical_loss.base.SphericalLoss.each`).
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_CLASSES = 64  # that are watched: with more, no rate up to 1,000 was seen to lose 1e-5 of the weights in 60 steps
STEPS = 100  # after which the other weights start from the head's again: a slow growth is that of any training


class Nearby:
    """The other weights, (D, d), dense: for heads of few classes."""

    def __init__(self, W: Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        sign = torch.randint(2, W.shape, generator=generator, device="cpu").to(W) * 2 - 1
        size = float(W.abs().max()) or 1.0
        self.W = (W + torch.finfo(W.dtype).eps * size * sign).requires_grad_()
        self.steps = 0

    @property
    def is_old(self) -> bool:
        return self.steps >= STEPS

    def statistics(self, X: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``s``, ``q`` (N,) and ``o_c`` (N, K) of hidden vectors (N, d) and classes (N, K)."""
        o = X @ self.W.T
        return o.sum(1), o.square().sum(1), o.gather(1, classes)

    def stepped(self, factor: float, rate: float, decay: float) -> Tensor:
        """The other weights after a step; gradients are still to be multiplied by ``factor``."""
        assert self.W.grad is not None
        return decay * self.W.detach() - (rate * factor) * self.W.grad

    def set_(self, W: Tensor) -> None:
        """After a step."""
        self.W = W.requires_grad_()
        self.steps += 1


def have_parted(W: Tensor, other: Tensor) -> float | None:
    """How many times the first difference they are apart, relative to their size, if half of the digits are lost."""
    eps = torch.finfo(W.dtype).eps
    distance = float((other - W).abs().max() / W.abs().max())
    return distance / eps if distance > eps**0.5 else None
