"""The statistics of the spherical family, and the one kernel that computes them from logits.

A loss of the family sees the outputs ``o`` of an example only through

    s = sum(o),    q = ||o||^2,    o_c = o[target].

A head makes these numbers (:class:`Statistics`), a loss turns them into a number per example. They are float64: there
are three per example, so this costs almost nothing. The sums over the classes are float64 too where the loss needs it, so
that cancellations such as ``q - s^2 / D`` keep their digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """What a loss of the spherical family may know about a batch of outputs.

    Shapes: ``(...)`` is any batch shape. With K targets per example, ``o_c``, ``target`` and ``target_weight`` end in K.

    >>> import torch
    >>> o = torch.tensor([[1.0, 2.0, -1.0]])
    >>> statistics = Statistics.from_logits(o, torch.tensor([1]))
    >>> [float(x) for x in statistics[:3]], statistics.D
    ([2.0, 6.0, 2.0], 3)
    """

    s: Tensor
    """Sum of the outputs, ``(...)``."""
    q: Tensor
    """Squared norm of the outputs, ``(...)``."""
    o_c: Tensor
    """Output of the target, ``(...)`` or ``(..., K)``."""
    D: int
    """Number of classes."""
    target: Tensor | None = None
    """The target classes, shaped like ``o_c``; a negative target marks an example (or slot) to ignore."""
    target_weight: Tensor | None = None
    """Weights of the K targets, ``(..., K)``; the loss is the weighted sum over them."""
    nearby: tuple[Tensor, Tensor, Tensor] | None = None
    """``s``, ``q`` and ``o_c`` of weights that differ in the last bit, from a head that watches for chaos."""
    head: Any = None
    """The head that they are from, if it wants to meet the loss."""

    @staticmethod
    def from_logits(o: Tensor, target: Tensor) -> Statistics:
        """Statistics of logits ``(..., D)`` and one in-range target ``(...)`` per example."""
        D = o.shape[-1]
        s, q, o_c = (x.reshape(target.shape) for x in dense_statistics(o.reshape(-1, D, 1), target.reshape(-1, 1)))
        return Statistics(s, q, o_c, D, target)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 at least, since ``q`` overflows float16 and loses bits in bfloat16."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def statistics_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def dense_statistics(o: Tensor, target: Tensor, overwrite: bool = False, float64: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``s``, ``q`` and ``o_c``, each ``(N, M)``, of logits ``o`` of shape ``(N, D, M)`` and in-range targets ``(N, M)``.

    ``overwrite=True`` lets the backward pass write the gradient into the memory of ``o``. ``float64=False`` lets float32 do
    where it is faster, with a relative error of ``s`` and ``q`` of some 1e-7.
    """
    if torch.compiler.is_compiling():  # the compiler fuses these by itself, and would unroll the kernel's loop
        x = o.to(statistics_dtype(o.device))
        return x.sum(1), (x * x).sum(1), x.gather(1, target.unsqueeze(1)).squeeze(1)
    return _DenseStatistics.apply(o, target, overwrite, float64)


