"""Positive quadratics of the outputs, and their likelihood as one autograd function.

g(x) = a1 + a2 x + a3 x^2 > 0,    Z = sum_k g(o_k),    L = log(Z / g(o_c)),
dL/do_k = g'(o_k) / Z - [k = c] g'(o_c) / g(o_c),    g'(x) = 2 a3 (x - vertex).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from spherical_loss.statistics import CANNOT_OVERWRITE, affine, blocks, fits_a_block, folded, scratch, widened

NO_GRADIENTS = (None,) * 6  # of the other arguments


class Quadratic(NamedTuple):
    """``g(x) = a1 + a2 x + a3 x^2 > 0``: the distribution is ``g(o_c) / sum_k g(o_k)``, the sum is ``a1 D + a2 s + a3 q``."""

    a1: float
    a2: float
    a3: float


def vertex(g: Quadratic) -> float:
    """Where ``g`` is smallest: classes are ranked by their distance from it, on either side."""
    return -g.a2 / (2 * g.a3)


def least(g: Quadratic) -> float:
    """The smallest value of ``g``."""
    return g.a1 - g.a2**2 / (4 * g.a3)


def numerator(g: Quadratic, o: Tensor) -> Tensor:
    """``g(o)`` as a square plus its smallest value: the terms of ``a1 + a2 o + a3 o^2`` would cancel near the vertex."""
    return g.a3 * (o - vertex(g)).square() + least(g)


def is_shifted_square(g: Quadratic) -> bool:
    """Whether ``g(x)`` is a multiple of ``(x - vertex)^2 + 1``, as for the Taylor softmax, whose logarithm takes few calls."""
    return g.a3 == least(g)


def log_numerator(g: Quadratic, o: Tensor) -> Tensor:
    """``log g(o)``, up to a constant, which cancels in the distribution."""
    if not is_shifted_square(g):
        return numerator(g, o).log()
    t = o - vertex(g)
    return (t * t).log1p()


def quadratic_needs_float64(g: Quadratic) -> bool:
    """At worst, for outputs sqrt(a1 / a3), the terms of a1 D + a2 s + a3 q are (1 + c) / (1 - c) times their sum. That is 5.8
    for the Taylor softmax and 1 for the spherical one; much more would cost float32 its digits."""
    c = abs(g.a2) / (2 * math.sqrt(g.a1 * g.a3))
    return (1 + c) > 10 * (1 - c)


def normalizer(g: Quadratic, o: Tensor, dtype: torch.dtype) -> Tensor:
    """``Z``, ``(N, 1, M)`` and float64, of outputs ``(N, D, M)``, with the sum over the classes made in ``dtype``."""
    N, D, M = o.shape
    if o.dtype == dtype and fits_a_block(o):
        sums = _terms(g, o).sum(1, keepdim=True).double()
    else:
        sums = torch.empty(N, 1, M, dtype=torch.float64)
        buffer = scratch(o, dtype)
        for block, total in blocks(o, sums):
            terms = buffer[: block.numel()].view(block.shape)
            x = block if block.dtype == dtype else terms.copy_(block)
            total.copy_(_terms(g, x, terms).sum(1, keepdim=True))
    return sums.mul_(g.a2 or g.a3).add_(g.a1 * D)


def _terms(g: Quadratic, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``a2 x + a3 x^2`` without a factor, ``a2`` or ``a3``, that is left to the sum: one pass instead of two."""
    return torch.addcmul(x, x, x, value=g.a3 / g.a2, out=out) if g.a2 else torch.mul(x, x, out=out)


def in_one_function(o: Tensor) -> bool:
    """Whether :class:`QuadraticLikelihoodFunction` takes these outputs: on the CPU, where looking at a value costs nothing, and
    outside of torch's transforms, which need to see the operations."""
    return o.device.type == "cpu" and not torch.compiler.is_compiling() and not _transformed(o)


