"""The exact SGD step of :class:`~spherical_loss.heads.FactoredHead`, in O(N d^2).

Dense SGD, with the bias as a column of W, weight decay l and ``r = 1 - lr l``, is

    W <- r W - lr (W A + 1 a^T + Delta),     A = 2 H^T diag(g_q) H,    a = H^T g_s,    Delta = g_c h^T in the target rows.

Let ``S = (2 lr / r) diag(g_q)``, ``A' = H^T S H`` and ``B = I - A'``; R are the rows of Delta that are not zero, one per class
u that occurs, and ``delta = 1^T Delta``. Then

    U  <- r U B                         U^-1 <- B^-1 U^-1 / r          (rho <- r rho, and I - E and I + F as U and U^-1)
    w0 <- r B w0 - lr a                 V_u  <- V_u - lr R U^-1        (with the new U)
    w  <- r B w - D lr a - lr delta

and, collecting the terms of W^T W, with ``a = H^T g_s`` and Y and P as in ``Backward``,

    Q  <- r^2 Q - r lr (H^T X + X^T H),     X = Y - (Y + P) A' / 2 - lr / (2 r) (g_c R_c) + g_s v^T
                                            v = B w - (lr / r) (D / 2 a + delta)

The inverse of B is its Neumann series, whose products run at full speed where a factorization does not; a step too
large for it closes the frame, after which no inverse is needed. For N < d / 2, A' is never formed: ``X A' = (X H^T) (S H)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from spherical_loss.heads.base import full_precision, selected, target_rows, weighted_sum
from spherical_loss.heads.factored.head import FactoredHead
from spherical_loss.heads.factored.shard import Shard
from spherical_loss.heads.factored.statistics import Backward

MAX_CONDITION = 1e2  # of U: float32 rounding (6e-8) times this is the error of one written increment, relative to itself
MAX_FRAMES = 48  # d x d matrices kept; closing a frame costs one product for each
MAX_SHRINKAGE = 1e8  # of U by weight decay in a frame: float32 reaches to 1e38, and so must the inverse
LARGE_STEP = 0.25  # norm of A' from which a frame is closed rather than B inverted
SETTLE = 32  # steps after which the changes of Q are added up in float64
SERIES_ERROR = 5  # of the inverse of B, relative, in units of the rounding error of its dtype; at most
MAX_RESIDUAL = 50  # of U^-1 U, in the same units, by what was left out of the series: then a Newton step takes it away


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
            raise TypeError(
                f"FactoredSGD trains a FactoredHead, not {type(head).__name__}; use torch.optim for ordinary parameters"
            )
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr is {lr}, but must be finite and not negative")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay is {weight_decay}, but must be finite and not negative")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, but must be positive, or None for no clipping")
        # The head has no parameters: the step finds its tensors in the head, also after head.to(...), which makes new ones.
        super().__init__([torch.empty(0)], {"lr": lr, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm})
        self.head = head

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "head": self.head}  # torch's own has its own attributes only

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.head.backwards.clear()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the dense gradient of weights and bias, exactly: for clipping together with the trunk's."""
        batch = self._batch()
        with full_precision(batch.H.device):
            return _grad_norm(self.head, batch, _target_rows(batch))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        batch, group = self._batch(), self.param_groups[0]
        with full_precision(batch.H.device):
            _step(self.head, batch, float(group["lr"]), group["weight_decay"], group["max_grad_norm"])
        return value

    def _batch(self) -> Backward:
        batches = self.head.backwards
        if not batches:
            raise RuntimeError(
                "FactoredSGD found no gradient: call loss(head(hidden, target)).backward() after the last zero_grad() or "
                "step(), with the head in train() mode"
            )
        batch = batches[0] if len(batches) == 1 else _joined(batches)
        return batch if self.head.shard.group is None else _gathered(batch, self.head.shard)


