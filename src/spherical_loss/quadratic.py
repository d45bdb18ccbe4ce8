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

from spherical_loss.reuse import room_like
from spherical_loss.statistics import CANNOT_OVERWRITE, affine, folded, sums, widened

NO_GRADIENTS = (None,) * 6  # of the other arguments
SMALL = 2**14  # outputs, up to which time is that of the calls
IN_CACHE = 2**19  # outputs, up to which more passes over them take less time than more calls: at 128 x 1,000 two thirds


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


def log_numerator(g: Quadratic, o: Tensor) -> Tensor:
    """``log g(o)``"""
    return numerator(g, o).log()


def quadratic_needs_float64(g: Quadratic) -> bool:
    """At worst, for outputs sqrt(a1 / a3), the terms of a1 D + a2 s + a3 q are (1 + c) / (1 - c) times their sum. That is 5.8
    for the Taylor softmax and 1 for the spherical one; much more would cost float32 its digits."""
    c = abs(g.a2) / (2 * math.sqrt(g.a1 * g.a3))
    return (1 + c) > 10 * (1 - c)


def normalizer(g: Quadratic, o: Tensor, dtype: torch.dtype) -> Tensor:
    """``Z / a3 = q + (a2 / a3) s + (a1 / a3) D``, ``(N, 1, M)`` and float64, of outputs ``(N, D, M)``; s and q are summed in
    ``dtype``."""
    s, q = sums(o, dtype)
    return q.add_(s, alpha=g.a2 / g.a3).add_(g.a1 / g.a3 * o.shape[1]).unsqueeze(1)


def in_one_function(o: Tensor) -> bool:
    """Whether :class:`QuadraticLikelihoodFunction` takes these outputs: on the CPU, where looking at a value costs nothing, and
    outside of torch's transforms, which need to see the operations."""
    return o.is_cpu and not transformed(o)


def transformed(o: Tensor) -> bool:
    """Under ``torch.compile``, ``vmap``, ``torch.func`` or forward-mode differentiation."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return forward_ad.unpack_dual(o).tangent is not None


def is_small(o: Tensor, target: Tensor) -> bool:
    """Whether :class:`SmallQuadraticLikelihoodFunction` takes these outputs and targets."""
    if target.dtype != torch.int64 or not o.is_floating_point():
        return False
    shape = o.shape
    return len(shape) > 1 and 0 < o.numel() <= IN_CACHE and target.shape == shape[:1] + shape[2:]


class QuadraticLikelihoodFunction(torch.autograd.Function):
    """The reduced loss of outputs ``(D,)`` or ``(N, D, ...)`` and their classes.

    With ``t = o - vertex`` and ``r = least / a3`` the factor a3 cancels: ``L = log(Z / g_c)`` for ``Z = sum_k (t_k^2 + r)`` and
    ``g_c = t_c^2 + r``, and ``dL/do_k = 2 t_k / Z - [k = c] 2 t_c / g_c``.

    Forward reads the outputs twice, backward reads them once and writes the gradient.
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
        ctx.room = room_like(x) if ctx.needs_input_grad[0] and not overwrite else None
        index, o_c, ignored = _at_targets(x, target.reshape(x.shape[0], 1, x.shape[2]), ignore_index)
        Z = normalizer(g, x, torch.float64 if quadratic_needs_float64(g) else widened(o.dtype))
        if not math.isfinite(Z.sum()):  # squares of outputs above 1e19 / sqrt(D) overflow float32
            Z = normalizer(g, x, torch.float64)
        t_c = o_c.double().sub_(vertex(g))
        ratio = Z / (t_c * t_c).add_(least(g) / g.a3)
        losses = ratio.log()
        importance: Tensor | None = None  # of the examples, where they are not all alike
        if ignored is not None or weight is not None:
            importance = torch.ones_like(Z) if weight is None else weight.double()[index]
            if ignored is not None:
                importance.masked_fill_(ignored, 0.0)
                losses = losses.masked_fill_(ignored, 0.0)
            losses = losses * importance
        loss, ctx.share = _reduced(losses, importance, reduction, widened(o.dtype))
        ctx.save_for_backward(o, index, t_c, Z, ratio, importance)
        ctx.g, ctx.overwrite = g, overwrite
        return loss if reduction != "none" else loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor | None, ...]:
        o, index, t_c, Z, ratio, importance = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed(g_loss):
            if ctx.overwrite:
                raise RuntimeError(CANNOT_OVERWRITE)
            x, share = o.reshape(folded(o.shape)), ctx.share if importance is None else ctx.share * importance
            slope = 2 * ctx.g.a3 * share * (g_loss.reshape(Z.shape) if g_loss.dim() else g_loss).double()
            return _plain_gradient(ctx.g, x, index, slope).reshape(o.shape).to(o.dtype), *NO_GRADIENTS
        slope = Z.reciprocal().mul_(g_loss.reshape(Z.shape) if g_loss.dim() else float(g_loss)).mul_(2 * ctx.share)
        if importance is not None:
            slope.mul_(importance)
        # 2 t_c / Z - 2 t_c / g_c: the terms cancel where the loss is small, so they are summed before they are rounded.
        at_target = torch.addcmul(slope, slope, ratio, value=-1).mul_(t_c)
        x = o.detach().reshape(folded(o.shape))
        grad = affine(x, slope, slope * -vertex(ctx.g), out=x if ctx.overwrite else ctx.room)
        ctx.room = None  # it belongs to who gets the gradient; another backward pass makes its own
        return grad.scatter_(1, index, at_target.to(o.dtype)).view(o.shape), *NO_GRADIENTS


