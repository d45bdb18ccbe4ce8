"""A head with ordinary weights that never computes the logits, through the Gram matrix of the weights.

With the hidden vectors as the rows of H, ``H = alpha u^T + R`` (:mod:`spherical_loss.heads.split`), the outputs are
``o = C gamma + W r``, where the columns of C are ``W u`` and the bias b, and ``gamma = (alpha, 1)``. With ``Q = W^T W``,

    s = R w + gamma C^T 1,    q = rowsum(R * (R Q)) + 2 rowsum(R * gamma C^T W) + gamma C^T C gamma,    o_c = W_c . h + b_c

    grad_H = g_s w^T + 2 g_q (R Q + gamma C^T W) + g_c W_c,    w = W^T 1
    grad_W = [1 C] [a T] + W A + (g_c h^T in the target rows)
        with a = H^T g_s,   A = 2 R^T diag(g_q) H = 2 R^T diag(g_q) R + 2 (R^T diag(g_q) alpha) u^T,   T = 2 gamma^T diag(g_q) H
    grad_b = sum(g_s) + W (2 R^T g_q) + C (2 gamma^T g_q) + (g_c in the target rows)

The cost of only two matrix products depends on D, ``R W^T W`` and ``W A``. Each can be associated either way:
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
from spherical_loss.heads.products import product
from spherical_loss.heads.split import Split, along, split, without_rounding
from spherical_loss.statistics import statistics_dtype, widened

BLOCK = 256  # columns of a block of the symmetric Gram matrix; fastest of 96 .. 384 at D=50,257, d=768


ROWS = 1024  # of W at a time on the CPU


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
        precise = statistics_dtype(H.device)
        with full_precision(H.device):
            X = H.to(dtype)
            u, alpha, R = split(X)
            gamma = _coefficients(alpha, b)
            columns, products = _products_with_columns(W, b, u)
            C, w, CW = columns[1:], products[0], products[1:]
            HQ = product(R, gram_matrix(W)) if form == "gram" else _through_logits(R, W)
            s = (R @ w).to(precise) + C.sum(1, dtype=precise) @ gamma.to(precise)
            q = torch.linalg.vecdot(R, HQ).to(precise) + 2 * (gamma * (CW @ R.T)).sum(0, dtype=precise)
            q += (gamma * ((C.to(precise) @ C.T.to(precise)) @ gamma.to(precise))).sum(0)
            HQ.addmm_(gamma.T, CW)
            o_c = torch.einsum("nkd,nd->nk", W[classes].to(dtype), X)
            o_c = o_c if b is None else o_c + b[classes]
        ctx.save_for_backward(H, W, b, classes, HQ, w, columns, u, alpha)
        ctx.form = form
        return s, without_rounding(q, len(W)), o_c.to(precise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_s: Tensor, g_q: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        H, W, b, classes, HQ, w, columns, u, alpha = ctx.saved_tensors
        dtype = widened(W.dtype)
        g_s, g_q, g_c = g_s.to(dtype), 2 * g_q.to(dtype), g_c.to(dtype)
        grad_H = grad_W = grad_b = None
        with full_precision(H.device):
            X = H.to(dtype)
            if ctx.needs_input_grad[0]:
                grad_H = weighted_sum(g_c, W[classes].to(dtype))
                grad_H = grad_H.addr_(g_s, w).addcmul_(g_q.unsqueeze(1), HQ).to(H.dtype)
            R, gamma = along(X, u, alpha).R, _coefficients(alpha, b)
            if ctx.needs_input_grad[1]:
                grad_W = _gradient_of_weights(X, Split(u, alpha, R), gamma, g_s, g_q, W, columns, ctx.form)
                _add_target_rows(grad_W, X, g_c, classes)
            if b is not None and ctx.needs_input_grad[2]:
                grad_b = (_product(W, R.T @ g_q) + g_s.sum()).addmv_(columns[1:].T, gamma @ g_q)
                grad_b = grad_b.index_add_(0, classes.flatten(), g_c.flatten()).to(b.dtype)
        return grad_H, grad_W, grad_b, None, None


def _products_with_columns(W: Tensor, b: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    """``[1 C]^T``, whose rows are ones, ``W u`` and b, (2 or 3, D), and its product with W, (2 or 3, d), in one pass over W."""
    columns = u.new_ones(2 if b is None else 3, len(W))
    if b is not None:
        columns[2] = b
    products = u.new_zeros(len(columns), len(u))
    size = _rows_at_once(W)
    for rows, part in zip(W.split(size), columns.split(size, 1), strict=True):
        wide = rows.to(u.dtype)
        torch.mv(wide, u, out=part[1])
        products.addmm_(part, wide)
    return columns, products


def _coefficients(alpha: Tensor, b: Tensor | None) -> Tensor:
    """``gamma = (alpha, 1)``, (1 or 2, N)."""
    return alpha.unsqueeze(0) if b is None else torch.stack([alpha, torch.ones_like(alpha)])


def gram_matrix(W: Tensor) -> Tensor:
    """``W^T W``."""
    dtype = widened(W.dtype)
    Q = torch.zeros(W.shape[1], W.shape[1], dtype=dtype, device=W.device)
    for rows in _row_chunks(W):
        wide = rows.to(dtype)
        Q += _symmetric_product(wide, wide)
    return Q


def _symmetric_product(X: Tensor, Y: Tensor) -> Tensor:
    """``X^T Y`` that is known to be symmetric: computes the upper blocks and mirrors them, which halves the work."""
    d = X.shape[1]
    Q = torch.empty(d, d, dtype=X.dtype, device=X.device)
    for i in range(0, d, BLOCK):
        Q[i : i + BLOCK, i:] = X[:, i : i + BLOCK].T @ Y[:, i:]
        Q[i + BLOCK :, i : i + BLOCK] = Q[i : i + BLOCK, i + BLOCK :].T
    return Q


def _rows_at_once(W: Tensor) -> int:
    """Rows that are still in the cache for what is done with them next; elsewhere a launch costs more than the memory."""
    return ROWS if W.device.type == "cpu" else max(1, CHUNK // W.shape[1])


def _row_chunks(W: Tensor) -> tuple[Tensor, ...]:
    """W as a whole, or, if it must be widened to float32 first, in chunks."""
    return (W,) if W.dtype == widened(W.dtype) else W.split(max(1, CHUNK // W.shape[1]))


def _product(W: Tensor, t: Tensor) -> Tensor:
    return torch.cat([rows.to(t.dtype) @ t for rows in _row_chunks(W)])


def _through_logits(X: Tensor, W: Tensor) -> Tensor:
    """``(X W^T) W``, a chunk of classes at a time."""
    HQ = torch.zeros_like(X)
    for rows in W.split(max(1, CHUNK // max(1, X.shape[0]))):
        chunk = rows.to(X.dtype)
        HQ += product(product(X, chunk.T), chunk)
    return HQ


def _gradient_of_weights(
    X: Tensor, parts: Split, gamma: Tensor, g_s: Tensor, g_q: Tensor, W: Tensor, columns: Tensor, form: str
) -> Tensor:
    """``[1 C] [a T] + W A`` (``g_q`` is doubled already), in the order of the plan."""
    u, alpha, R = parts
    aT = torch.cat([g_s.unsqueeze(0), gamma * g_q]) @ X
    grad = torch.empty_like(W, memory_format=torch.contiguous_format)
    if form == "gram":
        A = _symmetric_product(R, g_q.unsqueeze(1) * R).addr_(R.T @ (g_q * alpha), u)
    else:
        scaled = g_q.unsqueeze(1) * X
    size = _rows_at_once(W) if form == "gram" else max(1, CHUNK // max(1, X.shape[0]))
    for rows, part, into in zip(W.split(size), columns.split(size, 1), grad.split(size), strict=True):
        wide, out = rows.to(X.dtype), into if into.dtype == X.dtype else X.new_empty(into.shape)
        torch.mm(part.T, aT, out=out)
        out += product(wide, A) if form == "gram" else product(product(wide, R.T), scaled)
        if out is not into:
            into.copy_(out)
    return grad


def _add_target_rows(grad_W: Tensor, X: Tensor, g_c: Tensor, classes: Tensor) -> None:
    """Add ``g_c h^T`` to the rows of the targets; in half precision the sum of each row is made in float32 first."""
    if grad_W.dtype == X.dtype:
        for k in range(classes.shape[1]):
            grad_W.index_add_(0, classes[:, k], g_c[:, k : k + 1] * X)
        return
    distinct, inverse = _distinct(classes, len(grad_W))
    grad_W.index_add_(0, distinct, target_rows(X, g_c, inverse, len(distinct)).to(grad_W.dtype))


def _distinct(classes: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """As ``classes.unique(return_inverse=True)``, filled up with zeros to min(N K, D): only the device knows how many
    there are.

    >>> _distinct(torch.tensor([[7, 2], [7, 5]]), D=10)
    (tensor([2, 5, 7, 0]), tensor([[2, 0],
            [2, 1]]))
    """
    ordered, order = classes.flatten().sort()
    position = ordered.diff(prepend=ordered[:1]).ne(0).cumsum(0)
    inverse = torch.empty_like(order).index_copy_(0, order, position)
    distinct = ordered.new_zeros(min(len(ordered), D)).index_copy_(0, position, ordered)
    return distinct, inverse.view(classes.shape)
