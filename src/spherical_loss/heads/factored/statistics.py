"""Forward and backward pass of :class:`~spherical_loss.heads.FactoredHead`: the statistics, and what the step needs.

    s = w^T h,    q = h^T Q h,    o_c = W_c h;      grad_h = g_s w + 2 g_q Q h + sum_k g_c W_c

The gradient of W is never formed: its ingredients are kept until :class:`~spherical_loss.heads.FactoredSGD` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spherical_loss.heads.base import full_precision, selected, weighted_sum
from spherical_loss.statistics import statistics_dtype

if TYPE_CHECKING:
    from spherical_loss.heads.factored.head import FactoredHead


class Backward(NamedTuple):
    """What a backward pass leaves for the step; N examples, K targets each, d counts the bias column."""

    H: Tensor  # (N, d) hidden vectors
    Y: Tensor  # (N, d) 2 g_q Q h + P: the gradient of the hidden vector without the part of s
    P: Tensor  # (N, d) sum_k g_c W_c
    g_s: Tensor  # (N,)
    g_q: Tensor  # (N,)
    g_c: Tensor  # (N, K)
    unique: Tensor  # the classes that occur
    inverse: Tensor  # (N, K) where each target stands among them
    present: Tensor | None = None  # the rows of V of those classes, where they are at hand, as they were in the forward pass
    revision: int = -1  # that of the head at that time


class FactoredStatistics(torch.autograd.Function):
    """``s``, ``q`` and ``o_c`` of a :class:`FactoredHead`; the backward pass leaves a :class:`Backward` with the head."""

    @staticmethod
    def forward(ctx: Any, H: Tensor, anchor: Tensor, head: FactoredHead, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with full_precision(H.device):
            X = head.extended(H)
            HQ = X @ head.Q.value
            unique, inverse = classes.unique(return_inverse=True)
            present = head.present(unique) if head.shard.group is None else None
            W_c = selected(head.distant_rows(unique) if present is None else head.dense(present), inverse)
            s, q = X @ head.w.to(X.dtype), (X * HQ).sum(1)
            o_c = (W_c * X.unsqueeze(1)).sum(2)
        ctx.save_for_backward(X, HQ, W_c, unique, inverse, present)
        ctx.head, ctx.steps, ctx.edits, ctx.revision, ctx.dtype = head, head.steps, head.edits, head.revision, H.dtype
        precise = statistics_dtype(H.device)
        return s.to(precise), q.to(precise), o_c.to(precise)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        head: FactoredHead = ctx.head
        if (head.steps, head.edits) != (ctx.steps, ctx.edits):
            what = f"took {head.steps - ctx.steps} steps" if head.edits == ctx.edits else "was given other weights"
            raise RuntimeError(f"the head {what} between this forward pass and its backward pass; run the forward pass again")
        X, HQ, W_c, unique, inverse, present = ctx.saved_tensors
        g_s, g_q, g_c = (g.to(X.dtype) for g in (g_s, g_q, g_c))
        with full_precision(X.device):
            P = weighted_sum(g_c, W_c)
            Y = torch.addcmul(P, HQ, 2 * g_q.unsqueeze(1))
            if head.training:
                head.backwards.append(Backward(X, Y, P, g_s, g_q, g_c, unique, inverse, present, ctx.revision))
            d = head.in_features
            grad_H = torch.addr(Y[:, :d], g_s, head.w[:d].to(X.dtype)).to(ctx.dtype)
        return grad_H, None, None, None