class SmallQuadraticLikelihoodFunction(torch.autograd.Function):
    """The same for a batch without weights or ignored examples that stays in cache, such as 200 x 10 or 128 x 1,000: in as few
    calls as possible. Outputs are ``(N, D, ...)``, and computed in ``dtype``, in which their squares must not overflow.

    A reduction multiplies the losses by ``share``. With ``t = (o - vertex) / (2 share)``, and r, Z, g_c in the same unit, the
    gradient is ``t_k / Z - [k = c] t_c / g_c``, with no factor. Above ``SMALL`` outputs, the numbers per example are float64.
    """

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, target: Tensor, g: Quadratic, reduction: str, dtype: torch.dtype, overwrite: bool
    ) -> Tensor:
        share = 1 / target.numel() if reduction == "mean" else 1.0
        unit, index = 0.5 / share, target.unsqueeze(1)
        r, smallest = unit * unit * least(g) / g.a3, o.numel() <= SMALL
        o_c = None if smallest else o.gather(1, index)  # fails for a target to ignore, before any pass over memory
        t = torch.rsub(o if o.dtype == dtype else o.to(dtype), -unit * vertex(g), alpha=-unit)
        if o_c is None:
            G = (t * t).add_(r)
            Z, t_c, g_c = G.sum(1, keepdim=True), None, G.gather(1, index)
            ctx.room = None
        else:
            ctx.room = room_like(t) if ctx.needs_input_grad[0] and not overwrite else None
            Z = torch.mul(t, t, out=ctx.room).sum(1, keepdim=True).double().add_(r * o.shape[1])
            t_c = o_c.double().sub_(vertex(g)).mul_(unit)
            g_c = (t_c * t_c).add_(r)
        ratio = Z / g_c
        ctx.save_for_backward(o, index)
        ctx.g, ctx.share, ctx.overwrite = g, share, overwrite
        ctx.values = t, t_c, Z, ratio  # small ones, which are neither inputs nor outputs
        loss, _ = _reduced(ratio.log(), None, reduction, widened(o.dtype))
        return loss if reduction != "none" else loss.squeeze(1)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor | None, ...]:
        (o, index), (t, t_c, Z, ratio) = ctx.saved_tensors, ctx.values
        if torch.is_grad_enabled() or transformed(g_loss):
            if ctx.overwrite:
                raise RuntimeError(CANNOT_OVERWRITE)
            slope = 2 * ctx.g.a3 * ctx.share * (g_loss.unsqueeze(1) if g_loss.dim() else g_loss).double()
            return _plain_gradient(ctx.g, o, index, slope).to(o.dtype), None, None, None, None, None
        factor = g_loss.unsqueeze(1) if g_loss.dim() else float(g_loss)
        grad = t / Z if t_c is None else torch.div(t, Z.to(t.dtype), out=ctx.room)
        ctx.room = None  # it belongs to who gets the gradient; another backward pass makes its own
        if g_loss.dim() or factor != 1:
            grad.mul_(factor)
        # The target's term is Z / g_c times larger.
        grad_c = grad.gather(1, index) if t_c is None else t_c / Z * factor
        at_target = torch.addcmul(grad_c, grad_c, ratio, value=-1)
        grad.scatter_(1, index, at_target if t_c is None else at_target.to(grad.dtype))
        if ctx.overwrite:
            return o.detach().copy_(grad), None, None, None, None, None
        return grad if grad.dtype == o.dtype else grad.to(o.dtype), None, None, None, None, None


