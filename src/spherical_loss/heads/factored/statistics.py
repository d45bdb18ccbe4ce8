"""Forward and backward pass of factored heads: the statistics, and what the step needs.

    s = w^T h,    q = h^T Q h,    o_c = W_c h;      grad_h = g_s w + 2 g_q Q h + sum_k g_c W_c

Statistics add: heads over different classes give the sum of their s and q, and the head that has the target gives o_c. So this
is written for any number of heads, each with a range of the classes; a single one has all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from spherical_loss.heads.base import full_precision, selected, weighted_sum
from spherical_loss.heads.factored.batch import BatchGradients, HeadGradients
from spherical_loss.statistics import statistics_dtype

if TYPE_CHECKING:
    from spherical_loss.heads.factored.head import FactoredHead


class Span(NamedTuple):
    """A factored head and the classes it stands for: from ``start`` to ``stop``, or to the last one."""

    head: FactoredHead
    start: int = 0
    stop: int | None = None

    def among(self, classes: Tensor) -> slice:
        """Where the classes of this head are among sorted classes."""
        if self.start == 0 and self.stop is None:
            return slice(0, len(classes))
        stop = self.start + self.head.num_classes
        return slice(*torch.searchsorted(classes, torch.tensor([self.start, stop], device=classes.device)).tolist())


class Reader(Protocol):
    """Who asks for the statistics, and keeps the gradients for the step."""

    training: bool
    gradients: list[BatchGradients]

    @property
    def in_features(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def spans(self) -> list[Span]: ...


class FactoredStatistics(torch.autograd.Function):
    """``s``, ``q`` and ``o_c`` of factored heads; the backward pass leaves a :class:`BatchGradients` with the reader."""

    @staticmethod
    def forward(ctx: Any, H: Tensor, anchor: Tensor, reader: Reader, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spans = reader.spans
        with full_precision(H.device):
            X = spans[0].head.extended(H)
            unique, positions = classes.unique(return_inverse=True)
            products, current, W_rows = [], [], []
            for span in spans:
                products.append(X @ span.head.Q.value)
                rows, dense = span.head.read(unique[span.among(unique)] - span.start)
                current.append(rows)
                W_rows.append(dense)
            W_c = selected(_assembled(W_rows, spans, unique), positions)
            s = X @ _sum([span.head.w for span in spans]).to(X.dtype)
            q = (X * _sum(products)).sum(1)
            o_c = (W_c * X.unsqueeze(1)).sum(2)
        ctx.save_for_backward(X, W_c, unique, positions, *products, *current)
        ctx.reader, ctx.version, ctx.frames, ctx.dtype = reader, reader.version, [s.head.U.frame for s in spans], H.dtype
        precise = statistics_dtype(H.device)
        return s.to(precise), q.to(precise), o_c.to(precise)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        reader: Reader = ctx.reader
        if reader.version != ctx.version:
            raise RuntimeError(
                "the weights of the head changed (a step, or other weights) between this forward pass and its backward pass; "
                "run the forward pass again"
            )
        spans = reader.spans
        X, W_c, classes, positions, *saved = ctx.saved_tensors
        products, current = saved[: len(spans)], saved[len(spans) :]
        g_s, g_q, g_c = (g.to(X.dtype) for g in (g_s, g_q, g_c))
        heads = []
        with full_precision(X.device):
            slope = (2 * g_q).unsqueeze(1)
            for span, HQ, rows, frame in zip(spans, products, current, ctx.frames, strict=True):
                P = weighted_sum(own(g_c, positions, span.among(classes), len(classes)), W_c)
                grad_H = torch.addcmul(P, HQ, slope).addr_(g_s, span.head.w.to(X.dtype))
                heads.append(HeadGradients(grad_H, P, rows, frame))
            grad_H = _sum([head.grad_H for head in heads])[:, : reader.in_features]
        if reader.training:
            reader.gradients.append(BatchGradients(X, g_s, g_q, g_c, classes, positions, heads))
        # A copy: what the caller does to the gradient of the hidden vectors must not change the step.
        return grad_H.to(ctx.dtype, copy=True), None, None, None


def own(g_c: Tensor, positions: Tensor, mine: slice, n: int) -> Tensor:
    """g_c of the targets that stand at ``mine`` among the n classes of the batch, and 0 for the others."""
    if mine == slice(0, n):
        return g_c
    return g_c.masked_fill((positions < mine.start) | (positions >= mine.stop), 0)


def _assembled(W_rows: list[Tensor], spans: list[Span], classes: Tensor) -> Tensor:
    """Rows of W of the sorted classes, from the rows of each head; 0 for classes of none."""
    if len(W_rows[0]) == len(classes):
        return W_rows[0]
    assembled = W_rows[0].new_zeros(len(classes), W_rows[0].shape[1])
    for rows, span in zip(W_rows, spans, strict=True):
        assembled[span.among(classes)] = rows
    return assembled


def _sum(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum(0)
