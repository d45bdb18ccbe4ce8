"""Several factored heads, of which each has examples of its own, in one pass: the tails of an adaptive layer.

Few examples of a batch reach each of the heads, and there a call of torch takes longer than its arithmetic. So what does not
depend on the weights is computed for all examples together, and so are sums over the hidden size: those of an example are
taken from the columns of a product with the vectors of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spherical_loss.heads.base import full_precision
from spherical_loss.heads.factored.batch import BatchGradients, HeadGradients
from spherical_loss.heads.factored.head import FactoredHead
from spherical_loss.heads.factored.statistics import Span, check_version, local, where
from spherical_loss.heads.products import product
from spherical_loss.heads.split import split, without_rounding
from spherical_loss.statistics import statistics_dtype


def can_share(heads: Sequence[object]) -> bool:
    """Whether these are several factored heads of one process whose outputs are not computed."""
    factored = [head for head in heads if isinstance(head, FactoredHead)]
    return (
        1 < len(heads) == len(factored)
        and not any(head.is_small or head.shard.group is not None for head in factored)
        and len({(head.V.dtype, head.has_bias) for head in factored}) == 1
    )


def disjoint_statistics(
    spans: list[Span], H: Tensor, targets: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``s``, ``q``, ``o_c`` and ``D``, (N,) each, of examples that stand together by the head they belong to.

    Args:
        spans: T heads.
        H: (N, d) hidden vectors; the first ``sizes[0]`` are those of the first head, and so on.
        targets: (N,) in increasing order, as the spans count them.
        sizes: T numbers.
    """
    for head, _ in spans:
        head.check_untouched()
    # Filled, not copied from a list: a GPU would be waited for.
    which = torch.cat([targets.new_full((size,), t) for t, size in enumerate(sizes)])
    precise = statistics_dtype(H.device)
    D = torch.cat([H.new_full((n,), head.num_classes, dtype=precise) for (head, _), n in zip(spans, sizes, strict=True)])
    learns = any(head.training for head, _ in spans)
    anchor = H.new_empty(0, requires_grad=learns)  # asks for a backward pass also where the hidden vectors need no gradient
    return *DisjointStatistics.apply(H, anchor, spans, targets, sizes, which), D


class DisjointStatistics(torch.autograd.Function):
    """The statistics; the backward pass leaves a :class:`BatchGradients` with every head, also without an example."""

    @staticmethod
    def forward(
        ctx: Any, H: Tensor, anchor: Tensor, spans: list[Span], targets: Tensor, sizes: Sequence[int], which: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = [head for head, _ in spans]
        with full_precision(H.device):
            X = heads[0].extended(H)
            classes, positions = targets.unique_consecutive(return_inverse=True)
            slices = where(spans, classes)
            own = [local(classes, mine, start) for mine, (_, start) in zip(slices, spans, strict=True)]
            s, q, HQ, w = _sums(X, heads, sizes, which)
            rows, W_rows = zip(*(head.read(mine) for head, mine in zip(heads, own, strict=True)), strict=True)
            W_c = torch.cat(W_rows).index_select(0, positions)
            o_c = torch.linalg.vecdot(W_c, X).to(q.dtype)
        q = without_rounding(q, min(head.num_classes for head in heads))
        ctx.save_for_backward(X, q.to(X.dtype), W_c, targets, positions, HQ, w, which, *own, *rows)
        ctx.spans, ctx.sizes, ctx.slices, ctx.dtype = spans, sizes, slices, H.dtype
        ctx.versions, ctx.frames = [head.version for head in heads], [head.U.frame for head in heads]
        return s, q, o_c

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        spans: list[Span] = ctx.spans
        for (head, _), version in zip(spans, ctx.versions, strict=True):
            check_version(head, version)
        X, q, W_c, targets, positions, HQ, w, which, *saved = ctx.saved_tensors
        own, rows = saved[: len(spans)], saved[len(spans) :]
        g_s, g_q, g_c = (g.to(X.dtype) for g in (g_s, g_q, g_c))
        with full_precision(X.device):
            P = g_c.unsqueeze(1) * W_c
            grad_H = torch.addcmul(P, HQ, (2 * g_q).unsqueeze(1)).addcmul_(w.index_select(0, which), g_s.unsqueeze(1))
        per_example = (X, q.detach(), g_s, g_q, g_c.unsqueeze(1), targets.unsqueeze(1), positions.unsqueeze(1), grad_H, P)
        for t, parts in enumerate(zip(*(x.split(ctx.sizes) for x in per_example), strict=True)):
            (head, start), first = spans[t], ctx.slices[t].start
            if head.training:
                *of_loss, target, position, of_H, through_target = parts
                gradients = [HeadGradients(of_H, through_target, current_rows=rows[t], frame=ctx.frames[t])]
                of_classes = target - start, own[t], position - first
                head.keep(BatchGradients(*of_loss, *of_classes, gradients, ctx.versions[t]))  # type: ignore[call-arg]
        # A copy: what the caller does to the gradient of the hidden vectors must not change the step.
        return grad_H[:, : spans[0].head.in_features].to(ctx.dtype, copy=True), *[None] * 5


def _sums(
    X: Tensor, heads: Sequence[FactoredHead], sizes: Sequence[int], which: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``s``, ``q`` (N,) and ``Q h`` (N, d) of the head of each example, and ``w`` of all heads (T, d).

    As :func:`spherical_loss.heads.factored.statistics.sums`: ``q = alpha (alpha u + r)^T Q u + r^T Q h``.
    """
    precise = statistics_dtype(X.device)
    u, alpha, R = split(X)
    w, Qu = torch.stack([head.w for head in heads]), torch.stack([head.Q.times_vector(u) for head in heads])
    HQ = torch.cat([product(r, head.Q.value) for head, r in zip(heads, R.split(sizes), strict=True)])
    vectors = torch.stack([w, Qu])  # (2, T, d)
    rounded = vectors.to(X.dtype)
    HQ.addcmul_(rounded[1].index_select(0, which), alpha.unsqueeze(1))
    along_u = (vectors @ u.to(precise)).index_select(1, which)  # (2, N)
    along_r = (rounded @ R.T).gather(1, which.expand(2, 1, -1)).squeeze(1)
    alpha = alpha.to(precise)
    s, of_u = torch.addcmul(along_r.to(precise), along_u, alpha)
    return s, torch.addcmul(torch.linalg.vecdot(R, HQ).to(precise), alpha, of_u), HQ, rounded[0]
