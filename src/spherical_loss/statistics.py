"""The statistics of the spherical family, and the one kernel that computes them from logits.

A loss of the family sees the outputs ``o`` of an example only through

    s = sum(o),    q = ||o||^2,    o_c = o[target].

A head makes these numbers (:class:`Statistics`), a loss turns them into a number per example. They are float64: there
are three per example, so this costs almost nothing. The sums over the classes are float64 too where the loss needs it, so
that cancellations such as ``q - s^2 / D`` keep their digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PART = 2**7  # columns of a norm, so that its error is below that of torch's sum; as fast as longer ones
MANY_COLUMNS = 2**9  # from which on it is faster; with few, the rounding of the norm itself would be seen in the loss
CANNOT_OVERWRITE = (
    "overwrite_logits=True overwrites the logits in the backward pass, so it cannot be differentiated twice; "
    "leave it off where create_graph=True is needed"
)


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


def folded(shape: Sequence[int]) -> tuple[int, int, int]:
    """``(N, D, M)`` of outputs ``(D,)`` or ``(N, D, ...)``."""
    return (1, shape[0], 1) if len(shape) == 1 else (shape[0], shape[1], math.prod(shape[2:]))


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


def blocks(o: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of ``o``, ``(N, D, M)``, that stay in cache between two passes, and of others of its shape or ``(N, 1, M)``."""
    size, (N, D, M) = _block_size(o), o.shape
    if fits_a_block(o):
        yield o, *others
        return
    rows, columns = max(1, size // max(1, D * M)), max(1, min(M, size // max(1, D)))
    for n in range(0, N, rows):
        for m in range(0, M, columns):
            yield tuple(x[n : n + rows, :, m : m + columns] for x in (o, *others))


def fits_a_block(o: Tensor) -> bool:
    return o.numel() <= _block_size(o)


def _block_size(o: Tensor) -> int:
    # Of 2^16 .. 2^20 elements on CPU: at 250 x 10,000 the fastest. Elsewhere a launch costs more than the memory.
    return 2**19 if o.device.type == "cpu" else 2**25


def scratch(o: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for all blocks: new memory for every block would cost more than the arithmetic."""
    return torch.empty(min(o.numel(), max(_block_size(o), o.shape[1])), dtype=dtype, device=o.device)


class _DenseStatistics(torch.autograd.Function):
    """Reads ``o`` once forward; backward is :class:`_DenseGradient`, one read and one write."""

    @staticmethod
    def forward(o: Tensor, target: Tensor, overwrite: bool, float64: bool) -> tuple[Tensor, Tensor, Tensor]:
        precise = statistics_dtype(o.device)
        if float64 or o.device.type != "cpu":
            s, q = sums(o, precise)
        else:
            s, q = sums(o, widened(o.dtype))
            if not q.isfinite().all():  # squares of outputs above 1e19 / sqrt(D) overflow float32
                s, q = sums(o, precise)
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
            raise RuntimeError(CANNOT_OVERWRITE)
        o = o.detach()
        return _dense_gradient(o, target, g_s, g_q, g_c, out=o), None, None, None

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


def sums(o: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``sum(o)`` and ``sum(o^2)`` over the classes, each ``(N, M)``, of outputs ``(N, D, M)``, summed in ``dtype``."""
    N, D, M = o.shape
    if o.dtype == dtype and o.device.type == "cpu" and M == 1 and o.stride(1) == 1 and D >= MANY_COLUMNS:
        return o.sum(1).to(statistics_dtype(o.device)), _squared_norms(o.squeeze(2)).unsqueeze(1)
    s, q = torch.empty(2, N, 1, M, dtype=statistics_dtype(o.device), device=o.device)
    buffer = scratch(o, dtype)
    for block, sum_, square in blocks(o, s, q):
        wide = buffer[: block.numel()].view(block.shape)
        x = block if block.dtype == dtype else wide.copy_(block)
        sum_.copy_(x.sum(1, keepdim=True))
        square.copy_(torch.mul(x, x, out=wide).sum(1, keepdim=True))
    return s.squeeze(1), q.squeeze(1)


def _squared_norms(x: Tensor) -> Tensor:
    """Of each row, (N,) and float64. torch's norm reads memory once and writes nothing, but it adds up one by one: of 4,096
    equal columns it can be off by 6e-6, of 128 by 5e-7, as a sum of 10,000 squares can be. So it sees rows in parts."""
    parts = x.shape[1] // PART
    norms = torch.linalg.vector_norm(x[:, : parts * PART].unflatten(1, (parts, PART)), dim=2).double().square_().sum(1)
    rest = torch.linalg.vector_norm(x[:, parts * PART :], dim=1).double()
    return norms.addcmul_(rest, rest)


class _DenseGradient(torch.autograd.Function):
    """``grad_o = g_s + 2 g_q o``, plus ``g_c`` at the target; differentiable itself."""

    @staticmethod
    def forward(o: Tensor, target: Tensor, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> Tensor:
        return _dense_gradient(o, target, g_s, g_q, g_c)

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


def _dense_gradient(o: Tensor, target: Tensor, g_s: Tensor, g_q: Tensor, g_c: Tensor, out: Tensor | None = None) -> Tensor:
    target, g_s, slope, g_c = (x.unsqueeze(1) for x in (target, g_s, 2 * g_q, g_c))
    # The terms of the target cancel where the loss is small, so they are summed before they are rounded.
    at_target = g_s + slope * o.gather(1, target) + g_c
    return affine(o, slope, g_s, out).scatter_(1, target, at_target.to(o.dtype))


def affine(o: Tensor, slope: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """``slope o + offset`` of outputs ``(N, D, M)`` and numbers ``(N, 1, M)``, in new memory or in ``out``, also in ``o``."""
    on_cpu = o.device.type == "cpu"
    dtype = slope.dtype if on_cpu and _underflows(slope, widened(o.dtype)) else widened(o.dtype)
    slope, offset = slope.to(dtype), offset.to(dtype)
    if o.dtype == dtype and fits_a_block(o):
        return torch.mul(o, slope, out=out).add_(offset)
    out = torch.empty_like(o) if out is None else out
    if o.dtype == dtype and on_cpu and o.shape[2] == 1 and o.is_contiguous():
        return _affine_rows(o, slope, offset, out)
    buffer = scratch(o, dtype) if o.dtype != dtype else None
    for block, into, k, b in blocks(o, out, slope, offset):
        wide = into if buffer is None else buffer[: block.numel()].view(block.shape)
        torch.mul(block, k, out=wide).add_(b)
        if wide is not into:
            into.copy_(wide)
    return out


def _affine_rows(o: Tensor, slope: Tensor, offset: Tensor, out: Tensor) -> Tensor:
    """``slope o + offset`` with a slope and an offset per row, in one pass over memory: torch has this as the batch
    normalization of rows as channels, with mean 0 and variance 1.

    A thread has the same rows as in the sums of the forward pass, and so in its cache. Blocks, of which each thread would have
    a part, take five times as long in place at 250 x 10,000: the other core has what they write.
    """
    N, D, _ = o.shape
    slope, offset = slope.view(N), offset.view(N)
    mean, variance = torch.zeros_like(slope), torch.ones_like(slope)
    unused = o.new_empty(0), o.new_empty(0)  # for the mean and variance of training
    normalize = torch.ops.aten.native_batch_norm.out
    normalize(
        o.view(1, N, D), slope, offset, mean, variance, False, 0.0, 0.0,
        out=out.view(1, N, D), save_mean=unused[0], save_invstd=unused[1],
    )  # fmt: skip
    return out


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
