"""A head with ordinary weights that never computes the logits, through the Gram matrix of the weights.

With ``Q = W^T W``, ``w = W^T 1``, ``u = W^T b`` and the hidden vectors as the rows of H (a bias is one more column):

    s = H w + sum(b),    q = rowsum(H * (H Q)) + 2 H u + b.b,    o_c = W_c . h + b_c

    grad_H = g_s w^T + 2 g_q (H Q + u) + g_c W_c
    grad_W = 1 a^T + W A + b t^T + (g_c h^T in the target rows),   A = 2 H^T diag(g_q) H,   a = H^T g_s,   t = 2 H^T g_q
    grad_b = sum(g_s) + W t + 2 b sum(g_q) + (g_c in the target rows)

The cost of only two matrix products depends on D, ``H W^T W`` and ``W (H^T diag H)``. Each can be associated either way:
through a d x d matrix (O(D d^2), better for N > d / 2 or so) or through N x D logits, a chunk at a time (O(N d D)). That
choice is the plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spherical_loss.heads.base import CHUNK, full_precision, target_rows, weighted_sum
from spherical_loss.heads.dense import ParameterHead
from spherical_loss.statistics import statistics_dtype, widened

BLOCK = 256  # columns of a block of the symmetric Gram matrix; fastest of 96 .. 384 at D=50,257, d=768


ROWS = 1024  # of W per matrix product with A, so that they are still in the cache when more is added to them


class Plan(NamedTuple):
    """How :class:`GramHead` computes a batch: the order of the same matmuls that takes fewer floating-point operations."""

    form: str
    """``"gram"`` or ``"logits"``."""
    gram_flops: int
    logits_flops: int


class GramHead(ParameterHead):
    """The exact statistics and the exact dense gradient in O(D d^2 + N d^2), without the N x D logits.

    The weight is an ordinary parameter: any optimizer, momentum, tied embeddings, gradient clipping, checkpoints and
    DistributedDataParallel work unchanged. It wins over :class:`DenseHead` when N is larger than about d. Differentiable once.

    >>> import torch
    >>> from spherical_loss import TaylorSoftmaxLoss
    >>> head = GramHead(16, 1000)
    >>> TaylorSoftmaxLoss()(head(torch.randn(64, 16), torch.arange(64))).backward()
    >>> head.weight.grad.shape, head.plan(64).form, head.plan(4).form
    (torch.Size([1000, 16]), 'gram', 'logits')
    """

    def plan(self, n: int) -> Plan:
        """Which form a batch of ``n`` examples takes."""
        d, D = self.in_features, self.num_classes
        blocks = -(-d // BLOCK)
        symmetric = (blocks + 1) / (2 * blocks)  # the share of the Gram matrix that is computed; the rest is mirrored
        gram = int(2 * D * d * d * (symmetric + 1) + 4 * n * d * d)
        logits = 8 * n * d * D
        return Plan("gram" if gram <= logits else "logits", gram, logits)

    def statistics(self, H: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _GramStatistics.apply(H, self.weight, self.bias, classes, self.plan(H.shape[0]).form)


class _GramStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, W: Tensor, b: Tensor | None, classes: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
        dtype = widened(W.dtype)
        with full_precision(H.device):
            X = H.to(dtype)
            HQ = X @ gram_matrix(W) if form == "gram" else _through_logits(X, W)
            w = W.sum(0, dtype=dtype)
            s, q = X @ w, torch.linalg.vecdot(X, HQ)
            o_c = torch.einsum("nkd,nd->nk", W[classes].to(dtype), X)
            u = None
            if b is not None:
                u = _transposed_product(W, b.to(dtype))
                s, q, o_c = s + b.sum(dtype=dtype), q + 2 * (X @ u) + b.to(dtype).square().sum(), o_c + b[classes]
        ctx.save_for_backward(H, W, b, classes, HQ, w, u)
        ctx.form = form
        precise = statistics_dtype(H.device)
        return s.to(precise), q.to(precise), o_c.to(precise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        H, W, b, classes, HQ, w, u = ctx.saved_tensors
        dtype = widened(W.dtype)
        g_s, g_q, g_c = g_s.to(dtype), 2 * g_q.to(dtype), g_c.to(dtype)
        grad_H = grad_W = grad_b = None
        with full_precision(H.device):
            X = H.to(dtype)
            if ctx.needs_input_grad[0]:
                grad_H = weighted_sum(g_c, W[classes].to(dtype))
                grad_H.addr_(g_s, w).addcmul_(g_q.unsqueeze(1), HQ if u is None else HQ + u)
                grad_H = grad_H.to(H.dtype)
            a, t = X.T @ g_s, X.T @ g_q
            if ctx.needs_input_grad[1]:
                grad_W = _product_with_A(X, g_q, W, a, ctx.form)
                if b is not None:
                    grad_W.addr_(b.to(grad_W.dtype), t.to(grad_W.dtype))
                _add_target_rows(grad_W, X, g_c, classes)
            if b is not None and ctx.needs_input_grad[2]:
                grad_b = _product(W, t) + g_s.sum() + b.to(dtype) * g_q.sum()
                grad_b = grad_b.index_add_(0, classes.flatten(), g_c.flatten()).to(b.dtype)
        return grad_H, grad_W, grad_b, None, None


def gram_matrix(W: Tensor) -> Tensor:
    """``W^T W``."""
    dtype = widened(W.dtype)
    Q = torch.zeros(W.shape[1], W.shape[1], dtype=dtype, device=W.device)
    for rows in _row_chunks(W):
        wide = rows.to(dtype)
        Q += symmetric_product(wide, wide)
    return Q


def symmetric_product(X: Tensor, Y: Tensor) -> Tensor:
    """``X^T Y`` that is known to be symmetric: computes the upper blocks and mirrors them, which halves the work."""
    d = X.shape[1]
    Q = torch.empty(d, d, dtype=X.dtype, device=X.device)
    for i in range(0, d, BLOCK):
        Q[i : i + BLOCK, i:] = X[:, i : i + BLOCK].T @ Y[:, i:]
        Q[i + BLOCK :, i : i + BLOCK] = Q[i : i + BLOCK, i + BLOCK :].T
    return Q


def _row_chunks(W: Tensor) -> tuple[Tensor, ...]:
    """W as a whole, or, if it must be widened to float32 first, in chunks."""
    return (W,) if W.dtype == widened(W.dtype) else W.split(max(1, CHUNK // W.shape[1]))


def _transposed_product(W: Tensor, b: Tensor) -> Tensor:
    rows = _row_chunks(W)
    return torch.stack([r.to(b.dtype).T @ b_r for r, b_r in zip(rows, b.split([len(r) for r in rows]), strict=True)]).sum(0)


def _product(W: Tensor, t: Tensor) -> Tensor:
    return torch.cat([rows.to(t.dtype) @ t for rows in _row_chunks(W)])


def _through_logits(X: Tensor, W: Tensor) -> Tensor:
    """``(X W^T) W``, a chunk of classes at a time."""
    HQ = torch.zeros_like(X)
    for rows in W.split(max(1, CHUNK // max(1, X.shape[0]))):
        chunk = rows.to(X.dtype)
        HQ.addmm_(X @ chunk.T, chunk)
    return HQ


def _product_with_A(X: Tensor, g_q: Tensor, W: Tensor, a: Tensor, form: str) -> Tensor:
    """``W A + 1 a^T`` with ``A = X^T diag(g_q) X`` (``g_q`` is doubled already), in the order of the plan."""
    scaled = g_q.unsqueeze(1) * X
    grad = torch.empty_like(W, memory_format=torch.contiguous_format)
    if form == "gram":
        A = symmetric_product(X, scaled)
        for rows, into in zip(W.split(ROWS), grad.split(ROWS), strict=True):
            into.copy_(rows.to(X.dtype) @ A + a) if into.dtype != X.dtype else torch.mm(rows, A, out=into).add_(a)
        return grad
    rows_per_chunk = max(1, CHUNK // max(1, X.shape[0]))
    for rows, into in zip(W.split(rows_per_chunk), grad.split(rows_per_chunk), strict=True):
        into.copy_(torch.addmm(a, rows.to(X.dtype) @ X.T, scaled))
    return grad


def _add_target_rows(grad_W: Tensor, X: Tensor, g_c: Tensor, classes: Tensor) -> None:
    """Add ``g_c h^T`` to the rows of the targets; in half precision the sum of each row is made in float32 first."""
    if grad_W.dtype == X.dtype:
        for k in range(classes.shape[1]):
            grad_W.index_add_(0, classes[:, k], g_c[:, k : k + 1] * X)
        return
    unique, inverse = classes.unique(return_inverse=True)
    grad_W.index_add_(0, unique, target_rows(X, g_c, inverse, len(unique)).to(grad_W.dtype))
