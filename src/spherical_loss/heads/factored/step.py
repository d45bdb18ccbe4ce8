"""The SGD step of factored heads, in O(N d^2): five updates that are together equal to :func:`dense_step`.

With learning rate ``lr``, weight decay ``l`` and ``r = 1 - lr l``, dense SGD is, with the bias as a column of W,

    W <- r W - lr grad_W = r W B - lr 1 a^T - lr Delta,     grad_W = W A + 1 a^T + Delta,     B = I - (lr / r) A.

R are the rows of Delta that are not zero, one for each class u that occurs, and ``delta`` is their sum. Then

    U   <- r U B
    w0  <- r w0 - lr (A w0 + a)
    V_u <- V_u - lr R_u U^-1                           with the new U
    w   <- r w - lr (A w + D a + delta)
    Q   <- r^2 Q - r lr (H^T X + X^T H),               X = grad_H - lr / (2 r) Z

where ``H^T grad_H`` is ``grad_W^T W``, and Z is such that ``H^T Z + Z^T H = 2 grad_W^T grad_W``:

    Z = (grad_H + P) A + G + g_s (A w + D a + 2 delta)^T,      G = g_c R_c for each example.

The trace of the last line is the squared norm of the gradient: ``||grad_W||^2 = sum(H * Z)``. docs/how/heads.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from spherical_loss.heads.base import add_weighted_sum, selected, target_rows
from spherical_loss.heads.factored import transform
from spherical_loss.heads.factored.batch import BatchGradients, HeadGradients
from spherical_loss.heads.factored.nearby import have_parted
from spherical_loss.heads.factored.statistics import Span, local, own, part, where
from spherical_loss.heads.factored.weighted_gram import WeightedGram
from spherical_loss.heads.products import product

FOLD_IN = 32  # steps after which the changes of Q are added up in float64


def dense_step(
    W: Tensor, H: Tensor, targets: Tensor, g_s: Tensor, g_q: Tensor, g_c: Tensor, lr: float, weight_decay: float = 0.0
) -> Tensor:
    """What the factored step is equal to: plain SGD on W (D, d), for hidden vectors (N, d) and targets (N, K)."""
    A = 2 * H.T @ (g_q.unsqueeze(1) * H)
    a = H.T @ g_s
    Delta = torch.zeros_like(W)
    for k in range(targets.shape[1]):
        Delta.index_add_(0, targets[:, k], g_c[:, k : k + 1] * H)
    grad_W = W @ A + a + Delta
    return W - lr * (grad_W + weight_decay * W)


class _BatchTerms:
    """What the steps of all heads that saw a batch have in common."""

    def __init__(self, batch: BatchGradients, precise: torch.dtype) -> None:
        self.batch, self.precise = batch, precise
        self.R = target_rows(batch.H, batch.g_c, batch.positions, len(batch.classes))

    @cached_property
    def A(self) -> WeightedGram:
        return WeightedGram(self.batch.H, self.batch.g_q)

    @cached_property
    def a(self) -> Tensor:
        return (self.batch.H.T @ self.batch.g_s).to(self.precise)

    @cached_property
    def R_c(self) -> Tensor:
        return selected(self.R, self.batch.positions)

    @cached_property
    def H_norm(self) -> float:
        """NaN if the loss depends on a q that is negative: such a batch is refused with what is not finite."""
        batch = self.batch
        least_q = batch.q.min() if len(batch.q) else batch.q.new_zeros(())
        norm, least = torch.stack([torch.linalg.vector_norm(batch.H), least_q]).tolist()  # the device is waited for once
        return math.nan if least < 0 and batch.negative_q.any() else norm


class HeadStep:
    """The step of one head: everything that can fail comes first, and :meth:`write` changes the head."""

    def __init__(self, span: Span, mine: slice, gradients: HeadGradients, terms: _BatchTerms) -> None:
        self.head, self.mine, self.gradients, self.terms = span.head, mine, gradients, terms
        batch, w = terms.batch, span.head.w
        self.classes = local(batch.classes, mine, span.start)
        self.R = part(terms.R, mine)
        delta = self.R.sum(0).to(w.dtype)
        self.grad_w = terms.A.times_vector(w).add_(terms.a, alpha=self.head.num_classes).add_(delta)  # grad_W^T 1
        g_c = own(batch.g_c, batch.positions, mine, len(batch.classes))
        self.Z = add_weighted_sum(terms.A.times(gradients.grad_H + gradients.P), g_c, terms.R_c)
        self.Z.addr_(batch.g_s, (self.grad_w + delta).to(self.Z.dtype))
        self.rate, self.decay = 0.0, 1.0

    @cached_property
    def squared_norm(self) -> Tensor:
        """``||grad_W||^2``"""
        return (self.terms.batch.H * self.Z).sum(dtype=self.grad_w.dtype).clamp_min(0)

    def prepare(self, rate: float, decay: float) -> None:
        """For ``W <- decay W - rate grad_W``. Raises if what is new would not be finite, or B has no inverse."""
        self.rate, self.decay = rate, decay
        _check_finite(rate / decay, rate, self.Z.dtype, self.terms.batch)
        self.X = self.gradients.grad_H.sub(self.Z, alpha=rate / (2 * decay))
        norm = rate / decay * self.terms.A.norm
        # Bounds of the largest entry of Q, and of its change.
        Q, X = torch.stack([self.head.Q.value.trace(), torch.linalg.vector_norm(self.X)]).tolist()
        _check_finite(norm + Q + rate * self.terms.H_norm * X, rate, self.X.dtype, self.terms.batch)
        if norm > 0.9:  # below, every eigenvalue of B is positive
            self._check_invertible()

    def _check_invertible(self) -> None:
        rate = self.rate / self.decay
        eigenvalue = rate * self.terms.A.nearest_eigenvalue(1 / rate)
        if abs(1 - eigenvalue) < 1e-6:
            raise ValueError(
                f"lr={self.rate} makes I - lr A singular (lr A has the eigenvalue {eigenvalue:.8f}): the step would erase a "
                "direction of W; use a smaller lr"
            )

    def write(self) -> None:
        self._update_U()
        self._update_w0()
        self._update_V()
        self._update_w()
        self._update_Q()
        self.head.steps += 1
        self.head.changed()
        # A sharded head of few classes: B may amplify the errors of Q and w, where the target rows cancel most of its effect.
        amplified = self.head.has_few_classes and self.rate / self.decay * self.terms.A.norm > 2
        if amplified or len(self.head.U.past) >= transform.MAX_FRAMES:
            self.head.refactor()

    def _update_U(self) -> None:
        """``U <- r U B``"""
        self.H_inverse = self.head.U.multiply_(self.terms.A, self.rate / self.decay, self.decay)

    def _update_w0(self) -> None:
        """``w0 <- r w0 - lr (A w0 + a)``"""
        w0 = self.head.w0
        gradient = self.terms.A.times_vector(w0).add_(self.terms.a)
        _decayed(w0, self.decay).sub_(gradient, alpha=self.rate)

    def _update_V(self) -> None:
        """``V_u <- V_u - lr R_u U^-1``"""
        head, read = self.head, self.gradients
        here, kept = head.kept(self.classes)
        rows = head.current_rows(kept) if read.current_rows is None else head.carried(read.current_rows, read.frame, kept)
        R_inverse = self._R_inverse()
        head.write_current_rows(kept, rows.sub_(R_inverse if head.shard.group is None else R_inverse[here], alpha=self.rate))

    def _R_inverse(self) -> Tensor:
        """``R U^-1``; where ``H U^-1`` is known, a sum of its rows."""
        if self.H_inverse is None:
            return self.head.U.solve(self.R)
        batch = self.terms.batch
        return part(target_rows(self.H_inverse, batch.g_c, batch.positions, len(batch.classes)), self.mine)

    def _update_w(self) -> None:
        """``w <- r w - lr (A w + D a + delta)``"""
        _decayed(self.head.w, self.decay).sub_(self.grad_w, alpha=self.rate)

    def _update_Q(self) -> None:
        """``Q <- r^2 Q - r lr (H^T X + X^T H)``"""
        if self.head.steps % FOLD_IN == 0:
            self.head.Q.fold_in()
        change = product(self.terms.A.H_T, self.X)
        self.head.Q.subtract_(change, alpha=self.decay * self.rate, scale=self.decay**2)


class SmallHeadStep:
    """The step of a head with so few classes that V is W, and its outputs are computed: ``W <- r W - lr grad_W`` itself.

    It is cheaper there, and more accurate: with few classes the change of all rows and that of a target row are large and
    cancel, which must happen before a Gram matrix is made of them.
    """

    def __init__(self, span: Span, mine: slice, gradients: HeadGradients, terms: _BatchTerms) -> None:
        self.head, self.terms = span.head, terms
        assert gradients.grad_O is not None
        self.grad_W = product(gradients.grad_O.T, terms.batch.H.to(gradients.grad_O.dtype))
        self.grad_W.index_add_(0, terms.batch.classes[mine] - span.start, terms.R[mine].to(self.grad_W.dtype))
        self.rate, self.decay = 0.0, 1.0

    @cached_property
    def squared_norm(self) -> Tensor:
        """``||grad_W||^2``"""
        return self.grad_W.square().sum(dtype=self.head.w.dtype)

    def prepare(self, rate: float, decay: float) -> None:
        """For ``W <- decay W - rate grad_W``. Raises if what is new would not be finite."""
        self.rate, self.decay = rate, decay
        norm = float(torch.linalg.vector_norm(self.head.V) + rate * torch.linalg.vector_norm(self.grad_W))
        _check_finite(norm * norm, rate, self.head.dtype, self.terms.batch)
        self.W = self.head.V.mul(decay).sub_(self.grad_W, alpha=rate)
        self.other = self._other_weights()

    def _other_weights(self) -> Tensor | None:
        """The weights that began near to these ones, after the step. Raises if they have parted."""
        head, nearby = self.head, self.head.nearby
        if nearby is None or nearby.W.grad is None:  # a loss of the user's own, perhaps, that does not know of them
            head.nearby = None
            return None
        other = nearby.stepped(head.remaining_factor(), self.rate, self.decay)
        growth = have_parted(self.W, other)
        if growth is None:
            return other
        head.nearby = None
        raise FloatingPointError(
            f"training {head.num_classes} classes at lr={self.rate:g} is chaotic: a difference in the last bit of the weights "
            f"has grown {growth:.0e} times within {nearby.steps + 1} steps, so that rounding alone decides where they go. This "
            "step has not changed the head; lower the learning rate"
        )

    def write(self) -> None:
        self.head.V.copy_(self.W)
        if self.other is not None and self.head.nearby is not None:
            self.head.nearby.set_(self.other)
        self.head.steps += 1
        self.head.changed()


def head_steps(spans: list[Span], batch: BatchGradients) -> list[HeadStep | SmallHeadStep]:
    terms = _BatchTerms(batch, spans[0].head.w.dtype)
    return [
        (SmallHeadStep if span.head.is_small else HeadStep)(span, mine, gradients, terms)
        for span, mine, gradients in zip(spans, where(spans, batch.classes), batch.heads, strict=True)
    ]


def _decayed(x: Tensor, decay: float) -> Tensor:
    """``x <- decay x``"""
    return x if decay == 1 else x.mul_(decay)


class _HasNorm(Protocol):
    @property
    def squared_norm(self) -> Tensor: ...


def clipping(steps: Sequence[_HasNorm], max_grad_norm: float | None) -> float:
    """What the gradients of all heads are multiplied by, as in ``clip_grad_norm_``."""
    if max_grad_norm is None:
        return 1.0
    norm = math.sqrt(sum(float(step.squared_norm) for step in steps))
    return min(1.0, max_grad_norm / (norm + 1e-6)) if math.isfinite(norm) else norm


def _check_finite(bound: float, rate: float, dtype: torch.dtype, batch: BatchGradients) -> None:
    """Raise unless numbers of this size can be stored: a bound of all that is written is enough."""
    if not bound < torch.finfo(dtype).max:
        raise FloatingPointError(
            f"{_what_is_wrong(batch, rate)}: the head is unchanged; call zero_grad() and skip this batch, or lower the "
            "learning rate"
        )


def _what_is_wrong(batch: BatchGradients, rate: float) -> str:
    names = {"the hidden vectors": batch.H, "q": batch.q, "g_s": batch.g_s, "g_q": batch.g_q, "g_c": batch.g_c}
    bad = {name: ~x.isfinite().reshape(len(x), -1).all(1) for name, x in names.items()}
    found = [f"{name} of {_examples(rows)}" for name, rows in bad.items() if rows.any()]
    if negative := batch.negative_q.nonzero().flatten().tolist():
        return (
            f"q = ||o||^2 of {_examples(batch.negative_q)} is negative ({float(batch.q[negative[0]]):.3g}): its terms cancel "
            "in float32, because the hidden vectors are large in directions of which the weights see little; normalize or "
            "center them, or use head.double()"
        )
    if found:
        return f"NaN or infinity in {' and '.join(found)}"
    return f"a step of lr={rate:g} would make the weights, or their squares, larger than their dtype can hold"


def _examples(rows: Tensor) -> str:
    """How many of the examples, and which is the first."""
    where = rows.nonzero().flatten().tolist()
    return f"{len(where)} of {len(rows)} examples, first {where[0]}"
