"""The head whose training step costs O(N d^2), whatever the number of classes.

Reference: P. Vincent, A. de Brebisson, X. Bouthillier, Efficient Exact Gradient Update for Training Deep Networks with Very
Large Sparse Targets, 2015, arXiv 1412.7091. Forward and backward pass are in :mod:`spherical_loss.heads.factored.statistics`,
the step is in :mod:`spherical_loss.heads.factored.sgd`.

The representation. With the bias as one more column of W, and the hidden vectors extended by a one,

    W = V U + 1 w0^T,      and beside it     Q = W^T W,      w = W^T 1.

An SGD step multiplies every row of W by the same d x d matrix B, which goes into U, and changes the rows of the batch's
targets, which go into V through ``U^-1``. V is D x d in float32; all else is small, and more precise where errors would add up
(Q is an ``Accumulator``). U and its inverse start as the identity, and differ from it by many small changes, which
would be rounded as ones are; so what is kept is the difference, and weight decay as a number:

    U = rho (I - E),      U^-1 = (I + F) / rho.

Frames. B shrinks some directions, so the condition number of U grows exponentially with the steps, and what is written
through ``U^-1`` drowns in rounding errors. Only *writing* needs the inverse; *reading* a row is a product of contractions and
always stable. So U covers only the steps since a recent moment, the start of a frame. When its condition could pass
``MAX_CONDITION``, the frame is closed: U becomes the identity, and a row last written in frame k is read as
``V_row past[k] U``, with ``past[k]`` the product of all that came after that frame. A row moves to the present frame when it is
written, at the price of one d x d product. After ``MAX_FRAMES`` frames all rows are brought up to date at once
(:meth:`FactoredHead.refactor`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spherical_loss.base import Loss
from spherical_loss.heads.base import CHUNK, Head, TopK, full_precision, he_std
from spherical_loss.heads.factored.accumulator import Accumulator
from spherical_loss.heads.factored.shard import Shard
from spherical_loss.heads.factored.statistics import Backward, FactoredStatistics
from spherical_loss.heads.gram import gram_matrix
from spherical_loss.statistics import statistics_dtype, widened


class FactoredHead(Head):
    """An output layer of any number of classes with an exact SGD step of its own, in O(N d^2); see :class:`FactoredSGD`.

    Memory: the D x d weights (float32) and O(d^2 + N d); no second D x d buffer at any time. ``loss.backward()`` sends the
    gradient to the hidden vectors and leaves the rest for ``FactoredSGD.step()``. In ``eval()`` mode nothing is left. The head
    has no parameters, so the trunk's optimizer does not see it. Elementwise adaptive methods such as Adam cannot be exact in
    this form.

    ``weight`` and ``bias`` compute dense values, D x d of them: for export and tests.

    Over several machines: with ``group``, a ``torch.distributed`` process group of R ranks, each rank keeps D / R rows, and a
    step exchanges O(N d) numbers, nothing that grows with D. Every rank brings its own minibatch, as with
    DistributedDataParallel: the step is that of the mean of their losses. All ranks must make the same calls.

    >>> import torch
    >>> from spherical_loss import TaylorSoftmaxLoss
    >>> from spherical_loss.heads import FactoredSGD
    >>> _ = torch.manual_seed(0)
    >>> trunk, head, loss = torch.nn.Linear(5, 8), FactoredHead(8, 100_000, init="zero"), TaylorSoftmaxLoss()
    >>> optimizers = torch.optim.AdamW(trunk.parameters()), FactoredSGD(head, lr=1000.0)
    >>> x, target = torch.randn(16, 5), torch.arange(16)
    >>> for step in range(100):
    ...     value = loss(head(trunk(x), target))
    ...     for optimizer in optimizers:
    ...         optimizer.zero_grad()
    ...     value.backward()
    ...     for optimizer in optimizers:
    ...         optimizer.step()
    >>> bool(value < 8)  # from log(100,000) = 11.5
    True
    """

    V: Tensor
    E: Tensor
    F: Tensor
    w0: Tensor
    w: Tensor
    frame: Tensor
    past: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        init: str = "he",
        ignore_index: int = -100,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, init, ignore_index)
        d = -(-(in_features + bias) // 8) * 8  # empty columns up to a multiple of 8: products are some 10% faster
        self.shard = Shard(num_classes, group)
        precise, dtype = statistics_dtype(torch.empty(0).device), widened(torch.get_default_dtype())
        self.register_buffer("V", torch.zeros(len(self.shard), d, dtype=dtype))
        self.Q = Accumulator(d, dtype, precise)
        self.register_buffer("E", torch.zeros(d, d, dtype=dtype))
        self.register_buffer("F", torch.zeros(d, d, dtype=dtype))
        self.register_buffer("w0", torch.zeros(d, dtype=precise))
        self.register_buffer("w", torch.zeros(d, dtype=precise))
        self.register_buffer("frame", torch.zeros(len(self.shard), dtype=torch.int16))
        self.register_buffer("past", torch.zeros(0, d, d, dtype=dtype))
        self.log_condition = 0.0  # an upper bound of the log of the condition number of U
        self.log_scale = 0.0  # the log of rho, what weight decay has multiplied U by
        self.residual = 0.0  # how far U^-1 U may be from the identity, because the series of the inverse were cut
        self.steps = 0
        self.edits = 0  # how often W was replaced from outside
        self.revision = 0  # how often rows of V were written other than by a step
        self.backwards: list[Backward] = []  # since the last step
        if init == "he":
            self._draw(he_std(in_features))
            self.refactor()

    @property
    def rho(self) -> float:
        return math.exp(self.log_scale)

    @property
    def U(self) -> Tensor:
        """``rho (I - E)``, as a new tensor; products take E."""
        return self.rho * (torch.eye(len(self.E), dtype=self.E.dtype, device=self.E.device) - self.E)

    # Reading -------------------------------------------------------------------------------------------------------

    def statistics(self, H: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The empty tensor asks for a backward pass even where the hidden vectors are data and need no gradient.
        return FactoredStatistics.apply(H, torch.empty(0, requires_grad=self.training), self, classes)

    @torch.no_grad()
    def sums(self, H: Tensor) -> tuple[Tensor, Tensor]:
        with full_precision(H.device):
            X = self.extended(H)
            return X @ self.w.to(X.dtype), (X * (X @ self.Q.value)).sum(1)

    def extended(self, H: Tensor) -> Tensor:
        """Hidden vectors with the column of ones that stands for the bias, and the empty columns."""
        X = self.V.new_empty(len(H), self.V.shape[1])
        X[:, : self.in_features] = H
        X[:, self.in_features :] = 0
        if self.has_bias:
            X[:, self.in_features] = 1
        return X

    def present(self, classes: Tensor | slice) -> Tensor:
        """Rows of V in the coordinates of the present frame, as a new tensor."""
        rows = self.V[classes].clone() if isinstance(classes, slice) else self.V.index_select(0, classes)
        if len(self.past) == 0:
            return rows
        with full_precision(rows.device):
            return _transformed(rows, self.frame[classes], self.past)

    def rows(self, kept: Tensor | slice) -> Tensor:
        """Dense rows of W, with the bias and the empty columns, of those that are kept here."""
        return self.dense(self.present(kept))

    def dense(self, present: Tensor) -> Tensor:
        """Dense rows of W for rows of V in the present frame."""
        with full_precision(self.V.device):
            return torch.addmm(present, present, self.E, beta=self.rho, alpha=-self.rho).add_(self.w0.to(self.V.dtype))

    def distant_rows(self, classes: Tensor) -> Tensor:
        """Dense rows of any classes, wherever they are kept; the other ranks ask for theirs at the same time."""
        (asked,) = self.shard.gather(classes)
        everyone = torch.cat(asked)
        rows = torch.zeros(len(everyone), self.V.shape[1], dtype=self.V.dtype, device=self.V.device)
        here, kept = self._kept(everyone)
        rows[here] = self.rows(kept)
        return self.shard.sum_(rows).split([len(part) for part in asked])[self.shard.rank]

    def _kept(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the classes are kept here, and in which rows of V."""
        here = ((classes >= self.shard.start) & (classes < self.shard.stop)).nonzero().squeeze(1)
        return here, classes[here] - self.shard.start

    @torch.no_grad()
    def dense_rows(self, rows: slice) -> Tensor:
        return self.rows(rows)[:, : self.in_features + self.has_bias]

    @property
    def weight(self) -> Tensor:
        dense = torch.empty(len(self.shard), self.in_features, dtype=self.V.dtype, device=self.V.device)
        for rows in self._row_chunks():
            dense[rows] = self.rows(rows)[:, : self.in_features]
        return dense if self.shard.group is None else torch.cat(self.shard.gather(dense)[0])

    @property
    def bias(self) -> Tensor | None:
        if not self.has_bias:
            return None
        kept = torch.cat([self.V.new_empty(0), *(self.rows(rows)[:, self.in_features] for rows in self._row_chunks())])
        return kept if self.shard.group is None else torch.cat(self.shard.gather(kept)[0])

    @torch.no_grad()
    def logit_chunks(self, H: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        X, first, count = self.extended(H), self.shard.start, len(self.shard)
        one_frame = len(self.past) == 0  # transform the N hidden vectors instead of the D rows
        with full_precision(X.device):
            XU = torch.addmm(X, X, self.E.T, beta=self.rho, alpha=-self.rho)
            offset = (X @ self.w0.to(X.dtype)).unsqueeze(1)
        for start in range(0, count, rows):
            here = slice(start, min(start + rows, count))
            with full_precision(X.device):
                o = torch.addmm(offset, XU, self.V[here].T) if one_frame else X @ self.rows(here).T
            yield first + start, o

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        if self.shard.group is None:
            return super().topk(hidden, k, loss)
        (batches,) = self.shard.gather(hidden.reshape(-1, self.in_features))
        found = super().topk(torch.cat(batches), k, loss)  # among the rows kept here: k, or fewer where fewer are kept
        scores, classes = (torch.cat(parts).T for parts in self.shard.gather(*(x.T.contiguous() for x in found)))
        best = scores.topk(k)
        mine = slice(len(torch.cat(batches[: self.shard.rank])) if self.shard.rank else 0, None)
        shape = (*hidden.shape[:-1], k)
        count = len(batches[self.shard.rank])
        return TopK(best.values[mine][:count].reshape(shape), classes.gather(1, best.indices)[mine][:count].reshape(shape))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """All outputs, ``(..., D)``; for evaluation: no gradient flows through them."""
        if self.shard.group is not None:
            raise ValueError(f"a sharded head has no logits: N x {self.num_classes} numbers on every rank; use topk")
        H = hidden.reshape(-1, self.in_features)
        out = torch.empty(H.shape[0], self.num_classes, dtype=self.V.dtype, device=H.device)
        for start, o in self.logit_chunks(H, rows=max(1, CHUNK // max(1, H.shape[0]))):
            out[:, start : start + o.shape[1]] = o
        return out.reshape(*hidden.shape[:-1], self.num_classes)

    # Writing -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        self._check_weight(weight)
        self._edited()
        self.refactor()
        weight = weight[self.shard.start : self.shard.stop]
        for rows in self._row_chunks():
            self.V[rows, : self.in_features] = weight[rows].to(self.V.dtype)
        self.refactor()

    @torch.no_grad()
    def set_bias(self, bias: Tensor) -> None:
        self._check_bias(bias)
        self._edited()
        self.refactor()
        self.V[:, self.in_features] = bias[self.shard.start : self.shard.stop].to(self.V.dtype)
        self.refactor()

    @torch.no_grad()
    def add_to_rows(self, classes: Tensor, increments: Tensor, scale: float, present: Tensor | None = None) -> None:
        """Add ``scale * increments`` (n, d) to the rows of V of these classes, all different, in the present frame;
        ``present`` are the rows, where they are at hand, and is written to."""
        here: Tensor | slice = slice(None)
        kept = classes
        if self.shard.group is not None:
            here, kept = self._kept(classes)
        if present is None:
            present = self.present(kept)
        self.V.index_copy_(0, kept, present.add_(increments[here], alpha=scale))
        if len(self.past) > 0:
            self.frame[kept] = len(self.past)

    @torch.no_grad()
    def close_frame(self) -> None:
        """Start a new frame: U becomes the identity, and what it was is remembered for the rows not written since."""
        U = self.U
        with full_precision(self.V.device):
            self.past = torch.cat([self.past @ U, U.unsqueeze(0)])
        self._reset_frame()

    @torch.no_grad()
    def refactor(self) -> None:
        """Write W itself into V (chunked, in place) and compute Q and w afresh, so that nothing drifts."""
        U, w0 = self.U, self.w0.to(self.V.dtype)
        settled = len(self.past) == 0 and self.rho == 1 and not self.E.any() and not w0.any()
        Q = torch.zeros_like(self.Q.base)
        self.w.zero_()
        with full_precision(self.V.device):
            transforms = torch.cat([self.past @ U, U.unsqueeze(0)])
            for rows in self._row_chunks():
                if not settled:
                    _transformed(self.V[rows], self.frame[rows], transforms).add_(w0)
                Q += gram_matrix(self.V[rows])
                self.w += self.V[rows].sum(0)
        self.Q.set_(self.shard.sum_(Q))
        self.shard.sum_(self.w)
        self._start_over()

    def _start_over(self) -> None:
        """V is W: no frames, and U is the identity."""
        self.past = self.past[:0]
        self.frame.zero_()
        self.w0.zero_()
        self.revision += 1
        self._reset_frame()

    def _reset_frame(self) -> None:
        self.E.zero_()
        self.F.zero_()
        self.log_condition = self.log_scale = self.residual = 0.0

    def loaded(self, Q: Tensor, steps: int) -> None:
        """After W was written to V, and ``W^T 1`` to w."""
        self.Q.set_(Q)
        self.steps = steps
        self._start_over()
        self._edited()

    def _edited(self) -> None:
        """W is another: gradients of the old one have no meaning any more."""
        self.edits += 1
        self.revision += 1
        self.backwards.clear()

    def _row_chunks(self) -> Iterator[slice]:
        size = max(1, CHUNK // self.V.shape[1])
        for start in range(0, len(self.shard), size):
            yield slice(start, min(start + size, len(self.shard)))

    def _draw(self, std: float) -> None:
        """Normal weights, the same whatever the number of ranks: each block of classes has a seed of its own."""
        seed, block = int(torch.randint(2**62, ())), 4096
        for first in range(self.shard.start // block * block, self.shard.stop, block):
            generator = torch.Generator().manual_seed(seed + first)
            drawn = std * torch.randn(block, self.in_features, generator=generator, device="cpu")
            start, stop = max(first, self.shard.start), min(first + block, self.shard.stop)
            self.V[start - self.shard.start : stop - self.shard.start, : self.in_features] = drawn[start - first : stop - first]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``.to(dtype)`` concerns V and the frames, float32 at least; the small state stays as precise as it is."""

        def same_dtype(x: Tensor) -> Tensor:
            like: Tensor = fn(x.new_empty(0))
            return fn(x) if like.dtype == x.dtype else x.to(like.device)

        dtype = widened(fn(self.V.new_empty(0)).dtype)
        super()._apply(same_dtype, recurse)
        if dtype != self.V.dtype:
            self.V, self.E, self.F, self.past = (x.to(dtype) for x in (self.V, self.E, self.F, self.past))
            self.Q.change_dtype(dtype)
            self.refactor()  # Q and w belong to the rounded V
        return self

    def get_extra_state(self) -> Tensor:
        numbers = self.steps, self.log_condition, self.log_scale, self.residual
        return torch.tensor([*self.layout(), *numbers], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        steps, self.log_condition, self.log_scale, self.residual = state[3:].tolist()
        self.steps = int(steps)
        self._edited()

    def layout(self) -> tuple[int, int, int]:
        """What the columns of V mean, and how many rows there are on all ranks: in_features, whether a bias follows, D."""
        return self.in_features, int(self.has_bias), self.num_classes

    def check_layout(self, saved: Tensor) -> None:
        """Raise a ``ValueError`` if the saved head is of another layout than this one."""
        found = tuple(int(x) for x in saved)
        if found != self.layout():
            names = "in_features={}, bias={:d}, num_classes={}"
            raise ValueError(
                f"a head with {names.format(*found)} was saved, but this one has {names.format(*self.layout())}: make it alike"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (extra := state_dict.get(prefix + "_extra_state")) is not None:
            self.check_layout(extra[:3])
        past = state_dict.get(prefix + "past")
        if past is not None:  # the number of frames is part of the state, not of the architecture
            self.past = self.past.new_zeros(past.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _transformed(rows: Tensor, frames: Tensor, transforms: Tensor) -> Tensor:
    """Multiply, in place, each row by the transform of its frame; rows of the frame beyond those are left as they are."""
    counts = torch.bincount(frames, minlength=len(transforms) + 1).tolist()
    if counts[-1] == len(rows):
        return rows
    if len(rows) in counts[:-1]:  # all of one frame
        return rows.copy_(rows @ transforms[counts.index(len(rows))])
    order = frames.argsort()
    ordered = rows.index_select(0, order)
    out = ordered.clone()
    for part, into, transform in zip(ordered.split(counts), out.split(counts), transforms, strict=False):
        if len(part):
            torch.mm(part, transform, out=into)
    return rows.index_copy_(0, order, out)
