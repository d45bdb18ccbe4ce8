"""The exact SGD step of :class:`~spherical_loss.heads.factored.FactoredHead`, in O(N d^2).

Dense SGD, with the bias as a column of W, weight decay l and ``r = 1 - lr l``, is

    W <- r W - lr (W A + 1 a^T + Delta),     A = 2 H^T diag(g_q) H,    a = H^T g_s,    Delta = g_c h^T in the target rows.

Let ``S = (2 lr / r) diag(g_q)``, ``A' = H^T S H`` and ``B = I - A'``; R are the rows of Delta that are not zero, one per class u
that occurs, and ``delta = 1^T Delta``. Then

    U  <- r U B                         U^-1 <- B^-1 U^-1 / r
    w0 <- r B w0 - lr a                 V_u  <- V_u - lr R U^-1        (with the new U)
    w  <- r B w - D lr a - lr delta

and, collecting the terms of W^T W in those of the form ``H^T X + X^T H`` and those of vectors (Y and P as in ``Backward``),

    Q  <- r^2 Q - (H^T X + X^T H) - lr (r B w a^T + a (r B w)^T) + lr^2 (D a a^T + a delta^T + delta a^T)
    X   = r lr (Y - (Y + P) A' / 2) - lr^2 / 2 (g_c R_c)

The inverse of B is its Neumann series, whose products run at full speed where a factorization does not; a step too
large for it closes the frame, after which no inverse is needed. For N < d / 2, A' is never formed: ``X A' = (X H^T) (S H)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spherical_loss.heads.factored import MAX_CONDITION, MAX_FRAMES, Backward, FactoredHead

LARGE_STEP = 0.25  # norm of A' from which a frame is closed rather than B inverted
SERIES_ERROR = 1e-7  # of the inverse of B, relative
REINVERT = 512  # steps after which U^-1 is computed from U again, so that its rounding errors do not add up


class FactoredSGD(torch.optim.Optimizer):
    """Plain SGD for a :class:`FactoredHead`, exactly as dense SGD would do it, in O(N d^2).

    It stands beside the optimizer of the trunk: ``zero_grad()``, ``backward()`` (several, to accumulate gradients), ``step()``;
    learning-rate schedulers and ``state_dict`` work as usual.

    Args:
        head: the head whose weights are trained.
        lr: learning rate. A good one is not comparable between losses, and grows with D; search over several decades.
        weight_decay: as in ``torch.optim.SGD``, for weights and bias.
        max_grad_norm: scale the gradient of this head down to this norm, as ``clip_grad_norm_`` does.
    """

    def __init__(self, head: FactoredHead, lr: float, weight_decay: float = 0.0, max_grad_norm: float | None = None) -> None:
        if not isinstance(head, FactoredHead):
            raise TypeError(f"FactoredSGD trains a FactoredHead, not {type(head).__name__}; use torch.optim for ordinary parameters")
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr is {lr}, but must be finite and not negative")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay is {weight_decay}, but must be finite and not negative")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, but must be positive, or None for no clipping")
        super().__init__([head.V], {"lr": lr, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm})
        self.head = head

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.head.backwards.clear()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the dense gradient of weights and bias, exactly: for clipping together with the trunk's."""
        batch = self._batch()
        _, R, _ = _target_rows(batch)
        return _grad_norm(self.head, batch, R)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        batch, group = self._batch(), self.param_groups[0]
        with torch.autocast(batch.H.device.type, enabled=False):
            _step(self.head, batch, float(group["lr"]), group["weight_decay"], group["max_grad_norm"])
        return value

    def _batch(self) -> Backward:
        batches = self.head.backwards
        if not batches:
            raise RuntimeError(
                "FactoredSGD.step() found no gradient: call loss(head(hidden, target)).backward() since the last zero_grad() or step(), "
                "with the head in train() mode"
            )
        if len(batches) == 1:
            return batches[0]
        K = max(b.classes.shape[1] for b in batches)  # a missing target is class 0 with gradient 0
        padded = [b._replace(g_c=_padded(b.g_c, K), classes=_padded(b.classes, K)) for b in batches]
        return Backward(*(torch.cat(parts) for parts in zip(*padded, strict=True)))


def _padded(x: Tensor, K: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, K - x.shape[1]))


def _target_rows(batch: Backward) -> tuple[Tensor, Tensor, Tensor]:
    """The classes that occur, their rows R of Delta, and for each target the index of its row."""
    unique, inverse = batch.classes.unique(return_inverse=True)
    R = batch.H.new_zeros(len(unique), batch.H.shape[1])
    for k in range(batch.classes.shape[1]):
        R.index_add_(0, inverse[:, k], batch.g_c[:, k : k + 1] * batch.H)
    return unique, R, inverse


def _grad_norm(head: FactoredHead, batch: Backward, R: Tensor) -> Tensor:
    """``||W A + 1 a^T + Delta||``, from ``sum(H A * (2 g_q H Q + 2 P)) + D a.a + R.R + 2 a.(A w) + 2 a.delta``."""
    H, Y, P, g_s, g_q, *_ = batch
    scaled = 2 * g_q.unsqueeze(1) * H
    HA = H @ (H.T @ scaled) if len(H) >= H.shape[1] // 2 else (H @ H.T) @ scaled
    H64, w = H.to(head.w.dtype), head.w
    a, delta = H64.T @ g_s.to(w.dtype), R.to(w.dtype).sum(0)
    Aw = scaled.to(w.dtype).T @ (H64 @ w)
    square = (HA * (Y + P)).sum(dtype=w.dtype) + R.to(w.dtype).square().sum() + a @ (head.num_classes * a + 2 * Aw + 2 * delta)
    return square.clamp_min(0).sqrt()


