"""The negative log-likelihoods among the losses: of a positive quadratic of the outputs, and of a softmax."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss._logits import family_loss, softmax_loss
from spherical_loss._targets import check, check_overwriting, explanation
from spherical_loss.base import NO_TARGET, Loss, SphericalLoss
from spherical_loss.quadratic import (
    SMALL,
    Quadratic,
    QuadraticLikelihoodFunction,
    SmallQuadraticLikelihoodFunction,
    StatisticsLikelihoodFunction,
    in_one_function,
    is_small,
    least,
    log_numerator,
    normalizer_of,
    numerator,
    quadratic_needs_float64,
    transformed,
    vertex,
)
from spherical_loss.statistics import Statistics, statistics_dtype, widened


def _quadratic_formula(g: Quadratic, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
    if s.shape == q.shape == o_c.shape and s.dtype == q.dtype == o_c.dtype and not transformed(o_c):
        return StatisticsLikelihoodFunction.apply(s, q, o_c, g, D)
    return torch.log(normalizer_of(g, s, q, D)) - torch.log(numerator(g, o_c))


def quadratic_loss(
    g: Quadratic,
    o: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """``-log g(o_c) / sum_k g(o_k)`` of logits, with checked options."""
    is_plain = weight is None and ignore_index < 0 and label_smoothing == 0.0
    if is_plain and is_small(o, target) and in_one_function(o):
        if overwrite_logits:
            check_overwriting(o)
        try:
            loss = SmallQuadraticLikelihoodFunction.apply(o, target, g, reduction, widened(o.dtype), overwrite_logits)
            if not _may_have_overflowed(loss):
                return loss
            return SmallQuadraticLikelihoodFunction.apply(o, target, g, reduction, torch.float64, overwrite_logits)
        except RuntimeError:  # a target to ignore, which torch does not find among the classes, or one out of range
            pass
    check(o, target, weight, ignore_index)
    all_classes = target.is_floating_point() or label_smoothing > 0
    if not all_classes and in_one_function(o):
        if overwrite_logits:
            check_overwriting(o)
        try:
            return QuadraticLikelihoodFunction.apply(o, target.long(), g, weight, ignore_index, reduction, overwrite_logits)
        except (IndexError, RuntimeError) as error:
            raise explanation(error, o, target, ignore_index) from error
    options = weight, ignore_index, reduction, label_smoothing
    if overwrite_logits or (o.numel() > SMALL and not all_classes):
        formula, precise = partial(_quadratic_formula, g), quadratic_needs_float64(g)
        return family_loss(formula, o, target, *options, overwrite_logits, precise)
    # softmax(log g(o)) is this loss's own distribution, so torch's cross-entropy of log g(o) is the same number, with any
    # option. It takes the fewest calls where those count; above, its N x D temporaries cost more than the kernel.
    log_g = partial(log_numerator, g)
    if o.device.type == "cpu" and not torch.compiler.is_compiling():
        loss = softmax_loss(log_g, o, target, *options)
        if not _may_have_overflowed(loss):
            return loss
    wide = o.to(statistics_dtype(o.device))  # also where a loss cannot be looked at, or only by waiting for the device
    return softmax_loss(log_g, wide, target, *options).to(widened(o.dtype))


def quadratic_probabilities(g: Quadratic, o: Tensor, dim: int) -> Tensor:
    values = numerator(g, o.to(widened(o.dtype)))
    return (values / values.sum(dim, keepdim=True)).to(o.dtype)


def quadratic_log_probabilities(g: Quadratic, o: Tensor, dim: int) -> Tensor:
    values = numerator(g, o.to(widened(o.dtype)))
    return (values.log() - values.sum(dim, keepdim=True).log()).to(o.dtype)


class QuadraticLikelihood(SphericalLoss):
    """``-log g(o_c) / sum_k g(o_k)`` with a positive quadratic ``g``."""

    is_likelihood = True
    needs_float64 = False
    a1: float
    a2: float
    a3: float

    @property
    def g(self) -> Quadratic:
        return Quadratic(self.a1, self.a2, self.a3)

    @property
    def vertex(self) -> float:
        return vertex(self.g)

    @property
    def least(self) -> float:
        return least(self.g)

    def formula(self, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
        return _quadratic_formula(self.g, s, q, o_c, D)

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return (o - vertex(self.g)).abs_()

    def forward(self, input: Tensor | Statistics, target: Tensor | None = None) -> Tensor:
        if isinstance(input, Statistics) or target is None:
            return super().forward(input, target)
        weight = self._buffers["weight"]  # without torch's search among parameters and modules, which takes a microsecond
        options = weight, self.ignore_index, self.reduction, self.label_smoothing
        return quadratic_loss(self.g, input, target, *options, self.overwrite_logits)

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        return quadratic_log_probabilities(self.g, o, dim)

    def probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        return quadratic_probabilities(self.g, o, dim)

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


def _may_have_overflowed(loss: Tensor) -> bool:
    """Whether a loss is not finite, as for outputs above 1e19, whose squares overflow, or cannot be read."""
    try:
        return not math.isfinite((loss if loss.dim() == 0 else loss.sum()).item())
    except RuntimeError:  # under vmap
        return True


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
        return softmax_loss(self.log_numerator, input, target, **self._options())

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return self.log_numerator(o)

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        return F.log_softmax(self.log_numerator(o), dim)


def as_tensor(numbers: Tensor | Sequence[float]) -> Tensor:
    """A tensor stays where it is; torch.as_tensor would move it to the default device, which may be meta."""
    return numbers if isinstance(numbers, Tensor) else torch.as_tensor(numbers, device="cpu")


def normalized(frequencies: Tensor | Sequence[float]) -> Tensor:
    """Frequencies (or counts) as float64 probabilities."""
    frequencies = as_tensor(frequencies)
    if frequencies.dim() != 1 or frequencies.numel() == 0:
        raise ValueError(f"frequencies have shape {tuple(frequencies.shape)}, but must be one number per class, (D,)")
    p = frequencies.to(torch.float64)
    if not bool((p > 0).all() & p.isfinite().all()):
        raise ValueError(
            f"frequencies must be positive and finite; the smallest is {float(p.min()):g} (for counts with zeros, add one)"
        )
    return p / p.sum()


def float_dtype(frequencies: Tensor | Sequence[float]) -> torch.dtype:
    frequencies = as_tensor(frequencies)
    return frequencies.dtype if frequencies.is_floating_point() else torch.get_default_dtype()
