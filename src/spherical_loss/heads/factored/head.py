"""The factored head: reading and replacing ``W = V U + 1 w0^T``. Its step is in :mod:`spherical_loss.heads.factored.step`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spherical_loss.base import Loss
from spherical_loss.heads.base import CHUNK, TopK, chunk_rows, full_precision, he_std, in_graph
from spherical_loss.heads.factored.accumulator import Accumulator
from spherical_loss.heads.factored.keeper import GradientKeeper
from spherical_loss.heads.factored.nearby import MOST_CLASSES, Nearby
from spherical_loss.heads.factored.parts import REMEDY, check_parts
from spherical_loss.heads.factored.shard import Shard, version_of
from spherical_loss.heads.factored.statistics import FactoredStatistics, Span, sums
from spherical_loss.heads.factored.transform import RowTransform
from spherical_loss.heads.gram import gram_matrix
from spherical_loss.heads.products import product
from spherical_loss.statistics import Statistics, statistics_dtype, widened

EXACT_IN_FLOAT32 = 2**24  # integers below
FEW_CLASSES = 256  # or d, if that is more: a dense step in float64 is then no slower (d = 16, 64 and 256, N = 64 and 250)


class FactoredHead(GradientKeeper):
    """An output layer of any number of classes with its own exact SGD step in O(N d^2); see :class:`FactoredSGD`.

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
    w0: Tensor
    w: Tensor
    row_frames: Tensor
    written: Tensor

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
        d = -(-(in_features + bias) // 8) * 8  # empty columns up to a multiple of 8: matmuls are about 10% faster
        self.shard = Shard(num_classes, group, in_features=in_features, bias=bias)
        self.has_few_classes = num_classes <= max(in_features, FEW_CLASSES)
        self.is_small = self.has_few_classes and group is None
        """V is W at all times, U the identity, and outputs are computed. In float64: with few classes and a large rate,
        rounding errors grow. Q and w are up to date only where they are saved."""
        self.is_part = False
        """Whether it is a tier of a head of many classes. Then float32 products are precise enough also if it is small: errors
        of rounding grow only where these few classes are all there are."""
        self.dtype = widened(torch.get_default_dtype())
        """Of weights and outputs; what a small head keeps is more precise."""
        precise = statistics_dtype(torch.empty(0).device)
        dtype = self._kept_dtype(precise)
        self.register_buffer("V", torch.zeros(len(self.shard), d, dtype=dtype))
        self.register_buffer("row_frames", torch.zeros(len(self.shard), dtype=torch.int16))  # when each row was last written
        self.U = RowTransform(d, dtype)
        self.register_buffer("w0", torch.zeros(d, dtype=precise))
        self.register_buffer("w", torch.zeros(d, dtype=precise))
        self.Q = Accumulator(d, dtype, precise)
        self.nearby: Nearby | None = None
        self.steps = 0
        self.version = 0  # how often W changed: a gradient belongs to one version
        # The steps as a buffer: whoever copies or averages buffers from outside changes this one, too.
        self.register_buffer("written", torch.zeros((), dtype=torch.float32))
        self.shard.agree(self.Q.base, init=init, version=version_of("spherical-loss"), torch=torch.__version__)
        self.register_load_state_dict_post_hook(_bring_up_to_date)
        if init == "he" and not self.V.is_meta:
            self._draw(he_std(in_features))
            self.refactor()

    @property
    def spans(self) -> list[Span]:
        """The heads whose statistics are added, and their classes: this one alone, with all of them."""
        return [Span(self)]

    # Reading -------------------------------------------------------------------------------------------------------

    def statistics(self, H: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.check_untouched()
        # The empty tensor asks for a backward pass even where the hidden vectors are data and need no gradient.
        return FactoredStatistics.apply(H, H.new_empty(0, requires_grad=self.training), self, classes)

    def of_classes(self, H: Tensor, classes: Tensor) -> Statistics:
        found = super().of_classes(H, classes)
        watched = self.is_small and self.num_classes <= MOST_CLASSES and self.training and torch.is_grad_enabled()
        if not watched or in_graph():
            return found
        if self.nearby is None or self.nearby.is_old:
            self.nearby = Nearby(self.V)
        with full_precision(H.device):
            return found._replace(nearby=self.nearby.statistics(self.extended(H.detach()), classes))

    @torch.no_grad()
    def sums(self, H: Tensor) -> tuple[Tensor, Tensor]:
        self.check_untouched()
        with full_precision(H.device):
            s, q, _ = sums(self.extended(H), [self])
            return s, q

    def extended(self, H: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Hidden vectors with the column of ones for the bias, and the empty columns."""
        N, dtype, bias = H.shape[0], dtype or self.V.dtype, int(self.has_bias)
        empty = self.V.shape[1] - self.in_features - bias
        return torch.cat([H.to(dtype), H.new_ones(N, bias, dtype=dtype), H.new_zeros(N, empty, dtype=dtype)], 1)

    def read(self, classes: Tensor) -> tuple[Tensor | None, Tensor]:
        """The current rows of V, where all rows are kept in this process, and the dense rows of W."""
        if self.shard.group is not None:
            return None, self.gather_rows(classes)
        rows = self.current_rows(classes)
        return rows, rows if self.is_small else self.dense(rows)

    def small_weight(self) -> Tensor:
        """W of a small head, in the dtype of its products."""
        return self.V.to(self.dtype) if self.is_part else self.V

    def current_rows(self, kept: Tensor | slice) -> Tensor:
        """Rows of V in the current frame, as a new tensor, of those that are kept here."""
        rows = self.V[kept].clone() if isinstance(kept, slice) else self.V.index_select(0, kept)
        if len(self.U.past) == 0:
            return rows
        with full_precision(rows.device):
            return self.U.bring_forward_(rows, self.row_frames[kept])

    def dense(self, current_rows: Tensor) -> Tensor:
        """Dense rows of W, with the bias and the empty columns: ``V_rows U + w0``."""
        with full_precision(self.V.device):
            return self.U.transform(current_rows).add_(self.w0.to(self.V.dtype))

    def rows(self, kept: Tensor | slice) -> Tensor:
        """Dense rows of W of those that are kept here."""
        self.check_untouched()
        return self.dense(self.current_rows(kept))

    def gather_rows(self, classes: Tensor) -> Tensor:
        """Dense rows of any classes, wherever they are kept; the other ranks ask for theirs at the same time."""
        (asked,) = self.shard.gather(classes, rows=self.V.dtype)
        everyone = torch.cat(asked)
        rows = torch.zeros(len(everyone), self.V.shape[1], dtype=self.V.dtype, device=self.V.device)
        here, kept = self.kept(everyone)
        rows[here] = self.rows(kept)
        return self.shard.sum_(rows).split([len(part) for part in asked])[self.shard.rank]

    def kept(self, classes: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Which of the classes are kept here, and in which rows of V."""
        if self.shard.group is None:
            return slice(None), classes
        here = ((classes >= self.shard.start) & (classes < self.shard.stop)).nonzero().squeeze(1)
        return here, classes[here] - self.shard.start

    @torch.no_grad()
    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        return self.rows(rows)[:, : self.in_features + self.has_bias].to(self.dtype)

    @property
    def weight(self) -> Tensor:
        dense = torch.empty(len(self.shard), self.in_features, dtype=self.dtype, device=self.V.device)
        for rows in self.row_chunks():
            dense[rows] = self.rows(rows)[:, : self.in_features]
        return dense if self.shard.group is None else torch.cat(self.shard.gather(dense)[0])

    @property
    def bias(self) -> Tensor | None:
        if not self.has_bias:
            return None
        kept = torch.empty(len(self.shard), dtype=self.dtype, device=self.V.device)
        for rows in self.row_chunks():
            kept[rows] = self.rows(rows)[:, self.in_features]
        return kept if self.shard.group is None else torch.cat(self.shard.gather(kept)[0])

    def logit_chunks(self, H: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        self.check_untouched()
        X, first, count = self.extended(H), self.shard.start, len(self.shard)
        one_frame = len(self.U.past) == 0  # transform the N hidden vectors instead of the D rows
        if in_graph() and not one_frame:
            raise RuntimeError(
                f"a graph cannot read the {len(self.U.past) + 1} frames of a FactoredHead in training: call head.refactor() "
                "before torch.export, torch.compile or torch.jit.trace, or export head.to_linear() with loss.predict"
            )
        with full_precision(X.device):
            offset = (X @ self.w0.to(X.dtype)).unsqueeze(1)
            X, transforms = (self.U.transform_transposed(X), None) if one_frame else (X, self.U.through_frames())
        for start in range(0, count, rows):
            here = slice(start, min(start + rows, count))
            with full_precision(X.device):
                V = self.V[here]
                VU = V if transforms is None else self.U.bring_forward_(V.clone(), self.row_frames[here], transforms)
                o = product(X, VU.T).add_(offset)
            yield first + start, o.to(self.dtype)

    @torch.no_grad()
    def outputs_of(self, H: Tensor, classes: Tensor) -> Tensor:
        X, rows = self.extended(H), self.current_rows(classes.flatten()).unflatten(0, classes.shape)
        with full_precision(X.device):  # as in logit_chunks: U is applied to the N hidden vectors, not to the N K rows
            offset = (X @ self.w0.to(X.dtype)).unsqueeze(1)
            return (offset + torch.bmm(rows, self.U.transform_transposed(X).unsqueeze(2)).squeeze(2)).to(self.dtype)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        if self.shard.group is None:
            return super().topk(hidden, k, loss)
        return self.shard.topk(hidden, k, lambda H: super(FactoredHead, self).topk(H, k, loss))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """All outputs, ``(..., D)``; for evaluation: no gradient flows through them."""
        if self.shard.group is not None:
            raise ValueError(f"a sharded head has no logits: N x {self.num_classes} numbers on every rank; use topk")
        H = hidden.reshape(-1, self.in_features)
        out = torch.empty(H.shape[0], self.num_classes, dtype=self.dtype, device=H.device)
        for start, o in self.logit_chunks(H, rows=chunk_rows(H.shape[0])):
            out[:, start : start + o.shape[1]] = o
        return out.reshape(*hidden.shape[:-1], self.num_classes)

    # Writing -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        self._check_weight(weight)
        self._edited()
        self.refactor()
        weight = weight[self.shard.start : self.shard.stop]
        for rows in self.row_chunks():
            self.V[rows, : self.in_features] = weight[rows].to(self.V.dtype)
        self.refactor()

    @torch.no_grad()
    def set_bias(self, bias: Tensor) -> None:
        self._check_bias(bias)
        self._edited()
        self.refactor()
        self.V[:, self.in_features] = bias[self.shard.start : self.shard.stop].to(self.V.dtype)
        self.refactor()

    def carried(self, rows: Tensor, frame: int, kept: Tensor) -> Tensor:
        """Rows of V that were read in an earlier frame, in the current one; read again if all were rewritten since."""
        if frame < self.U.first_frame:
            return self.current_rows(kept)
        return rows if frame == self.U.frame else product(rows, self.U.past[frame - self.U.first_frame])

    def write_current_rows(self, kept: Tensor, rows: Tensor) -> None:
        """Overwrite rows of V, all different, with rows in the current frame."""
        self.V.index_copy_(0, kept, rows)
        if len(self.U.past) > 0:
            self.row_frames.index_fill_(0, kept, len(self.U.past))  # an assignment would copy the number to the device

    @torch.no_grad()
    def close_frame(self) -> None:
        """Start a new frame of U: W is the same, and further steps are written with U as the identity."""
        with full_precision(self.V.device):
            self.U.close_frame()

    @torch.no_grad()
    def refactor(self) -> None:
        """Write W itself into V (chunked, in place) and compute Q and w again from it, so that nothing drifts."""
        if self.V.is_meta:
            return  # it has no values
        self.shard.agree(self.Q.base, refactoring=self.V.dtype)
        w0 = self.w0.to(self.V.dtype)
        if not self.U.is_identity or w0.any():
            with full_precision(self.V.device):
                self.U.close_frame()
                for rows in self.row_chunks():
                    self.U.bring_forward_(self.V[rows], self.row_frames[rows]).add_(w0)
        self._start_over()
        self.summarize()

    def summarize(self) -> None:
        """``Q = W^T W`` and ``w = W^T 1``, where V is W."""
        Q = torch.zeros_like(self.Q.base)
        self.w.zero_()
        with full_precision(self.V.device):
            for rows in self.row_chunks():
                Q += gram_matrix(self.V[rows].to(Q.dtype))  # float32 would not do where q cancels
                self.w += self.V[rows].sum(0)
        self.Q.set_(self.shard.sum_(Q))
        self.shard.sum_(self.w)

    def _start_over(self) -> None:
        """V is W."""
        self.U.start_over()
        self.row_frames.zero_()
        self.w0.zero_()

    def loaded(self, Q: Tensor, steps: int) -> None:
        """After W was written to V, and ``W^T 1`` to w."""
        self.Q.set_(Q)
        self.steps = steps
        self._start_over()
        self._edited()

    def _edited(self) -> None:
        """W was replaced: gradients of the old W are no longer valid."""
        self.changed()
        self.forget()
        self.nearby = None

    def forget(self) -> None:
        super().forget()
        if self.nearby is not None:
            self.nearby.W.grad = None

    def changed(self) -> None:
        """W was changed, by this head or by a step."""
        self.version += 1
        self.written.fill_(self.steps % EXACT_IN_FLOAT32)

    def check_untouched(self) -> None:
        """Raise a ``RuntimeError`` if buffers were overwritten from outside, each for itself: they belong together."""
        if type(self.written) is not Tensor or self.written.is_meta or in_graph():
            return
        if self.training and self.written.device.type != "cpu":
            return  # reading it would wait for the device in every step
        if float(self.written) != self.steps % EXACT_IN_FLOAT32:
            raise RuntimeError(
                "the buffers of this head were overwritten from outside, as AveragedModel of torch.optim.swa_utils does, or "
                f"not initialized after to_empty(). {REMEDY}; after to_empty(), call load_state_dict()"
            )

    def row_chunks(self) -> Iterator[slice]:
        size = max(1, CHUNK // self.V.shape[1])
        for start in range(0, len(self.shard), size):
            yield slice(start, min(start + size, len(self.shard)))

    def _draw(self, std: float) -> None:
        """Normal weights, the same whatever the number of ranks: each block of classes has its own seed."""
        seed, block = int(torch.randint(2**62, ())), 4096
        for first in range(self.shard.start // block * block, self.shard.stop, block):
            generator = torch.Generator().manual_seed(seed + first)
            drawn = std * torch.randn(block, self.in_features, generator=generator, device="cpu")
            start, stop = max(first, self.shard.start), min(first + block, self.shard.stop)
            self.V[start - self.shard.start : stop - self.shard.start, : self.in_features] = drawn[start - first : stop - first]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``.to(dtype)`` concerns V and the frames, float32 at least; the small state is as precise as the device can."""

        def same_dtype(x: Tensor) -> Tensor:
            like: Tensor = fn(x.new_empty(0))
            return fn(x) if like.dtype == x.dtype else x.to(like.device)

        like = fn(self.V.new_empty(0, dtype=self.dtype))
        self.dtype, precise = widened(like.dtype), statistics_dtype(like.device)
        dtype = self._kept_dtype(precise)
        if precise == torch.float32:  # a device without float64, which cannot even be asked for it
            self._set_precision(precise)
            if dtype != self.V.dtype:
                self._change_dtype(dtype)
        self.nearby, had_no_values = None, self.V.is_meta
        super()._apply(same_dtype, recurse)
        self._set_precision(precise)
        if had_no_values and not self.V.is_meta:
            self.written.fill_(math.nan)  # until load_state_dict
            return self
        if dtype != self.V.dtype:
            self._change_dtype(dtype)
            self.refactor()  # Q and w belong to the rounded V
            self._edited()
        return self

    def _kept_dtype(self, precise: torch.dtype) -> torch.dtype:
        """Of V, U and the float copy of Q."""
        return precise if self.is_small else self.dtype

    def _change_dtype(self, dtype: torch.dtype) -> None:
        self.V = self.V.to(dtype)
        self.U.change_dtype(dtype)
        self.Q.change_dtype(dtype)

    def _set_precision(self, precise: torch.dtype) -> None:
        self.w, self.w0, self.Q.base = (x.to(precise) for x in (self.w, self.w0, self.Q.base))

    def get_extra_state(self) -> Tensor:
        return torch.tensor([*self.layout(), self.steps, *self.U.numbers()], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        steps, *numbers = state[3:].tolist()
        self.steps = int(steps)
        self.U.set_numbers(*numbers)
        self._edited()

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.is_small:
            self.summarize()
        super()._save_to_state_dict(*args)

    def layout(self) -> tuple[int, int, int]:
        """What the columns of V mean, and how many rows there are on all ranks: in_features, whether a bias follows, D."""
        return self.in_features, int(self.has_bias), self.num_classes

    def check_layout(self, saved: Tensor) -> None:
        """Raise a ``ValueError`` if the saved head is of another layout than this one."""
        found = tuple(int(x) for x in saved)
        if found != self.layout():
            names = ("in_features", "bias", "num_classes")
            theirs, ours = (", ".join(map("{}={}".format, names, x)) for x in (found, self.layout()))
            raise ValueError(f"a head with {theirs} was saved, but this one has {ours}: make it alike")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (extra := state_dict.get(prefix + "_extra_state")) is not None:
            self.check_layout(extra[:3])
        past = state_dict.get(prefix + "U.past")
        if (V := state_dict.get(prefix + "V")) is not None and self.V.is_meta:
            self.to_empty(device=V.device)  # also what is not loaded but computed
        if past is not None:  # the number of frames is part of the state, not of the architecture
            self.U.past = self.U.past.new_zeros(past.shape)
        state_dict.setdefault(prefix + "written", self.written.new_zeros(()))  # version 0.1.0 did not save it
        super()._load_from_state_dict(state_dict, prefix, *args)


def _bring_up_to_date(head: FactoredHead, _: object) -> None:
    """A small head may have loaded what was not small: V is not W then."""
    check_parts(head)
    if head.is_small and not head.V.is_meta and not (head.U.is_identity and not head.w0.any()):
        head.refactor()
