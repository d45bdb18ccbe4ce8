"""What every head shares: shapes, targets, the exact chunked search, and conversion from and to ``nn.Linear``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from spherical_loss._targets import out_of_range
from spherical_loss.base import Loss, SphericalLoss
from spherical_loss.statistics import Statistics, widened

INITS = ("he", "zero")
CHUNK = 2**21  # elements of a temporary: 8 MiB of float32; larger ones are paged in anew for each chunk
GRAPH_CHUNK = 2**16  # classes of a chunk in a graph: sixteen chunks of a million classes

AnyHead = TypeVar("AnyHead", bound="Head")


class TopK(NamedTuple):
    """The ``k`` best classes of each example, best first: ``(..., k)`` each."""

    scores: Tensor
    classes: Tensor


class Head(nn.Module, ABC):
    """A linear output layer ``o = W h + b`` that gives statistics instead of logits.

    Args:
        in_features: d, the size of a hidden vector.
        num_classes: D, the number of classes.
        bias: whether there is an output bias.
        init: ``"he"`` for weights of standard deviation ``sqrt(2 / d)``, or ``"zero"`` (with which the spherical softmax and
            the Z-loss need a bias that is not zero; see :meth:`set_bias`). The bias starts at zero.
        ignore_index: targets with this value are marked as ignored in the statistics.

    >>> import torch
    >>> from spherical_loss import TaylorSoftmaxLoss
    >>> from spherical_loss.heads import DenseHead
    >>> head, loss = DenseHead(8, 100), TaylorSoftmaxLoss()
    >>> hidden, target = torch.randn(4, 8), torch.tensor([3, 1, 4, 1])
    >>> loss(head(hidden, target)).shape, head.topk(hidden, 5, loss).classes.shape
    (torch.Size([]), torch.Size([4, 5]))
    """

    def __init__(
        self, in_features: int, num_classes: int, bias: bool = True, init: str = "he", ignore_index: int = -100
    ) -> None:
        super().__init__()
        if in_features < 1 or num_classes < 1:
            raise ValueError(f"in_features is {in_features} and num_classes is {num_classes}, but both must be at least 1")
        if init not in INITS:
            raise ValueError(
                f"init {init!r} is not known; use one of {', '.join(INITS)}, or Head.from_linear for given weights"
            )
        self.in_features = in_features
        self.num_classes = num_classes
        self.has_bias = bias
        self.ignore_index = ignore_index

    # What each head defines ----------------------------------------------------------------------------------------

    weight: Any  # the dense values (D, d)
    bias: Any  # the dense values (D,), or None

    @abstractmethod
    def statistics(self, H: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``s``, ``q`` of shape (N,) and ``o_c`` of shape (N, K), for hidden vectors (N, d) and in-range classes (N, K)."""

    @abstractmethod
    def sums(self, H: Tensor) -> tuple[Tensor, Tensor]:
        """``s`` and ``q`` alone, (N,) each, without gradient."""

    @abstractmethod
    def logit_chunks(self, H: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Logits of ``rows`` classes at a time: (first one, (N, rows)); see :meth:`class_of`. Callers turn gradients off."""

    @abstractmethod
    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        """``[W b]`` of these classes, (rows, d) or (rows, d + 1), without gradient."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """All outputs, ``(..., D)``."""

    @abstractmethod
    def set_weight(self, weight: Tensor) -> None:
        """Overwrite the weights with dense values (D, d)."""

    @abstractmethod
    def set_bias(self, bias: Tensor) -> None:
        """Overwrite the bias with (D,), such as ``loss.prior_bias(frequencies)``."""

    # What follows from it ------------------------------------------------------------------------------------------

    def forward(self, hidden: Tensor, target: Tensor, target_weight: Tensor | None = None) -> Statistics:
        """Statistics of hidden vectors ``(..., d)`` and targets ``(...)``.

        With ``target_weight``, both are ``(..., K)``: K classes per example, whose losses are added with these weights.
        """
        all_count = check_batch(hidden, target, target_weight, self.in_features, self.num_classes, self.ignore_index)
        target = target.long()
        marked = target if all_count else torch.where(target == self.ignore_index, -1, target)
        in_range = marked if all_count else marked.clamp_min(0)
        classes = in_range.reshape(-1, 1 if target_weight is None else target.shape[-1])
        found = self.of_classes(hidden if hidden.dim() == 2 else hidden.reshape(-1, self.in_features), classes)
        batch = hidden.shape[:-1]

        def shaped(s: Tensor, q: Tensor, o_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            s, q = (s, q) if s.shape == batch else (s.reshape(batch), q.reshape(batch))
            return s, q, o_c.reshape(target.shape)

        nearby = None if found.nearby is None else shaped(*found.nearby)
        return Statistics(*shaped(*found[:3]), found.D, marked, target_weight, nearby, found.head)

    def of_classes(self, H: Tensor, classes: Tensor) -> Statistics:
        """:meth:`statistics`, with all that a loss needs to know about them."""
        return Statistics(*self.statistics(H, classes), self.num_classes)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        """The ``k`` most probable classes, ranked as the loss ranks them: an exact search, a chunk of classes at a time."""
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k is {k}, but must be between 1 and the {self.num_classes} classes")
        H = hidden.reshape(-1, self.in_features)
        N, D = H.shape[0], self.num_classes
        s, q = self.sums_for(loss, H)
        best = TopK(H.new_empty(N, 0, dtype=widened(H.dtype)), torch.empty(N, 0, dtype=torch.long, device=H.device))
        for start, o in self.logit_chunks(H, rows=chunk_rows(N, at_least=k)):
            scores = loss.score(s.unsqueeze(1), q.unsqueeze(1), o.to(best.scores.dtype), D).to(best.scores.dtype)
            best = _better(best, scores, start, k)
        shape = (*hidden.shape[:-1], best.scores.shape[1])
        return TopK(best.scores.reshape(shape), self.class_of(best.classes).reshape(shape))

    def sums_for(self, loss: Loss, H: Tensor) -> tuple[Tensor, Tensor]:
        """What ``loss.score`` needs: a loss given by its formula alone ranks through s and q, all others by the outputs."""
        s, q = self.sums(H) if type(loss).score is SphericalLoss.score else H.new_zeros(2, H.shape[0])
        return s, q

    @torch.no_grad()
    def outputs_of(self, H: Tensor, classes: Tensor) -> Tensor:
        """The outputs of K classes for each of the hidden vectors (N, d), (N, K), without gradient; float32 at least."""
        rows = self.dense_rows(classes.flatten()).unflatten(0, classes.shape)
        with full_precision(H.device):
            X = H.to(widened(rows.dtype)).unsqueeze(2)
            o = torch.bmm(rows[:, :, : self.in_features].to(X.dtype), X).squeeze(2)
        return o + rows[:, :, -1] if self.has_bias else o

    def class_of(self, found: Tensor) -> Tensor:
        """The classes of outputs that are counted as :meth:`logit_chunks` counts them."""
        return found

    @classmethod
    def from_linear(cls: type[AnyHead], linear: nn.Linear | Head, **options: Any) -> AnyHead:
        """A head with the weights of a linear layer, or of any other head, copied. The ``ignore_index`` of a head stays."""
        if isinstance(linear, Head):
            options.setdefault("ignore_index", linear.ignore_index)
        elif not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear or a head, not {type(linear).__name__}")
        weight, bias = linear.weight.detach(), linear.bias
        head = cls(weight.shape[1], weight.shape[0], bias=bias is not None, init="zero", **options)
        head.to(device=weight.device, dtype=weight.dtype)
        head.set_weight(weight)
        if bias is not None:
            head.set_bias(bias.detach())
        return head

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """A linear layer with the weights of this head, copied."""
        weight, bias = self.weight, self.bias
        linear = nn.Linear(self.in_features, self.num_classes, bias=bias is not None, device="meta", dtype=weight.dtype)
        linear.to_empty(device=weight.device)
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
        return linear

    @torch.no_grad()
    def average_into(self, average: nn.Linear, share: float) -> None:
        """``average <- (1 - share) average + share W``, also for the bias; a chunk of classes at a time.

        Averages of weights for evaluation (EMA, SWA): exact, since linear in W, for every head. The average of buffers of a
        factored head, as by ``torch.optim.swa_utils.AveragedModel``, has nothing to do with it.

        Args:
            average: starts as ``head.to_linear()``.
            share: ``1 - decay`` for an exponential average, ``1 / (n + 1)`` for the mean after n others.

        >>> import torch
        >>> from spherical_loss.heads import DenseHead
        >>> head = DenseHead(8, 100)
        >>> average, first = head.to_linear(), head.weight.detach().clone()
        >>> head.set_weight(torch.zeros(100, 8))
        >>> head.average_into(average, share=0.25)
        >>> torch.allclose(average.weight, 0.75 * first)
        True
        """
        if average.weight.shape != (self.num_classes, self.in_features) or (average.bias is not None) != self.has_bias:
            raise ValueError(f"{average} is no average of {self}: start from head.to_linear()")
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}, but must be between 0 and 1")
        size = max(1, CHUNK // self.in_features)
        for start in range(0, self.num_classes, size):
            here = slice(start, start + size)
            rows = self.dense_rows(here).to(average.weight)
            average.weight[here].lerp_(rows[:, : self.in_features], share)
            if average.bias is not None:
                average.bias[here].lerp_(rows[:, self.in_features], share)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.has_bias}"

    def _check_bias(self, bias: Tensor) -> None:
        if not self.has_bias:
            raise ValueError("this head was made with bias=False; make it with bias=True to set one")
        if bias.shape != (self.num_classes,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, but must be {(self.num_classes,)}")

    def _check_weight(self, weight: Tensor) -> None:
        if weight.shape != (self.num_classes, self.in_features):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but must be {(self.num_classes, self.in_features)}")


def check_batch(
    hidden: Tensor, target: Tensor, target_weight: Tensor | None, in_features: int, num_classes: int, ignore_index: int
) -> bool:
    """Raise an error that says what is wrong with the shapes, dtypes or classes of a batch.

    Returns whether all targets count: False if one is ignored, and where that cannot be seen without waiting for the device.
    """
    if hidden.dim() == 0 or hidden.shape[-1] != in_features:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, but must end in in_features={in_features}")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden is {hidden.dtype}, but must be floating point")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(
            f"target is {target.dtype}, but a head takes class indices (int64); target_weight gives K of them weights"
        )
    batch = hidden.shape[:-1]
    if target_weight is None and target.shape != batch:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but hidden of shape {tuple(hidden.shape)} needs {tuple(batch)}"
        )
    if target_weight is not None and (target.shape[:-1] != batch or target_weight.shape != target.shape):
        raise ValueError(
            f"target and target_weight have shapes {tuple(target.shape)} and {tuple(target_weight.shape)}, but hidden of "
            f"shape {tuple(hidden.shape)} needs both to be {(*batch, 'K')}"
        )
    if target_weight is not None and target.shape[-1] == 0:
        raise ValueError(f"target has shape {tuple(target.shape)}: an example needs one target at least")
    if target.device.type != "cpu" or target.numel() == 0 or torch.compiler.is_compiling():
        return False
    least, largest = (int(x) for x in target.aminmax())
    if least >= 0 and largest < num_classes:
        return not 0 <= ignore_index < num_classes and not in_graph()
    bad = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if bad.any():
        raise IndexError(out_of_range(target, num_classes, ignore_index, "the outputs of this head"))
    return False


def in_graph() -> bool:
    """Whether ``torch.export``, ``torch.compile`` or ``torch.jit.trace`` is making a graph, which other batches will use."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def chunk_rows(n: int, at_least: int = 1) -> int:
    """How many classes to take at a time for ``n`` examples, so that a temporary has about ``CHUNK`` elements.

    In a graph the loop over the chunks is unrolled, and the next batch may have another size: n must not decide their number.
    """
    return max(at_least, GRAPH_CHUNK if in_graph() else CHUNK // max(1, n))


def _better(best: TopK, scores: Tensor, start: int, k: int) -> TopK:
    """The ``k`` best, from those found so far and a chunk of scores (N, n) of the classes from ``start`` on.

    A search of the chunk takes longer than the product that made it. So it is left to the examples whose best new score is
    above their k-th one, soon a few; but not on a GPU, where the search is quick and counting them would wait for it.
    """
    if best.scores.shape[1] == k and scores.device.type == "cpu" and not in_graph():
        rows = (~(scores.amax(1) <= best.scores[:, -1])).nonzero().squeeze(1)  # NaN is above all, as torch.topk has it
        if 2 * len(rows) < len(scores):
            if len(rows):
                old = TopK(*(x.index_select(0, rows) for x in best))
                for x, new in zip(best, _merged(old, scores.index_select(0, rows), start, k), strict=True):
                    x.index_copy_(0, rows, new)
            return best
    return _merged(best, scores, start, k)


def _merged(best: TopK, scores: Tensor, start: int, k: int) -> TopK:
    top = scores.topk(min(k, scores.shape[1]))
    both = torch.cat([best.scores, top.values], 1)
    classes = torch.cat([best.classes, top.indices + start], 1)
    values, order = both.topk(min(k, both.shape[1]))
    return TopK(values, classes.gather(1, order))


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in the dtype of their factors: ``q`` needs float32 even where autocast runs the trunk in bfloat16."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def target_rows(H: Tensor, g_c: Tensor, inverse: Tensor, n: int) -> Tensor:
    """The rows of ``sum g_c h^T`` that are not zero, (n, d): the gradients ``g_c`` (N, K) go to the rows ``inverse`` (N, K)."""
    R = H.new_zeros(n, H.shape[1])
    for k in range(g_c.shape[1]):
        R.index_add_(0, inverse[:, k], g_c[:, k : k + 1] * H)
    return R


def selected(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, (N, K, d), in half the time."""
    return rows.index_select(0, index.flatten()).view(*index.shape, rows.shape[1])


def weighted_sum(g: Tensor, rows: Tensor) -> Tensor:
    """``sum_k g_nk rows_nk``, (N, d); one target per example is by far the most common case."""
    return g * rows.squeeze(1) if g.shape[1] == 1 else torch.einsum("nk,nkd->nd", g, rows)


def add_weighted_sum(out: Tensor, g: Tensor, rows: Tensor) -> Tensor:
    """``out += sum_k g_nk rows_nk``"""
    return out.addcmul_(g, rows.squeeze(1)) if g.shape[1] == 1 else out.add_(weighted_sum(g, rows))


def summed(tensors: list[Tensor]) -> Tensor:
    """Their sum; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    total = tensors[0] + tensors[1]
    for x in tensors[2:]:
        total += x
    return total


def he_std(in_features: int) -> float:
    return math.sqrt(2 / in_features)