def _transformed(o: Tensor) -> bool:
    """Under ``vmap``, ``torch.func`` or forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad.unpack_dual(o).tangent is not None


class QuadraticLikelihoodFunction(torch.autograd.Function):
    """The reduced loss of outputs ``(D,)`` or ``(N, D, ...)`` and their classes.

    Forward reads the outputs once, backward reads them once and writes the gradient. It is one function because the time of a
    small batch, 200 x 10, is that of the calls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        target: Tensor,
        g: Quadratic,
        weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        overwrite: bool,
    ) -> Tensor:
        x = o.reshape(folded(o.shape))
        index = target.view(x.shape[0], 1, x.shape[2])
        ignored = index == ignore_index
        if any_ignored := bool(ignored.any()):
            index = index.masked_fill(ignored, 0)
        Z = normalizer(g, x, torch.float64 if quadratic_needs_float64(g) else widened(o.dtype))
        if not math.isfinite(Z.sum()):  # squares of outputs above 1e19 / sqrt(D) overflow float32
            Z = normalizer(g, x, torch.float64)
        t_c = x.gather(1, index).double().sub_(vertex(g))
        g_c = (t_c * t_c).mul_(g.a3).add_(least(g))
        losses = (Z / g_c).log_()
        importance: Tensor | None = None  # of the examples, where they are not all alike
        if any_ignored or weight is not None:
            importance = torch.ones_like(Z) if weight is None else weight.double()[index]
            importance.masked_fill_(ignored, 0.0)
            losses = losses.masked_fill_(ignored, 0.0).mul_(importance)
        loss, share = _reduced(losses, importance, reduction)
        ctx.save_for_backward(o, index, t_c, g_c, Z, importance)
        ctx.share, ctx.g, ctx.overwrite = share, g, overwrite
        return loss.to(widened(o.dtype)) if reduction != "none" else loss.to(widened(o.dtype)).view(target.shape)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor | None, ...]:
        o, index, t_c, g_c, Z, importance = ctx.saved_tensors
        x = o.reshape(folded(o.shape))
        slope = (g_loss.reshape(Z.shape) if g_loss.dim() else g_loss).double() * (2 * ctx.g.a3 * ctx.share)
        if importance is not None:
            slope = slope * importance
        if torch.is_grad_enabled() or _transformed(g_loss):
            if ctx.overwrite:
                raise RuntimeError(CANNOT_OVERWRITE)
            return _plain_gradient(ctx.g, x, index, slope).reshape(o.shape).to(o.dtype), *NO_GRADIENTS
        everywhere = slope / Z
        # The terms of the target cancel where the loss is small, so they are summed before they are rounded.
        at_target = (everywhere - slope / g_c).mul_(t_c).to(o.dtype)
        grad = affine(x, everywhere, everywhere * -vertex(ctx.g), x.detach() if ctx.overwrite else None)
        return grad.scatter_(1, index, at_target).view(o.shape), *NO_GRADIENTS


def _reduced(losses: Tensor, importance: Tensor | None, reduction: str) -> tuple[Tensor, float]:
    """The losses, each times its importance, reduced, and the number that the reduction multiplies them by."""
    if reduction == "none":
        return losses, 1.0
    if reduction == "sum":
        return losses.sum(), 1.0
    if importance is None:
        return losses.mean(), 1 / max(1, losses.numel())
    total = float(importance.sum())
    return losses.sum() / total, 1 / total if total else 0.0  # torch's mean of no examples is nan, with a gradient of 0


def _plain_gradient(g: Quadratic, o: Tensor, index: Tensor, slope: Tensor) -> Tensor:
    """The same gradient by torch's own operations, differentiable itself."""
    wide = o.double()
    values, distance = numerator(g, wide), wide - vertex(g)
    at_target = distance.gather(1, index) / values.gather(1, index)
    return slope * (distance / values.sum(1, keepdim=True)).scatter_add(1, index, -at_target)