class _RightProduct:
    """``X -> X A'`` for ``A' = H^T S H``, through d x d or N x N, whichever is smaller; and the Neumann series of ``I - A'``."""

    def __init__(self, H: Tensor, S: Tensor) -> None:
        N, d = H.shape
        self.H, self.SH, self.wide = H, S.unsqueeze(1) * H, 2 * N >= d
        self.core = H.T @ self.SH if self.wide else self.SH @ H.T  # A', or the N x N matrix with the same non-zero spectrum
        self.norm = float((self.core * self.core.T).sum().clamp_min(0).sqrt())  # Frobenius norm of A', an upper bound of its largest eigenvalue

    def __call__(self, X: Tensor) -> Tensor:
        return X @ self.core if self.wide else (X @ self.H.T) @ self.SH

    def inverse_increment(self, M: Tensor) -> Tensor:
        """``B^-1 M - M``, that is ``(A' + A'^2 + ...) M``; needs ``norm < 1``."""
        terms = max(1, math.ceil(math.log(SERIES_ERROR) / math.log(self.norm))) if self.norm > 0 else 1
        series = _geometric(self.core, terms)
        if self.wide:
            return series @ M  # A' + ... + A'^terms
        # H^T (I + C + C^2 + ...) S H with C = S H H^T: one power less inside.
        right = self.SH @ M
        return self.H.T @ (right + series @ right)


def _geometric(C: Tensor, terms: int) -> Tensor:
    """``C + C^2 + ... + C^n`` with n a power of two >= terms, by doubling: ``G_2n = G_n + C^n G_n``."""
    G, power, n = C, C, 1
    while n < terms:
        G = G + power @ G
        n *= 2
        if n < terms:
            power = power @ power
    return G


def _check_invertible(product: _RightProduct, lr: float) -> None:
    if product.norm < 0.9:
        return
    eigenvalues = torch.linalg.eigvals(product.core.double()).real
    nearest = float(eigenvalues[(1 - eigenvalues).abs().argmin()])
    if abs(1 - nearest) < 1e-6:
        raise ValueError(f"lr={lr} makes I - lr A singular (lr A has the eigenvalue {nearest:.8f}), so that the step would erase a direction of W; use a smaller lr")


def _step(head: FactoredHead, batch: Backward, lr: float, weight_decay: float, max_grad_norm: float | None) -> None:
    r = 1 - lr * weight_decay
    if r <= 0:
        raise ValueError(f"lr * weight_decay is {lr * weight_decay}, but must be below 1: the weights would vanish or change sign")
    unique, R, inverse = _target_rows(batch)
    if max_grad_norm is not None:
        scale = float((max_grad_norm / (_grad_norm(head, batch, R) + 1e-6)).clamp_max(1))
        R = R * scale
        batch = batch._replace(Y=batch.Y * scale, P=batch.P * scale, g_s=batch.g_s * scale, g_q=batch.g_q * scale, g_c=batch.g_c * scale)
    H, Y, P, g_s, g_q, g_c, _ = batch
    dtype, precise = head.V.dtype, head.Q.dtype
    D = head.num_classes

    times_A = _RightProduct(H, (2 * lr / r) * g_q)
    if not math.isfinite(times_A.norm):
        _raise_not_finite(batch)
    _check_invertible(times_A, lr)

    # Q: the products in float32, the vectors and the sum in float64.
    R_c = torch.einsum("nk,nkd->nd", g_c, R[inverse])
    X = (Y - times_A(Y + P) / 2).mul_(r * lr).add_(R_c, alpha=-(lr**2) / 2)
    HX = (H.T @ X).to(precise)
    a, delta = H.to(precise).T @ g_s.to(precise), R.to(precise).sum(0)

    def times_B(v: Tensor) -> Tensor:
        return v - times_A.SH.to(precise).T @ (H.to(precise) @ v)

    rBw = r * times_B(head.w)
    outer = torch.outer(a, lr**2 * (D / 2 * a + delta) - lr * rBw) - HX
    Q = r**2 * head.Q + outer + outer.T
    if not math.isfinite(float(Q.sum())):
        _raise_not_finite(batch)

    head.Q = Q
    head.w = rBw - D * lr * a - lr * delta
    head.w0 = r * times_B(head.w0) - lr * a
    head.U = r * (head.U - times_A(head.U.to(dtype)))
    head.log_condition += math.inf if times_A.norm >= LARGE_STEP else 2 * math.atanh(times_A.norm)
    if head.log_condition > math.log(MAX_CONDITION):
        head.close_frame()
    elif head.steps % REINVERT == 0:
        head.U_inverse = torch.linalg.inv(head.U)
    else:
        head.U_inverse = (head.U_inverse + times_A.inverse_increment(head.U_inverse.to(dtype))) / r

    rows = head.brought_up(head.V[unique], head.frame[unique])
    head.V[unique] = rows.addmm_(R, head.U_inverse.to(dtype), alpha=-lr)
    head.frame[unique] = len(head.past)
    head.steps += 1
    head.backwards.clear()
    if len(head.past) >= MAX_FRAMES:
        head.refactor()


def _raise_not_finite(batch: Backward) -> None:
    names = {"hidden vectors": batch.H, "gradients of s": batch.g_s, "gradients of q": batch.g_q, "gradients of o_c": batch.g_c}
    bad = [name for name, x in names.items() if not bool(x.isfinite().all())] or ["the updated Gram matrix"]
    raise FloatingPointError(f"NaN or infinity in {', '.join(bad)}: the head was left as it was; call zero_grad() and skip this batch, or lower lr")
