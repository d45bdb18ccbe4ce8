"""Softmax where the probability is, the spherical family where the classes are.

Most of the probability lies on few classes, and most of the classes have little of it. So the most frequent classes have a
softmax, with one more outcome for each cluster of the others; and every cluster has probabilities of its own:

    log p(c | h) = log softmax(o)_c                                c is one of the most frequent classes
    log p(c | h) = log softmax(o)_k + log p(c | k, h)              c is in cluster k

A cluster of rather frequent classes is a softmax again. A cluster of rare ones, a tail, is a loss of the family on a head: its
cost does not depend on the number of classes. With one softmax and one tail there is one cluster, "another class".

A cluster is more probable than any class, and the loss has a larger curvature along its row: a learning rate that suits
the classes makes it oscillate, and all hidden vectors with it. So its output is ``a`` times that of an ordinary row: its steps
are a^2 times as large, at the curvature of the most frequent class: ``a^2 = p_0 (1 - p_0) / (p_k (1 - p_k))``, at most 1.
(A language model after 100,000 words of Penn Treebank, M = 2,000, SGD at rates of 1 for the trunk and 3 for the softmax: a
perplexity of 454 instead of 494, where a softmax over all 10,000 words has 456.)

This is what ``torch.nn.AdaptiveLogSoftmaxWithLoss`` is (E. Grave, A. Joulin, M. Cisse, D. Grangier, H. Jegou, Efficient softmax
approximation for GPUs, 2016, arXiv 1609.04309), with tails of full rank whose cost does not depend on the number of classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss.base import SphericalLoss
from spherical_loss.heads.base import Head, TopK
from spherical_loss.heads.clusters import Cluster, SoftmaxCluster, SphericalCluster, log_prob_by_cluster
from spherical_loss.heads.dense import DenseHead
from spherical_loss.heads.factored import FactoredHead
from spherical_loss.heads.gram import GramHead
from spherical_loss.heads.likelihood import LikelihoodLayer, checked_frequencies, checked_ranks, zipf
from spherical_loss.heads.tiered import TieredHead
from spherical_loss.losses import TaylorSoftmaxLoss
from spherical_loss.statistics import widened

TAILS: dict[str, type[Head]] = {"factored": FactoredHead, "tiered": TieredHead, "gram": GramHead, "dense": DenseHead}


class AdaptiveSphericalSoftmax(LikelihoodLayer):
    """An exact likelihood over any number of classes, at the cost of a softmax over the most frequent ones.

    A step costs O(N d (M + d)) whatever D is, for M classes in softmaxes; an example reaches only the cluster of its target.
    :meth:`log_prob` of given targets costs the same, and never computes the outputs of all classes.

    With several softmaxes a step costs much less, and with several tails the model is better: ``frequent=(100, 300, 700, 1_500,
    3_000), tail_cutoffs=12_000`` is a softmax over the 100 most frequent classes and six clusters: softmaxes over the next 200,
    400, 800 and 1,500 classes, and tails of the next 9,000 and of the others. All factored tails are computed in one pass.

    Training: the softmaxes are ordinary parameters, for any optimizer; the second and later ones, whose classes are rarer, can
    have some two times the learning rate of the first (``layer.softmaxes`` has them). A tail, ``layer.tail`` or each of
    ``layer.tails``, is a head of its own: a factored one is trained by ``FactoredSGD(tail, lr)`` beside that optimizer, a
    tiered one by ``TieredSGD``; the parameters of a ``"gram"`` or ``"dense"`` tail are among ``layer.parameters()``. A batch
    without a target in a tail gives it a gradient of zero, as it would in the dense computation: ``FactoredSGD.step()`` then
    applies its weight decay, and nothing else. If few examples of a batch reach a tail, a step for each batch costs much for
    what it learns: call its ``step()`` and ``zero_grad()`` once for several batches, such as those of some 80 examples.

    Start: zero weights, and biases for which the probabilities are the class frequencies. A loss without a ``prior_bias`` has
    tails with He's random weights instead.

    Args:
        in_features: d, the size of a hidden vector.
        n_classes: D, the number of classes.
        frequent: M, the classes of the softmax: 1 to D - 1. Or increasing ranks, such as ``(100, 500, 2_000)``: the
            classes up to the first have a softmax, those up to the next one another softmax among themselves, and so on.
        loss: of the classes of a tail among themselves, ``TaylorSoftmaxLoss()`` if None; it must be a likelihood of the family.
        frequencies: one positive number per class, ``(D,)``, such as counts + 1; ranks are those of the largest first.
            Without them, classes must come in the order of their frequency, the most frequent first, and start with the
            frequencies of Zipf's law.
        tail: ``"factored"``, ``"tiered"``, ``"gram"`` or ``"dense"``. Or a :class:`Head` over the D - M other classes, in the
            order of their frequency; with ``tail_cutoffs``, a list of them. Such a head keeps its weights; its bias is set if
            ``frequencies`` are given.
        ignore_index: examples with this target are ignored.
        reduction: ``"mean"`` over the examples that count, ``"sum"``, or ``"none"``.
        tail_cutoffs: increasing ranks between M and D at which a further tail begins.

    >>> import torch
    >>> from spherical_loss.heads import FactoredSGD
    >>> _ = torch.manual_seed(0)
    >>> trunk, layer = torch.nn.Linear(5, 8), AdaptiveSphericalSoftmax(8, 100_000, frequent=100)
    >>> parameters = [*trunk.parameters(), *layer.parameters()]
    >>> optimizers = torch.optim.Adam(parameters, lr=0.01), FactoredSGD(layer.tail, lr=1e5)
    >>> x, target = torch.randn(16, 5), 50 * torch.arange(16)  # two frequent classes, and fourteen others
    >>> for step in range(100):
    ...     output, loss = layer(trunk(x), target)
    ...     for optimizer in optimizers:
    ...         optimizer.zero_grad()
    ...     loss.backward()
    ...     for optimizer in optimizers:
    ...         optimizer.step()
    >>> bool(loss < 3), layer.log_prob(trunk(x), target).shape, layer.topk(trunk(x), 5).classes.shape
    (True, torch.Size([16]), torch.Size([16, 5]))
    """

    scale: Tensor
    order: Tensor
    rank: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        frequent: int | Sequence[int] = 2_000,
        loss: SphericalLoss | None = None,
        frequencies: Tensor | Sequence[float] | None = None,
        tail: str | Head | Sequence[Head] = "factored",
        ignore_index: int = -100,
        reduction: str = "mean",
        tail_cutoffs: int | Sequence[int] = (),
    ) -> None:
        super().__init__(in_features, n_classes, ignore_index, reduction)
        softmaxes = checked_ranks("frequent", frequent)
        cutoffs = [*softmaxes, *checked_ranks("tail_cutoffs", tail_cutoffs)]
        _check_cutoffs(softmaxes, cutoffs, n_classes)
        loss = TaylorSoftmaxLoss() if loss is None else loss
        _check_loss(loss)
        with torch.device("cpu"):  # these are read here, also where the layer is made on the meta device
            p = zipf(n_classes) if frequencies is None else checked_frequencies(frequencies, n_classes).cpu()
            order = torch.arange(n_classes) if frequencies is None else p.argsort(descending=True, stable=True)
        first, *clusters = p[order].tensor_split(cutoffs)
        middle, rare = clusters[: len(softmaxes) - 1], clusters[len(softmaxes) - 1 :]
        given = _given_tails(tail, in_features, [len(part) for part in rare])

        self.frequent, self.loss = softmaxes[-1], loss
        self.cutoffs = tuple(cutoffs)
        self.weight = nn.Parameter(torch.zeros(len(first) + len(clusters), in_features))
        outcomes = torch.cat([first, torch.stack([part.sum() for part in clusters])])
        outcomes = outcomes / outcomes.sum()
        curvature = outcomes * (1 - outcomes)
        scale = (curvature[0] / curvature).clamp_max(1).sqrt()
        scale[: len(first)] = 1
        self.bias = nn.Parameter((outcomes.log() / scale).to(self.weight))
        self.register_buffer("scale", scale.to(self.weight))  # of the outputs: those of clusters differ from 1
        self.register_buffer("order", order.to(self.weight.device))  # the classes, most frequent first
        self.register_buffer("rank", torch.empty_like(self.order), persistent=False)  # the position of each class in it
        self._rank()
        if given is None:
            tails = [_started_tail(str(tail), in_features, loss, part) for part in rare]
        else:
            tails = given
            if frequencies is not None and loss.has_prior_bias:
                for head, part in zip(tails, rare, strict=True):
                    if head.has_bias:
                        head.set_bias(loss.prior_bias(part))
        self.clusters = nn.ModuleList(
            [*(SoftmaxCluster(in_features, part) for part in middle), *(SphericalCluster(head, loss) for head in tails)]
        )

    @property
    def tails(self) -> list[Any]:
        """The heads of the tails, the most frequent classes first; ``FactoredHead`` unless others were asked for."""
        return [cluster.head for cluster in self.clusters if isinstance(cluster, SphericalCluster)]

    @property
    def tail(self) -> Any:
        """The head of the only tail."""
        if len(self.tails) > 1:
            raise ValueError(
                f"the layer has {len(self.tails)} tails, of {', '.join(str(tail.num_classes) for tail in self.tails)} classes: "
                "use layer.tails, such as [FactoredSGD(tail, lr) for tail in layer.tails]"
            )
        return self.tails[0]

    @property
    def softmaxes(self) -> list[SoftmaxCluster]:
        """The second and later softmaxes."""
        return [cluster for cluster in self.clusters if isinstance(cluster, SoftmaxCluster)]

    def training_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        return self.target_log_prob(H, classes)

    def target_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        rank, M = self.rank[classes], self.cutoffs[0]
        beyond = torch.stack([rank >= start for start in self.cutoffs])
        which = beyond.sum(0)  # 0, or 1 + the cluster
        log_p = -F.cross_entropy(self._outcomes(H), torch.where(which == 0, rank, M - 1 + which), reduction="none")
        # The examples of a cluster stand together in the order of the ranks: the device is waited for once, for where they are.
        rank, examples = rank.sort()
        starts = [len(rank) - count for count in beyond.sum(1).tolist()]
        sizes = [end - start for start, end in itertools.pairwise([*starts, len(rank)])]
        inside = examples[starts[0] :]
        among = log_prob_by_cluster(
            list(self.clusters),  # type: ignore[arg-type]
            H.index_select(0, inside),
            rank[starts[0] :],
            self.cutoffs,
            sizes,
        )
        return log_p.index_add(0, inside, torch.cat([x.to(log_p.dtype) for x in among]))

    @torch.no_grad()
    def all_log_prob(self, H: Tensor) -> Tensor:
        log_p = F.log_softmax(self._outcomes(H), 1)
        M = self.cutoffs[0]
        parts = [
            cluster.all_log_prob(H).to(log_p.dtype).add_(log_p[:, M + k, None])
            for k, (_, cluster) in enumerate(self._clusters())
        ]
        return torch.cat([log_p[:, :M], *parts], 1).index_select(1, self.rank)

    @torch.no_grad()
    def best(self, H: Tensor, k: int) -> TopK:
        log_p = F.log_softmax(self._outcomes(H), 1)
        M = self.cutoffs[0]
        scores, ranks = log_p[:, :M].topk(min(k, M))
        if k > M:  # too few: the clusters supply the others
            scores, ranks = F.pad(scores, (0, k - M), value=-torch.inf), F.pad(ranks, (0, k - M))
        for j, (start, cluster) in enumerate(self._clusters()):
            # Only where a cluster is more probable than the last one found can it have a better one.
            open_ = (log_p[:, M + j] > scores[:, -1]).nonzero().squeeze(1)
            found = cluster.topk(H.index_select(0, open_), k)
            found_scores = log_p[open_, M + j, None] + found.scores.to(log_p.dtype)
            merged = torch.cat([scores[open_], found_scores], 1).topk(k)
            scores[open_] = merged.values
            ranks[open_] = torch.cat([ranks[open_], found.classes + start], 1).gather(1, merged.indices)
        return TopK(scores, self.order[ranks])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frequent={self.frequent}, cutoffs={self.cutoffs}"

    def _clusters(self) -> Iterator[tuple[int, Cluster]]:
        """Every cluster, with the rank of its first class."""
        return zip(self.cutoffs, self.clusters, strict=True)  # type: ignore[arg-type]

    def _outcomes(self, H: Tensor) -> Tensor:
        """The outputs of the first softmax, (N, classes + clusters); float32 at least."""
        o = F.linear(H, self.weight, self.bias)
        return o.to(widened(o.dtype)).mul_(self.scale)

    def _rank(self) -> None:
        self.rank = torch.empty_like(self.order)  # where order is now
        self.rank[self.order] = torch.arange(self.n_classes, device=self.order.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._rank()


def _check_loss(loss: SphericalLoss) -> None:
    name = type(loss).__name__
    if not isinstance(loss, SphericalLoss):
        raise TypeError(
            f"loss is {name}, but the tail needs a loss of the spherical family: "
            "use TaylorSoftmaxLoss() or SphericalSoftmaxLoss(eps)"
        )
    if not loss.is_likelihood:
        raise ValueError(
            f"{name} does not model probabilities (is_likelihood is False), so the layer would have no likelihood: "
            "use TaylorSoftmaxLoss() or SphericalSoftmaxLoss(eps)"
        )
    if loss.weight is not None or loss.label_smoothing > 0:
        raise ValueError(
            f"{name} has a weight per class or label_smoothing={loss.label_smoothing}, so it is not a likelihood: "
            "create it without them"
        )


def _check_cutoffs(softmaxes: Sequence[int], cutoffs: Sequence[int], n_classes: int) -> None:
    if len(softmaxes) == 1 and not 1 <= softmaxes[0] < n_classes:
        raise ValueError(
            f"frequent is {softmaxes[0]}, but must be between 1 and {n_classes - 1} for {n_classes} classes: at least one is "
            "left to the tail; with few classes, a softmax over all of them (nn.Linear, F.cross_entropy) is what you want"
        )
    bounds = [0, *cutoffs, n_classes]
    if not softmaxes or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"frequent and tail_cutoffs are {tuple(softmaxes)} and {tuple(cutoffs[len(softmaxes) :])}, but must be ranks that "
            f"increase, between 1 and {n_classes - 1} for {n_classes} classes, at least one of them in frequent"
        )


def _given_tails(tail: str | Head | Sequence[Head], in_features: int, sizes: list[int]) -> list[Head] | None:
    """The heads that were given, or None where the kind of head was."""
    if isinstance(tail, str):
        if tail not in TAILS:
            wanted = " and ".join(str(size) for size in sizes)
            raise ValueError(f"tail {tail!r} is not known; use one of {', '.join(TAILS)}, or a head over {wanted} classes")
        return None
    heads = [tail] if isinstance(tail, Head) else list(tail)
    found = [(head.in_features, head.num_classes) for head in heads]
    expected = [(in_features, size) for size in sizes]
    if found != expected:
        raise ValueError(
            f"the tails have in_features and num_classes {found}, but must have {expected}: a head for each part of the "
            "classes beyond frequent"
        )
    return heads


def _started_tail(kind: str, in_features: int, loss: SphericalLoss, p: Tensor) -> Head:
    bias = loss.prior_bias(p) if loss.has_prior_bias else None
    known: dict[str, Any] = {"frequencies": p} if kind == "tiered" else {}
    head = TAILS[kind](in_features, len(p), init="he" if bias is None else "zero", **known)
    if bias is not None:
        head.set_bias(bias)
    return head