def _blocks(o: Tensor) -> Iterator[tuple[slice, slice]]:
    """Index ranges over N and M of blocks of ``o`` that stay in cache between two passes."""
    # Of 2^16 .. 2^20 elements on CPU: at 250 x 10,000 the fastest. Elsewhere a launch costs more than the memory.
    size = 2**19 if o.device.type == "cpu" else 2**25
    N, D, M = o.shape
    rows, columns = max(1, size // max(1, D * M)), max(1, min(M, size // max(1, D)))
    for n in range(0, N, rows):
        for m in range(0, M, columns):
            yield slice(n, n + rows), slice(m, m + columns)


def _scratch(o: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for all blocks: new memory for every block would cost more than the arithmetic."""
    block = max((o[n, :, m].numel() for n, m in _blocks(o)), default=0)
    return torch.empty(block, dtype=dtype, device=o.device)


class _DenseStatistics(torch.autograd.Function):
    """Reads ``o`` once forward; backward is :class:`_DenseGradient`, one read and one write."""

    @staticmethod
    def forward(o: Tensor, target: Tensor, overwrite: bool, float64: bool) -> tuple[Tensor, Tensor, Tensor]:
        precise = statistics_dtype(o.device)
        if float64 or o.device.type != "cpu":
            s, q = _sums(o, precise)
        else:
            s, q = _sums(o, widened(o.dtype))
            if not q.isfinite().all():  # squares of outputs above 1e19 / sqrt(D) overflow float32
                s, q = _sums(o, precise)
        return s, q, o.gather(1, target.unsqueeze(1)).squeeze(1).to(precise)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        o, target, overwrite, _ = inputs
        ctx.save_for_backward(o, target)
        ctx.save_for_forward(o, target)
        ctx.overwrite = overwrite

    @staticmethod
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor, None, None, None]:
        o, target = ctx.saved_tensors
        if not ctx.overwrite:
            return _DenseGradient.apply(o, target, g_s, g_q, g_c), None, None, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "overwrite_logits=True overwrites the logits in the backward pass, so it cannot be differentiated twice; "
                "leave it off where create_graph=True is needed"
            )
        return _dense_gradient(o, target, g_s, g_q, g_c, out=o.detach()), None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: None) -> tuple[Tensor, Tensor, Tensor]:
        o, target = ctx.saved_tensors
        t = t.to(statistics_dtype(o.device))
        return t.sum(1), 2 * (o * t).sum(1), t.gather(1, target.unsqueeze(1)).squeeze(1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], o: Tensor, target: Tensor, overwrite: bool, float64: bool) -> tuple[Any, Any]:
        if overwrite:
            raise RuntimeError("overwrite_logits=True does not work under vmap: the mapped calls would share the logits")
        folded = _fold(info.batch_size, in_dims, o, target)
        outputs = _DenseStatistics.apply(*folded, False, float64)
        return tuple(_unfold(info.batch_size, x) for x in outputs), (0, 0, 0)


def _sums(o: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``sum(o)`` and ``sum(o^2)`` over the classes, summed in ``dtype``."""
    N, _, M = o.shape
    s, q = torch.empty(2, N, M, dtype=statistics_dtype(o.device), device=o.device)
    scratch = _scratch(o, dtype)
    for n, m in _blocks(o):
        block = o[n, :, m]
        wide = scratch[: block.numel()].view(block.shape)
        s[n, m] = block.sum(1) if block.dtype == dtype else wide.copy_(block).sum(1)
        q[n, m] = (torch.mul(block, block, out=wide) if block.dtype == dtype else wide.mul_(wide)).sum(1)
    return s, q


class _DenseGradient(torch.autograd.Function):
    """``grad_o = g_s + 2 g_q o``, plus ``g_c`` at the target; differentiable itself."""

    @staticmethod
    def forward(o: Tensor, target: Tensor, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> Tensor:
        return _dense_gradient(o, target, g_s, g_q, g_c, out=torch.empty_like(o))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        o, target, _, g_q, _ = inputs
        ctx.save_for_backward(o, target, g_q)
        ctx.save_for_forward(o, target, g_q)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        o, target, g_q = ctx.saved_tensors
        wide = v.to(g_q.dtype)
        grad_o = (2 * g_q.unsqueeze(1) * wide).to(o.dtype)
        return grad_o, None, wide.sum(1), 2 * (wide * o).sum(1), wide.gather(1, target.unsqueeze(1)).squeeze(1)

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None, t_s: Tensor, t_q: Tensor, t_c: Tensor) -> Tensor:
        o, target, g_q = ctx.saved_tensors
        everywhere = t_s.unsqueeze(1) + 2 * (t_q.unsqueeze(1) * o + g_q.unsqueeze(1) * t)
        return everywhere.scatter_add(1, target.unsqueeze(1), t_c.unsqueeze(1)).to(o.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, Any]:
        folded = _fold(info.batch_size, in_dims, *inputs)
        return _unfold(info.batch_size, _DenseGradient.apply(*folded)), 0


def _dense_gradient(o: Tensor, target: Tensor, g_s: Tensor, g_q: Tensor, g_c: Tensor, out: Tensor) -> Tensor:
    target = target.unsqueeze(1)
    # The terms of the target cancel where the loss is small, so they are summed before they are rounded.
    at_target = g_s + 2 * g_q * o.gather(1, target).squeeze(1) + g_c
    slope = 2 * g_q
    dtype = slope.dtype if o.device.type == "cpu" and _underflows(slope, widened(o.dtype)) else widened(o.dtype)
    scratch = _scratch(o, dtype) if o.dtype != dtype else None
    g_s, slope = g_s.unsqueeze(1).to(dtype), slope.unsqueeze(1).to(dtype)
    for n, m in _blocks(o):
        block, into = o[n, :, m], out[n, :, m]
        wide = into if scratch is None else scratch[: block.numel()].view(block.shape)
        torch.mul(block, slope[n, :, m], out=wide).add_(g_s[n, :, m])
        if wide is not into:
            into.copy_(wide)
    return out.scatter_(1, target, at_target.unsqueeze(1).to(o.dtype))


def _underflows(slope: Tensor, dtype: torch.dtype) -> bool:
    """Whether digits of the slope are lost in ``dtype``: it falls with the square of the outputs, 1e-40 for those of 1e19."""
    tiny = torch.finfo(dtype).tiny
    if slope.numel() == 0 or float(torch.linalg.vector_norm(slope, -math.inf)) >= tiny:  # nearly always, in one call
        return False
    return bool(((slope.abs() < tiny) & (slope != 0)).any())


def _fold(batch: int, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """Fold a vmapped dimension into the first one, since every example is independent of the others."""
    dims = in_dims[: len(tensors)]
    pairs = zip(tensors, dims, strict=True)
    moved = [x.expand(batch, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs]
    return [x.flatten(0, 1) for x in moved]


def _unfold(batch: int, x: Tensor) -> Tensor:
    return x.unflatten(0, (batch, x.shape[0] // batch))
