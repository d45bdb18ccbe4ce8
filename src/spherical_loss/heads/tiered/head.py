"""A head made of heads over consecutive ranges of classes, the most frequent first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spherical_loss.base import Loss
from spherical_loss.heads.base import Head, TopK
from spherical_loss.heads.dense import DenseHead, ParameterHead
from spherical_loss.heads.factored.head import FEW_CLASSES, FactoredHead
from spherical_loss.heads.factored.keeper import GradientKeeper
from spherical_loss.heads.factored.shard import Shard
from spherical_loss.heads.factored.statistics import FactoredStatistics, Span
from spherical_loss.heads.gram import GramHead
from spherical_loss.heads.likelihood import checked_frequencies, checked_ranks, zipf
from spherical_loss.likelihoods import as_tensor
from spherical_loss.statistics import statistics_dtype

KINDS: dict[str, type[Head]] = {"dense": DenseHead, "gram": GramHead, "factored": FactoredHead}
MOST_TIERS = 4  # by default: each costs as much as half a factored head, and 3 or 4 are as good as a rate for each class
LEAST_RATIO = 10.0  # between the frequencies of neighbouring tiers: less makes no difference to the rate


class TieredHead(GradientKeeper):
    """An output layer in tiers of classes of similar frequency; each tier is a head with its own learning rate.

    The statistics are sums over the tiers, and the gradients are those of one layer. A step costs O(T N d^2) for T factored
    tiers, whatever D is; :class:`TieredSGD` takes it. Classes may come in any order: the head keeps the permutation, and
    ``weight``, ``bias``, ``logits`` and all classes are in the order of the caller.

    Args:
        in_features: d, the size of a hidden vector.
        num_classes: D, the number of classes.
        bias: whether there is an output bias.
        init: ``"he"`` or ``"zero"``, as in :class:`Head`.
        ignore_index: targets with this value are marked as ignored in the statistics.
        cuts: the number of classes in the tiers up to each cut: ``(100, 1_000)`` makes tiers of the 100 most frequent classes,
            the next 900, and the others. By default where the frequency falls by equal factors, in at most four tiers.
        kinds: ``"factored"``, ``"gram"`` or ``"dense"``, for all tiers or one for each. The weights of Gram and dense tiers are
            ordinary parameters, and :class:`TieredSGD` trains them, too: do not give them to the optimizer of the trunk.
        frequencies: one positive number per class, (D,), such as counts. Without them, classes must come in the order of their
            frequency, the most frequent first, and have the frequencies of Zipf's law.
        group: a process group: every rank keeps its share of the rows of each factored tier, as in :class:`FactoredHead`.

    >>> import torch
    >>> from spherical_loss import TaylorSoftmaxLoss, TieredHead, TieredSGD
    >>> _ = torch.manual_seed(0)
    >>> counts, loss = torch.randint(1, 1000, (5_000,)), TaylorSoftmaxLoss()
    >>> head = TieredHead.by_frequency(8, counts, cuts=(100, 1_000), loss=loss)
    >>> optimizer = TieredSGD(head, lr=100.0)
    >>> hidden, target = torch.randn(16, 8), torch.multinomial(counts.float(), 16)
    >>> before = loss(head(hidden, target))
    >>> before.backward()
    >>> optimizer.step()
    >>> bool(loss(head(hidden, target)) < before), [len(tier.V) for tier in head.tiers]
    (True, [100, 900, 4000])
    """

    order: Tensor
    place: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        init: str = "he",
        ignore_index: int = -100,
        *,
        cuts: int | Sequence[int] | None = None,
        kinds: str | Sequence[str] = "factored",
        frequencies: Tensor | Sequence[float] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, init, ignore_index)
        with torch.device("cpu"):  # these are read here, also where the head is made on the meta device
            p = zipf(num_classes) if frequencies is None else checked_frequencies(frequencies, num_classes).cpu()
        order = p.argsort(descending=True, stable=True)
        p = p[order] / p.sum()
        cuts = _automatic_cuts(p) if cuts is None else _checked_cuts(cuts, num_classes)
        self.bounds = [0, *cuts, num_classes]
        chosen = _checked_kinds(kinds, len(self.bounds) - 1)
        self.tier_frequencies = [float(p[start:stop].mean()) for start, stop in pairwise(self.bounds)]
        """The mean frequency of a class in each tier."""
        self.register_buffer("order", order.to(torch.empty(0).device))  # the classes, most frequent first
        self.register_buffer("place", torch.empty_like(self.order), persistent=False)  # the position of each class in it
        self._invert_order()
        self.tiers = nn.ModuleList()
        self.ranges: list[tuple[Head, int, int]] = []
        """Each tier with the places of its classes in the order of frequency: from the first to the one after the last."""
        for kind, (start, stop) in zip(chosen, pairwise(self.bounds), strict=True):
            options: dict[str, Any] = {"group": group} if kind is FactoredHead else {}
            tier = kind(in_features, stop - start, bias, init, **options)
            if isinstance(tier, FactoredHead):
                tier.is_part = num_classes > max(in_features, FEW_CLASSES)
            self.tiers.append(tier)
            self.ranges.append((tier, start, stop))
        self.spans = [Span(tier, start) for tier, start, _ in self.ranges if isinstance(tier, FactoredHead)]
        """The factored tiers, whose passes and steps share computations."""
        self.parameter_tiers = [(tier, start, stop) for tier, start, stop in self.ranges if isinstance(tier, ParameterHead)]
        """The others."""
        ordered = None if group is None else sha256(order.numpy().tobytes()).hexdigest()[:8]
        self.shard = Shard(num_classes, group, in_features=in_features, bias=bias, cuts=cuts, order=ordered)
        self.shard.agree(self.order)

    @classmethod
    def by_frequency(
        cls,
        in_features: int,
        frequencies: Tensor | Sequence[float],
        cuts: int | Sequence[int] | None = None,
        loss: Loss | None = None,
        **options: Any,
    ) -> TieredHead:
        """A head over the classes of these frequencies (or counts), (D,), in any order.

        With a ``loss`` that has a ``prior_bias``, weights start at zero and the bias such that the probabilities are the
        frequencies. ``options`` are those of the class.
        """
        if loss is not None and not isinstance(loss, Loss):
            raise TypeError(f"loss is {type(loss).__name__}, but must be one of this library, such as TaylorSoftmaxLoss()")
        frequencies = as_tensor(frequencies)
        starts_at_prior = loss is not None and loss.has_prior_bias and options.get("bias", True) and "init" not in options
        if starts_at_prior:
            options["init"] = "zero"
        head = cls(in_features, frequencies.numel(), frequencies=frequencies, cuts=cuts, **options)
        if loss is not None and starts_at_prior:
            head.set_bias(loss.prior_bias(frequencies))
        return head

    # The tiers -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """How often the weights of factored tiers changed: a gradient belongs to one version."""
        return sum(span.head.version for span in self.spans)

    def tier_factors(self, power: float) -> list[float]:
        """The learning rate of each tier in that of the rarest, ``(p_tier / p_min)^power``."""
        return [(p / min(self.tier_frequencies)) ** power for p in self.tier_frequencies]

    @property
    def steps(self) -> int:
        return max((span.head.steps for span in self.spans), default=0)

    # Reading -------------------------------------------------------------------------------------------------------

    def statistics(self, H: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place = self.place[classes]
        if self.spans:
            for span in self.spans:
                span.head.check_untouched()
            # The empty tensor asks for a backward pass even where the hidden vectors are data and need no gradient.
            s, q, o_c = FactoredStatistics.apply(H, H.new_empty(0, requires_grad=self.training), self, place)
        else:
            precise = statistics_dtype(H.device)
            s, q, o_c = (torch.zeros(shape, dtype=precise, device=H.device) for shape in (len(H), len(H), place.shape))
        for tier, start, stop in self.parameter_tiers:
            inside = (place >= start) & (place < stop)
            s_t, q_t, o_t = tier.statistics(H.to(tier.weight.dtype), (place - start).clamp(0, stop - start - 1))
            s, q, o_c = s + s_t, q + q_t, torch.where(inside, o_t, o_c)
        return s, q, o_c

    @torch.no_grad()
    def sums(self, H: Tensor) -> tuple[Tensor, Tensor]:
        parts = [tier.sums(H) for tier, _, _ in self.ranges]
        s, q = (torch.stack(x).sum(0) for x in zip(*parts, strict=True))
        return s, q

    def logit_chunks(self, H: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        for tier, first, _ in self.ranges:
            if isinstance(tier, ParameterHead) and self.shard.rank > 0:
                continue  # every rank keeps all of its rows, and one of them searches them
            for start, o in tier.logit_chunks(H, rows):
                yield first + start, o

    def class_of(self, found: Tensor) -> Tensor:
        return self.order[found]

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        if self.shard.group is None:
            return super().topk(hidden, k, loss)
        return self.shard.topk(hidden, k, lambda H: super(TieredHead, self).topk(H, k, loss))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """All outputs, ``(..., D)``; for evaluation: no gradient flows through them."""
        if self.shard.group is not None:
            raise ValueError(f"a sharded head has no logits: N x {self.num_classes} numbers on every rank; use topk")
        return torch.cat([tier.logits(hidden) for tier, _, _ in self.ranges], -1).index_select(-1, self.place)

    @torch.no_grad()
    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        place = self.place[rows]
        out: Tensor | None = None
        for tier, start, stop in self.ranges:
            inside = ((place >= start) & (place < stop)).nonzero().squeeze(1)
            part = tier.dense_rows(place[inside] - start)
            out = part.new_empty(len(place), part.shape[1]) if out is None else out
            out[inside] = part
        assert out is not None
        return out

    @property
    def weight(self) -> Tensor:
        """The dense values (D, d), computed: for export and tests."""
        return torch.cat([tier.weight.detach() for tier, _, _ in self.ranges]).index_select(0, self.place)

    @property
    def bias(self) -> Tensor | None:
        if not self.has_bias:
            return None
        return torch.cat([tier.bias.detach() for tier, _, _ in self.ranges]).index_select(0, self.place)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cuts={tuple(self.bounds[1:-1])}"

    # Writing -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        self._check_weight(weight)
        if self.order.is_meta:
            return  # it has no values
        self.forget()
        for tier, start, stop in self.ranges:
            tier.set_weight(weight[self.order[start:stop].to(weight.device)])

    @torch.no_grad()
    def set_bias(self, bias: Tensor) -> None:
        self._check_bias(bias)
        if self.order.is_meta:
            return
        self.forget()
        for tier, start, stop in self.ranges:
            tier.set_bias(bias[self.order[start:stop].to(bias.device)])

    def refactor(self) -> None:
        """As :meth:`FactoredHead.refactor`, for all factored tiers."""
        for span in self.spans:
            span.head.refactor()

    def layout(self) -> list[int]:
        """in_features, whether there is a bias, and where the tiers end."""
        return [self.in_features, int(self.has_bias), *self.bounds[1:]]

    def check_layout(self, saved: Sequence[float]) -> None:
        """Raise a ``ValueError`` if the saved head is of another layout than this one."""
        found = [int(x) for x in saved]
        if found != self.layout():
            names = "in_features={}, bias={}, num_classes={} and cuts={}"
            theirs, ours = (
                names.format(*x[:2], x[-1], tuple(x[2:-1])) if len(x) > 2 else f"the layout {x}" for x in (found, self.layout())
            )
            raise ValueError(f"a head with {theirs} was saved, but this one has {ours}: make it alike")

    def loaded(self, order: Tensor, frequencies: Sequence[float]) -> None:
        """After the tiers were written."""
        self.order.copy_(order)
        self._invert_order()
        self.tier_frequencies = list(frequencies)
        self.forget()

    def _invert_order(self) -> None:
        self.place = torch.empty_like(self.order)  # where order is now
        self.place[self.order] = torch.arange(self.num_classes, device=self.order.device)

    def get_extra_state(self) -> Tensor:
        """The layout, and the frequencies of the tiers."""
        return torch.tensor([*self.layout(), *self.tier_frequencies], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.tier_frequencies = state[len(self.layout()) :].tolist()
        self.forget()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (extra := state_dict.get(prefix + "_extra_state")) is not None:
            self.check_layout(extra.tolist()[: (len(extra) + 2) // 2])  # as many frequencies follow as there are tiers
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._invert_order()


def _automatic_cuts(p: Tensor) -> list[int]:
    """Where frequencies, sorted, fall by equal factors: as many tiers as make the factor at least 10, and at most 4."""
    decades = math.log(float(p[0] / p[-1])) / math.log(LEAST_RATIO)
    tiers = max(1, min(MOST_TIERS, int(decades)))
    thresholds = p[0] * (p[-1] / p[0]) ** (torch.arange(1, tiers, dtype=p.dtype, device=p.device) / tiers)
    # The classes more frequent than each threshold; with few classes, some tiers may have none.
    counts = torch.searchsorted(-p, -thresholds).tolist()
    return sorted({int(n) for n in counts if 0 < n < len(p)})


def _checked_cuts(cuts: int | Sequence[int], num_classes: int) -> list[int]:
    ranks = checked_ranks("cuts", cuts)
    if any(start >= stop for start, stop in pairwise([0, *ranks, num_classes])):
        raise ValueError(
            f"cuts are {tuple(ranks)}, but must increase and lie between 1 and {num_classes - 1}: tiers need classes; without "
            "cuts the head chooses them"
        )
    return ranks


def _checked_kinds(kinds: str | Sequence[str], tiers: int) -> list[type[Head]]:
    names = [kinds] * tiers if isinstance(kinds, str) else list(kinds)
    if len(names) != tiers:
        raise ValueError(f"kinds are {tuple(names)}, {len(names)} of them, but there are {tiers} tiers")
    for name in names:
        if name not in KINDS:
            raise ValueError(f"kind {name!r} is not known; use one of {', '.join(KINDS)}")
    return [KINDS[name] for name in names]
