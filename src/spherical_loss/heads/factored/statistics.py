"""Forward and backward pass of factored heads: the statistics, and what the step needs.

    s = w^T h,    q = h^T Q h,    o_c = W_c h;      grad_h = g_s w + 2 g_q Q h + sum_k g_c W_c

Statistics add: heads over different classes give the sum of their s and q, and the head that has the target gives o_c. So this
is written for any number of heads, each with a range of the classes; a single one has all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from spherical_loss.heads.base import full_precision, selected, summed, weighted_sum
from spherical_loss.heads.factored.batch import BatchGradients, HeadGradients
from spherical_loss.heads.products import product
from spherical_loss.heads.split import split, without_rounding
from spherical_loss.statistics import statistics_dtype

if TYPE_CHECKING:
    from spherical_loss.heads.factored.head import FactoredHead


class Span(NamedTuple):
    """A factored head, and the first of the classes it stands for."""

    head: FactoredHead
    start: int = 0


def where(spans: list[Span], classes: Tensor) -> list[slice]:
    """Where the classes of each head are among sorted classes; a single head has all of them."""
    if len(spans) == 1 and spans[0].start == 0:
        return [slice(0, len(classes))]
    bounds = [bound for head, start in spans for bound in (start, start + head.num_classes)]
    if classes.device.type == "cpu":
        before = torch.searchsorted(classes, torch.tensor(bounds, device="cpu")).tolist()
    else:  # where a list would have to be copied to the device, and wait for it; so it is waited for once
        before = torch.stack([(classes < bound).sum() for bound in bounds]).tolist()
    return [slice(*pair) for pair in zip(before[::2], before[1::2], strict=True)]


class Reader(Protocol):
    """Who asks for the statistics, and keeps the gradients for the step."""

    training: bool
    gradients: list[BatchGradients]

    def keep(self, batch: BatchGradients) -> None: ...

    def remaining_factor(self) -> float: ...

    @property
    def in_features(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def spans(self) -> list[Span]: ...


class FactoredStatistics(torch.autograd.Function):
    """``s``, ``q`` and ``o_c`` of factored heads; the backward pass leaves a :class:`BatchGradients` with the reader."""

    @staticmethod
    def forward(ctx: Any, H: Tensor, anchor: Tensor, reader: Reader, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spans = reader.spans
        with full_precision(H.device):
            dtype = min((head.V.dtype for head, _ in spans), key=lambda dtype: dtype.itemsize)
            X = spans[0].head.extended(H, dtype)
            classes, positions = targets.unique(return_inverse=True)
            slices = where(spans, classes)
            s, q, products = sums(X, [head for head, _ in spans])
            current, W_rows = [], []
            for (head, start), mine in zip(spans, slices, strict=True):
                rows, dense = head.read(local(classes, mine, start))
                current.append(rows)
                W_rows.append(dense.to(dtype))
            W_c = selected(_assembled(W_rows, slices, len(classes)), positions)
            o_c = torch.linalg.vecdot(W_c, X.unsqueeze(1))
        ctx.save_for_backward(X, q.to(X.dtype), W_c, targets, classes, positions, *products, *current)
        ctx.reader, ctx.version, ctx.slices, ctx.dtype = reader, reader.version, slices, H.dtype
        ctx.frames = [span.head.U.frame for span in spans]
        return s, q, o_c.to(statistics_dtype(H.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        reader: Reader = ctx.reader
        check_version(reader, ctx.version)
        spans = reader.spans
        X, q, W_c, targets, classes, positions, *saved = ctx.saved_tensors
        products, current = saved[: len(spans)], saved[len(spans) :]
        g_s, g_q, g_c = (g.to(X.dtype) for g in (g_s, g_q, g_c))
        heads = []
        with full_precision(X.device):
            slope = (2 * g_q).unsqueeze(1)
            for (head, _), out, mine, rows, frame in zip(spans, products, ctx.slices, current, ctx.frames, strict=True):
                P = weighted_sum(own(g_c, positions, mine, len(classes)), W_c)
                if head.is_small:  # these are all of its outputs
                    grad_O = g_s.unsqueeze(1) + out * slope
                    heads.append(HeadGradients(P + product(grad_O, head.small_weight()).to(P.dtype), P, grad_O=grad_O))
                else:
                    grad_H = torch.addcmul(P, out, slope).addr_(g_s, head.w.to(X.dtype))
                    heads.append(HeadGradients(grad_H, P, current_rows=rows, frame=frame))
            grad_H = summed([head.grad_H for head in heads])[:, : reader.in_features]
        if reader.training:
            q = q.detach()  # an output of the forward pass has a graph, if it was not converted
            reader.keep(BatchGradients(X, q, g_s, g_q, g_c, targets, classes, positions, heads, ctx.version))
        # A copy: what the caller does to the gradient of the hidden vectors must not change the step.
        return grad_H.to(ctx.dtype, copy=True), None, None, None


def check_version(reader: Reader, version: int) -> None:
    if reader.version != version:
        raise RuntimeError(
            "the weights of the head changed (a step, or other weights) between this forward pass and its backward pass; "
            "run the forward pass again"
        )


def local(classes: Tensor, mine: slice, start: int) -> Tensor:
    """The classes of one head as it counts them."""
    return part(classes, mine) if start == 0 else classes[mine] - start


def part(rows: Tensor, mine: slice) -> Tensor:
    """The rows of one head."""
    return rows if mine == slice(0, len(rows)) else rows[mine]


def own(g_c: Tensor, positions: Tensor, mine: slice, n: int) -> Tensor:
    """g_c of the targets that stand at ``mine`` among the n classes of the batch, and 0 for the others."""
    if mine == slice(0, n):
        return g_c
    if mine.start == 0:
        return g_c.masked_fill(positions >= mine.stop, 0)
    before = positions < mine.start
    return g_c.masked_fill(before if mine.stop == n else before | (positions >= mine.stop), 0)


def sums(X: Tensor, heads: list[FactoredHead]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``s`` and ``q`` of all heads together, and for each ``H Q``, or the outputs if it is small.

    ``q = alpha^2 u^T Q u + 2 alpha r^T Q u + r^T Q r``, with ``Q u`` in float64: see :mod:`spherical_loss.heads.split`.
    """
    precise = statistics_dtype(X.device)
    s_parts, q_parts = [], []
    products = [_outputs(X, head.small_weight()) if head.is_small else X for head in heads]
    if large := [i for i, head in enumerate(heads) if not head.is_small]:
        u, alpha, R = split(X)
        Qu = [heads[i].Q.times_vector(u) for i in large]
        for i, Qu_i in zip(large, Qu, strict=True):
            products[i] = product(R, heads[i].Q.value).addr_(alpha, Qu_i.to(X.dtype))
        vectors = torch.stack([summed([heads[i].w for i in large]), summed(Qu)])  # w and Q u, (2, d)
        along_u, along_r = vectors @ u.to(precise), R @ vectors.to(X.dtype).T  # (2,) and (N, 2)
        alpha = alpha.to(precise)
        s, along = torch.addcmul(along_r.T.to(precise), along_u.unsqueeze(1), alpha)
        s_parts.append(s)
        HQ = summed([products[i] for i in large])
        q_parts.append(torch.addcmul(torch.linalg.vecdot(R, HQ).to(precise), alpha, along))
    for head, o in zip(heads, products, strict=True):
        if head.is_small:
            s_parts.append(o.sum(1, dtype=precise))
            q_parts.append(o.square().sum(1, dtype=precise))
    return summed(s_parts), without_rounding(summed(q_parts), sum(head.num_classes for head in heads)), products


def _outputs(X: Tensor, W: Tensor) -> Tensor:
    return product(X.to(W.dtype), W.T)


def _assembled(W_rows: list[Tensor], slices: list[slice], n: int) -> Tensor:
    """The rows of W of n classes from those of each head, of one dtype; 0 for classes of none."""
    if sum(map(len, W_rows)) == n:  # the heads have all of the classes, in their order
        return W_rows[0] if len(W_rows) == 1 else torch.cat(W_rows)
    assembled = W_rows[0].new_zeros(n, W_rows[0].shape[1])
    for rows, mine in zip(W_rows, slices, strict=True):
        assembled[mine] = rows
    return assembled