class StatisticsLikelihoodFunction(torch.autograd.Function):
    """``log(Z / g(o_c))`` for ``Z = a1 D + a2 s + a3 q``, elementwise, of statistics of one shape.

    In units of a3, with ``t = o_c - vertex`` and ``g_c = t^2 + r``: ``dL/dq = 1 / Z``, ``dL/ds = (a2 / a3) / Z``,
    ``dL/do_c = -2 t / g_c``.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, q: Tensor, o_c: Tensor, g: Quadratic, D: int) -> Tensor:
        Z = q.add(s, alpha=g.a2 / g.a3).add_(g.a1 / g.a3 * D)
        t = o_c - vertex(g)
        g_c = (t * t).add_(least(g) / g.a3)
        ctx.save_for_backward(s, q, o_c)
        ctx.g, ctx.D, ctx.values = g, D, (Z, t, g_c)  # small ones, which are neither inputs nor outputs
        return torch.log(Z / g_c)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor | None, ...]:
        (Z, t, g_c), g = ctx.values, ctx.g
        if torch.is_grad_enabled() or transformed(g_loss):  # the same by torch's own operations
            s, q, o_c = ctx.saved_tensors
            Z, t, g_c = normalizer_of(g, s, q, ctx.D) / g.a3, o_c - vertex(g), numerator(g, o_c) / g.a3
        g_q = g_loss / Z
        return g_q * (g.a2 / g.a3), g_q, g_loss * (-2 * t) / g_c, None, None


def normalizer_of(g: Quadratic, s: Tensor, q: Tensor, D: int) -> Tensor:
    """``sum_k g(o_k)`` of statistics"""
    return torch.add(g.a1 * D + g.a2 * s, q, alpha=g.a3)


def _at_targets(x: Tensor, index: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The classes, the outputs at them, and which examples are ignored, or None if there are none of these; an ignored class
    is replaced by class 0. A class out of range is torch's own error."""
    if ignore_index < 0:  # then no example is ignored where torch finds all targets
        try:
            return index, x.gather(1, index), None
        except RuntimeError:
            pass
    ignored = index == ignore_index
    if not ignored.any():
        return index, x.gather(1, index), None
    index = index.masked_fill(ignored, 0)
    return index, x.gather(1, index), ignored


def _reduced(losses: Tensor, importance: Tensor | None, reduction: str, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The losses, each times its importance, reduced and in ``dtype``, and the number that the reduction multiplies them by."""
    if reduction == "none":
        return losses.to(dtype), 1.0
    if reduction == "sum":
        return losses.sum().to(dtype), 1.0
    if importance is None:
        return losses.mean() if losses.dtype == dtype else losses.mean(dtype=dtype), 1 / max(1, losses.numel())
    total = float(importance.sum())
    # torch's mean of no examples is nan, with a gradient of 0
    return (losses.sum() / total).to(dtype), 1 / total if total else 0.0


def _plain_gradient(g: Quadratic, o: Tensor, index: Tensor, slope: Tensor) -> Tensor:
    """The same gradient by torch's own operations, differentiable itself."""
    wide = o.double()
    values, distance = numerator(g, wide), wide - vertex(g)
    at_target = distance.gather(1, index) / values.gather(1, index)
    return slope * (distance / values.sum(1, keepdim=True)).scatter_add(1, index, -at_target)