def _joined(batches: list[Backward]) -> Backward:
    """Several backward passes as one; a missing target is any class, with gradient 0."""
    K = max(b.g_c.shape[1] for b in batches)
    classes = torch.cat([pad(b.unique[b.inverse], (0, K - b.g_c.shape[1])) for b in batches])
    unique, inverse = classes.unique(return_inverse=True)
    g_c = torch.cat([pad(b.g_c, (0, K - b.g_c.shape[1])) for b in batches])
    H, Y, P, g_s, g_q = (torch.cat(parts) for parts in zip(*(b[:5] for b in batches), strict=True))
    return Backward(H, Y, P, g_s, g_q, g_c, unique, inverse)


def _gathered(batch: Backward, shard: Shard) -> Backward:
    """The backward passes of all ranks as one, that of the mean of their losses; their floats travel as one tensor."""
    floats = [batch.H, batch.Y, batch.P, batch.g_s.unsqueeze(1), batch.g_q.unsqueeze(1), batch.g_c]
    classes, packed = map(torch.cat, shard.gather(batch.unique[batch.inverse], torch.cat(floats, 1)))
    unique, inverse = classes.unique(return_inverse=True)
    H, *gradients = packed.split([x.shape[1] for x in floats], 1)
    Y, P, g_s, g_q, g_c = (g / shard.ranks for g in gradients)
    return Backward(H.contiguous(), Y, P, g_s.squeeze(1), g_q.squeeze(1), g_c, unique, inverse)


def _target_rows(batch: Backward) -> Tensor:
    """R: the rows of Delta that are not zero, one for each class that occurs."""
    return target_rows(batch.H, batch.g_c, batch.inverse, len(batch.unique))


def _grad_norm(head: FactoredHead, batch: Backward, R: Tensor) -> Tensor:
    """``||W A + 1 a^T + Delta||``, from ``sum(H A * (2 g_q H Q + 2 P)) + D a.a + R.R + 2 a.(A w) + 2 a.delta``."""
    H, Y, P, g_s, g_q = batch[:5]
    times_A = _ProductsWithA(H, 2 * g_q)
    a, delta = (H.T @ g_s).to(head.w.dtype), R.sum(0, dtype=head.w.dtype)
    Aw = times_A.vector(head.w)
    square = (torch.mm(*times_A.factors(H)) * (Y + P)).sum(dtype=a.dtype) + R.square().sum(dtype=a.dtype)
    return (square + a @ (head.num_classes * a + 2 * Aw + 2 * delta)).clamp_min(0).sqrt()


