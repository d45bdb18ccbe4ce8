"""The negative log-likelihoods among the losses: of a positive quadratic of the outputs, and of a softmax."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss._targets import check, explained
from spherical_loss.base import NO_TARGET, Loss, SphericalLoss
from spherical_loss.statistics import Statistics, statistics_dtype, widened


class QuadraticLikelihood(SphericalLoss):
    """``-log g(o_c) / sum_k g(o_k)`` with ``g(x) = a1 + a2 x + a3 x^2 > 0``, whose sum is ``a1 D + a2 s + a3 q``."""

    is_likelihood = True
    needs_float64 = False
    a1: float
    a2: float
    a3: float

    def formula(self, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
        return torch.log(self.a1 * D + self.a2 * s + self.a3 * q) - torch.log(self.numerator(o_c))

    def numerator(self, o: Tensor) -> Tensor:
        """``g(o)`` as a square plus its smallest value: the terms of ``a1 + a2 o + a3 o^2`` would cancel near the vertex."""
        return self.a3 * (o - self.vertex).square() + self.least

    def log_numerator(self, o: Tensor) -> Tensor:
        """``log g(o)``, up to a constant, which cancels in the distribution."""
        if self.a3 != self.least:  # the constant, as large as log(1 / eps), would cost digits
            return self.numerator(o).log()
        t = o - self.vertex
        return torch.log1p(t * t)  # the Taylor softmax, in the fewest calls

    @property
    def vertex(self) -> float:
        """Where ``g`` is smallest: classes are ranked by their distance from it, on either side."""
        return -self.a2 / (2 * self.a3)

    @property
    def least(self) -> float:
        """The smallest value of ``g``."""
        return self.a1 - self.a2**2 / (4 * self.a3)

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return (o - self.vertex).abs()

    def forward(self, input: Tensor | Statistics, target: Tensor | None = None) -> Tensor:
        # softmax(log g(o)) is this loss's own distribution, so torch's cross-entropy of log g(o) is the same number,
        # with any option. It takes the fewest calls, which is what counts below some 2^14 logits; above, its N x D
        # temporaries cost more than the kernel.
        if isinstance(input, Statistics) or target is None or self.overwrite_logits:
            return super().forward(input, target)
        if input.numel() > 2**14 and not target.is_floating_point() and self.label_smoothing == 0:
            return super().forward(input, target)
        check(input, target, self.weight, self.ignore_index)
        dtype = widened(input.dtype)
        loss = _cross_entropy(self, self.log_numerator(input.to(dtype)), target)
        if _overflowed(loss):
            loss = _cross_entropy(self, self.log_numerator(input.to(statistics_dtype(input.device))), target).to(dtype)
        return loss

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        g = self.numerator(o.to(widened(o.dtype)))
        return (g.log() - g.sum(dim, keepdim=True).log()).to(o.dtype)

    def probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        g = self.numerator(o.to(widened(o.dtype)))
        return (g / g.sum(dim, keepdim=True)).to(o.dtype)

    def prior_bias(self, frequencies: Tensor, Z: float | None = None) -> Tensor:
        """The bias ``b`` with ``g(b_k) = p_k Z``, on the right-hand side of the vertex.

        ``Z``, the sum of ``g``, is free but must be at least ``least / min(p)``, where the rarest class would be at the
        vertex and never get a gradient. The default is twice that: the rarest class then starts where ``log g`` is
        steepest (``b = 0`` for the Taylor softmax, ``b = sqrt(eps)`` for the spherical softmax).
        """
        p = normalized(frequencies)
        smallest = self.least / float(p.min())
        Z = 2 * smallest if Z is None else Z
        if not smallest <= Z < math.inf:
            raise ValueError(f"Z is {Z}, but the rarest class has frequency {float(p.min()):.3g} and needs Z >= {smallest:.6g}")
        distance = ((p * Z - self.least).clamp_min(0) / self.a3).sqrt()
        return (distance + self.vertex).to(float_dtype(frequencies))


def _overflowed(loss: Tensor) -> bool:
    """Whether a loss is not finite, as for outputs above 1e19, whose squares overflow. False if values cannot be read."""
    if loss.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    try:
        return not (math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.isfinite().all()))
    except RuntimeError:  # under vmap, values cannot be read
        return False


class SoftmaxLikelihood(Loss):
    """The softmax of a function of the logits, outside the family: torch's cross-entropy of ``log_numerator(o)``."""

    @staticmethod
    @abstractmethod
    def log_numerator(o: Tensor) -> Tensor:
        """``log g(o)``: the distribution is ``softmax(log g(o))``."""

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        if isinstance(input, Statistics):
            raise TypeError(
                f"{type(self).__name__} is outside the spherical family: it is not a function of the statistics (s, q, o_c); "
                "give it logits (head.logits), or use a loss such as TaylorSoftmaxLoss"
            )
        if target is None:
            raise TypeError(NO_TARGET)
        check(input, target, self.weight, self.ignore_index)
        return _cross_entropy(self, self.log_numerator(input.to(widened(input.dtype))), target)

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return self.log_numerator(o)

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        return F.log_softmax(self.log_numerator(o), dim)


def _cross_entropy(loss: Loss, log_numerator: Tensor, target: Tensor) -> Tensor:
    target = target.to(log_numerator.dtype) if target.is_floating_point() else target.long()
    weight = None if loss.weight is None else loss.weight.to(log_numerator.dtype)
    return explained(
        lambda: F.cross_entropy(
            log_numerator,
            target,
            weight,
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=loss.label_smoothing,
        ),
        log_numerator,
        target,
        loss.ignore_index,
    )


def normalized(frequencies: Tensor) -> Tensor:
    """Frequencies (or counts) as float64 probabilities."""
    if frequencies.dim() != 1 or frequencies.numel() == 0:
        raise ValueError(f"frequencies have shape {tuple(frequencies.shape)}, but must be one number per class, (D,)")
    p = frequencies.to(torch.float64)
    if not bool((p > 0).all() & p.isfinite().all()):
        raise ValueError(
            f"frequencies must be positive and finite; the smallest is {float(p.min()):g} (for counts with zeros, add one)"
        )
    return p / p.sum()


def float_dtype(frequencies: Tensor) -> torch.dtype:
    return frequencies.dtype if frequencies.is_floating_point() else torch.get_default_dtype()