class _ProductsWithA:
    """Products with ``A' = H^T S H``, ``B = I - A'`` and the inverse of B, through d x d or N x N, whichever is smaller."""

    def __init__(self, H: Tensor, S: Tensor) -> None:
        N, d = H.shape
        self.H, self.S, self.wide = H, S.unsqueeze(1), d <= 2 * N
        self.SH = self.S * H
        # A', or C = S H H^T: the N x N matrix with the same eigenvalues
        self.core = H.T @ self.SH if self.wide else (H @ H.T).mul_(self.S)

    def factors(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is ``X A'``: what it is added to is for the caller to say, and is written only once."""
        return (X, self.core) if self.wide else (X @ self.H.T, self.SH)

    def vector(self, v: Tensor) -> Tensor:
        """``A' v``, as precise as A' is."""
        x = v.to(self.core.dtype)
        return (self.core @ x if self.wide else self.SH.T @ (self.H @ x)).to(v.dtype)

    def norm(self) -> float:
        """Frobenius norm of A', an upper bound of its largest eigenvalue, and close to it where one direction dominates."""
        if self.wide:
            return float(torch.linalg.vector_norm(self.core))
        square = float((self.core * self.core.T).sum())
        return math.sqrt(max(0.0, square)) if math.isfinite(square) else math.nan

    def root_of_square(self, norm: float, error: float) -> tuple[Tensor, float] | None:
        """y with ``A'^2 = y y^T`` up to ``error``, where one direction dominates A', as the mean of rectifiers does; its error.

        For ``y = A' v`` with any unit vector v, ``A'^2 - y y^T = A' (I - v v^T) A'``, whose norm is at most
        ``||A'||^2 - ||y||^2``. Here v is one step of the power method from a vector of ones.
        """
        y = self.core @ normalize(self.core.sum(0), dim=0)
        difference = max(0.0, norm**2 - float(y @ y))
        return (y, difference) if difference < error else None

    def times_B_(self, E: Tensor) -> None:
        """``I - E <- (I - E) B``"""
        if self.wide:
            E.add_(torch.addmm(self.core, E, self.core, alpha=-1))
        else:
            E.addmm_(torch.addmm(self.H, self.H, E.T, alpha=-1).T, self.SH)

    def times_inverse_(self, F: Tensor, terms: int) -> Tensor:
        """``I + F <- B^-1 (I + F)`` through N x N, with this many terms of the series; gives the new ``H (I + F)``.

        ``H B^-1 = (I + C^T + C^T^2 + ...) H``, and ``B^-1 = I + H^T S H B^-1``: so the one serves the other.
        """
        HM = torch.addmm(self.H, self.H, F)
        HM = torch.addmm(HM, _geometric(self.core, terms).T, HM)
        F.addmm_(self.H.T, self.S * HM)
        return HM


def _geometric(C: Tensor, terms: int) -> Tensor:
    """``C + C^2 + ... + C^n`` for n terms, a power of two, by doubling: ``G_2n = G_n + C^n G_n``."""
    if terms == 1:
        return C
    power = C @ C
    G, n = C + power, 2
    while n < terms:
        G = torch.addmm(G, power, G)
        n *= 2
        if n < terms:
            power = power @ power
    return G


def _check_invertible(times_A: _ProductsWithA, lr: float) -> None:
    eigenvalues = torch.linalg.eigvals(times_A.core.double()).real
    nearest = float(eigenvalues[(1 - eigenvalues).abs().argmin()])
    if abs(1 - nearest) < 1e-6:
        raise ValueError(
            f"lr={lr} makes I - lr A singular (lr A has the eigenvalue {nearest:.8f}): the step would erase a direction of W; "
            "use a smaller lr"
        )


def _step(head: FactoredHead, batch: Backward, lr: float, weight_decay: float, max_grad_norm: float | None) -> None:
    r = 1 - lr * weight_decay
    if r <= 0:
        raise ValueError(f"lr * weight_decay is {lr * weight_decay}, but must be below 1: the weights would vanish or flip")
    R = _target_rows(batch)
    H, Y, P, g_s, g_q, g_c, unique, inverse, present, revision = batch
    if revision != head.revision:  # rows of V have been written since the forward pass
        present = None
    if max_grad_norm is not None:
        scale = (max_grad_norm / (_grad_norm(head, batch, R) + 1e-6)).clamp_max(1).to(R.dtype)
        Y, P, g_s, g_q, g_c, R = (x * scale for x in (Y, P, g_s, g_q, g_c, R))
    D = head.num_classes

    # Nothing is written unless all that is new will be finite.
    times_A = _ProductsWithA(H, (2 * lr / r) * g_q)
    a, delta = (H.T @ g_s).to(head.w.dtype), R.sum(0).to(head.w.dtype)
    rBw = r * (head.w - times_A.vector(head.w))
    v = rBw / r - (lr / r) * (D / 2 * a + delta)
    X = Y.sub(weighted_sum(g_c, selected(R, inverse)), alpha=lr / (2 * r)).addmm_(*times_A.factors(Y + P), alpha=-0.5)
    X.addr_(g_s, v.to(X.dtype))
    norm = times_A.norm()
    if not math.isfinite(norm + float(torch.linalg.vector_norm(H) * torch.linalg.vector_norm(X))):  # >= any entry of H^T X
        raise FloatingPointError(_not_finite(batch))
    if norm > 0.9:  # below, every eigenvalue of I - lr A is positive
        _check_invertible(times_A, lr)

    if head.steps % SETTLE == 0:
        head.Q.settle()
    head.Q.subtract_(H.T, X, alpha=r * lr, scale=r**2)
    head.w.copy_(rBw - lr * (D * a + delta))
    head.w0.copy_(r * (head.w0 - times_A.vector(head.w0)) - lr * a)
    head.log_condition += _log_condition(norm, bool((g_q >= 0).all())) if norm < LARGE_STEP else math.inf
    times_A.times_B_(head.E)
    head.log_scale += math.log(r)
    if head.log_condition > math.log(MAX_CONDITION) or abs(head.log_scale) > math.log(MAX_SHRINKAGE):
        head.close_frame()
        present, increments = None if present is None else present @ head.past[-1], R  # U^-1 is the identity
    else:
        HM = _update_inverse(head, times_A, norm)
        increments = torch.addmm(R, R, head.F) if HM is None else target_rows(HM, g_c, inverse, len(unique))
    head.add_to_rows(unique, increments, -lr / head.rho, present)
    head.steps += 1
    head.backwards.clear()
    if len(head.past) >= MAX_FRAMES:
        head.refactor()


def _log_condition(norm: float, positive: bool) -> float:
    """A bound of the log of the condition number of ``B = I - A'``: with ``g_q >= 0``, no eigenvalue is above 1."""
    return -math.log1p(-norm) if positive else 2 * math.atanh(norm)


def _update_inverse(head: FactoredHead, times_A: _ProductsWithA, norm: float) -> Tensor | None:
    """``I + F <- B^-1 (I + F)``; t terms of the series leave an error of ``norm^(t + 1)``. Gives ``H (I + F)`` if N < d / 2."""
    F, eps = head.F, torch.finfo(head.F.dtype).eps
    error = SERIES_ERROR * eps
    needed = 1 if norm == 0 else max(1, math.ceil(math.log(error) / math.log(norm)) - 1)
    terms = 2 ** math.ceil(math.log2(needed))
    left_out = norm ** (terms + 1)
    HM = None
    if not times_A.wide:
        HM = times_A.times_inverse_(F, terms)
    elif terms == 2 and (root := times_A.root_of_square(norm, error)) is not None:
        y, difference = root
        left_out += difference
        yM = y + y @ F
        F.add_(torch.addmm(times_A.core, times_A.core, F)).addr_(y, yM)
    else:
        series = _geometric(times_A.core, terms)
        F.add_(torch.addmm(series, series, F))
    head.residual += left_out
    if head.residual > MAX_RESIDUAL * eps:
        _newton(head)
    return HM


def _newton(head: FactoredHead) -> None:
    """A Newton step, which squares the residual ``(I + F) (I - E) - I = F - E - F E``: ``F <- F - residual (I + F)``.

    With ``(I - E) (I + F)`` instead, the rounding errors would be multiplied by F twice.
    """
    residual = torch.addmm(head.F - head.E, head.F, head.E, alpha=-1)
    head.F.sub_(torch.addmm(residual, residual, head.F))
    head.residual = 0.0


def _not_finite(batch: Backward) -> str:
    names = {"the hidden vectors": batch.H, "g_s": batch.g_s, "g_q": batch.g_q, "g_c": batch.g_c}
    bad = {name: (~x.isfinite()).reshape(len(x), -1).any(1).nonzero().flatten().tolist() for name, x in names.items()}
    found = [f"{name} of {len(rows)} of {len(batch.H)} examples, first {rows[0]}" for name, rows in bad.items() if rows]
    return (
        f"NaN or infinity in {' and '.join(found or ['the update'])}: the head was left as it was; "
        "call zero_grad() and skip this batch, or lower the learning rate"
    )
