"""Softmax where the probability is, the spherical family where the classes are.

Most of the probability lies on few classes, and most of the classes have little of it. So the M most frequent classes have a
softmax, with one more outcome, "another class"; the others have a head and a loss of the family among themselves:

    log p(c | h) = log softmax(o)_c                                c is one of the M most frequent classes
    log p(c | h) = log softmax(o)_M - loss(tail(h, c))             c is another one

"Another class" is more probable than any class, and the loss has a larger curvature along its row: a learning rate that suits
the classes makes it oscillate, and all hidden vectors with it. So its output is ``a`` times that of an ordinary row: its steps
are a^2 times as large, at the curvature of the most frequent class: ``a^2 = p_0 (1 - p_0) / (p_M (1 - p_M))``, at most 1.
(A language model after 100,000 words of Penn Treebank, M = 2,000, SGD at rates of 1 for the trunk and 3 for the softmax: a
perplexity of 454 instead of 494, where a softmax over all 10,000 words has 456.)

This is what ``torch.nn.AdaptiveLogSoftmaxWithLoss`` is (E. Grave, A. Joulin, M. Cisse, D. Grangier, H. Jegou, Efficient softmax
approximation for GPUs, 2016, arXiv 1609.04309), with a tail of full rank whose cost does not depend on the number of classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss.base import SphericalLoss
from spherical_loss.heads.base import Head, TopK
from spherical_loss.heads.dense import DenseHead
from spherical_loss.heads.factored import FactoredHead
from spherical_loss.heads.gram import GramHead
from spherical_loss.heads.likelihood import LikelihoodLayer, checked_frequencies, zipf
from spherical_loss.heads.tiered import TieredHead
from spherical_loss.losses import TaylorSoftmaxLoss
from spherical_loss.statistics import widened

TAILS: dict[str, type[Head]] = {"factored": FactoredHead, "tiered": TieredHead, "gram": GramHead, "dense": DenseHead}


class AdaptiveSphericalSoftmax(LikelihoodLayer):
    """An exact likelihood over any number of classes, at the cost of a softmax over the most frequent ones.

    A step costs O(N d (M + d)) whatever D is, and only examples with a rare target reach the tail. :meth:`log_prob` of given
    targets costs the same, and never computes the outputs of all classes.

    Training: the softmax is an ordinary parameter (``weight`` and ``bias``), for any optimizer. ``layer.tail`` is a head of its
    own: a factored one is trained by ``FactoredSGD(layer.tail, lr)`` beside that optimizer, a tiered one by ``TieredSGD``; the
    parameters of a ``"gram"`` or
    ``"dense"`` tail are among ``layer.parameters()``. A batch without a rare target gives the tail a gradient of zero, as it
    would in the dense computation: ``FactoredSGD.step()`` then applies its weight decay, and nothing else.

    Start: zero weights, and biases for which the probabilities are the class frequencies. A loss without a ``prior_bias`` has a
    tail with He's random weights instead.

    Args:
        in_features: d, the size of a hidden vector.
        n_classes: D, the number of classes.
        frequent: M, the classes of the softmax: 1 to D - 1.
        loss: of the other classes among themselves, ``TaylorSoftmaxLoss()`` if None; it must be a likelihood of the family.
        frequencies: one positive number per class, ``(D,)``, such as counts + 1. The M largest are the classes of the softmax.
            Without them, classes must come in the order of their frequency, the most frequent first, and start with the
            frequencies of Zipf's law.
        tail: ``"factored"``, ``"tiered"``, ``"gram"`` or ``"dense"``, or a :class:`Head` over the D - M other classes, in the
            order of their frequency. Such a head keeps its weights; its bias is set if ``frequencies`` are given.
        ignore_index: examples with this target are ignored.
        reduction: ``"mean"`` over the examples that count, ``"sum"``, or ``"none"``.

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

    tail: Any  # a Head; FactoredSGD takes a FactoredHead only, which it is unless another one was asked for
    scale: Tensor
    order: Tensor
    rank: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        frequent: int = 2_000,
        loss: SphericalLoss | None = None,
        frequencies: Tensor | None = None,
        tail: str | Head = "factored",
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(in_features, n_classes, ignore_index, reduction)
        if not 1 <= frequent < n_classes:
            raise ValueError(
                f"frequent is {frequent}, but must be between 1 and {n_classes - 1} for {n_classes} classes: at least one is "
                "left to the tail; with few classes, a softmax over all of them (nn.Linear, F.cross_entropy) is what you want"
            )
        loss = TaylorSoftmaxLoss() if loss is None else loss
        _check_loss(loss)
        p = zipf(n_classes) if frequencies is None else checked_frequencies(frequencies, n_classes)
        order = torch.arange(n_classes) if frequencies is None else p.argsort(descending=True, stable=True).cpu()
        p = p.cpu()[order]
        rare = n_classes - frequent
        if isinstance(tail, Head):
            _check_tail(tail, in_features, rare, frequent)
        elif tail not in TAILS:
            raise ValueError(f"tail {tail!r} is not known; use one of {', '.join(TAILS)}, or a head over {rare} classes")

        self.frequent, self.loss = frequent, loss
        self.weight = nn.Parameter(torch.zeros(frequent + 1, in_features))
        outcomes = torch.cat([p[:frequent], p[frequent:].sum(0, keepdim=True)])
        outcomes = outcomes / outcomes.sum()
        scale = torch.ones_like(outcomes)
        curvature = outcomes * (1 - outcomes)
        scale[-1] = (curvature[0] / curvature[-1]).clamp_max(1).sqrt()
        self.bias = nn.Parameter((outcomes.log() / scale).to(self.weight.dtype))
        self.register_buffer("scale", scale.to(self.weight.dtype))  # of the outputs: that of "another class" differs from 1
        self.register_buffer("order", order)  # the classes, most frequent first
        self.register_buffer("rank", torch.empty_like(order), persistent=False)  # the position of each class in it
        self._rank()
        bias = loss.prior_bias(p[frequent:]) if loss.has_prior_bias else None
        if isinstance(tail, Head):
            self.tail = tail
            bias = None if frequencies is None or not tail.has_bias else bias
        else:
            known: dict[str, Any] = {"frequencies": p[frequent:]} if tail == "tiered" else {}
            self.tail = TAILS[tail](in_features, rare, init="he" if bias is None else "zero", **known)
        if bias is not None:
            self.tail.set_bias(bias)

    def training_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        return self.target_log_prob(H, classes)

    def target_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        rank = self.rank[classes]
        log_p = -F.cross_entropy(self._outcomes(H), rank.clamp_max(self.frequent), reduction="none")
        rare = (rank >= self.frequent).nonzero().squeeze(1)  # if there are none, the tail still gets its gradient: zero
        among_others = self._tail_log_prob(H.index_select(0, rare), (rank[rare] - self.frequent).unsqueeze(1)).squeeze(1)
        return log_p.index_add(0, rare, among_others.to(log_p.dtype))

    @torch.no_grad()
    def all_log_prob(self, H: Tensor) -> Tensor:
        log_p = F.log_softmax(self._outcomes(H), 1)
        among_others = self.loss.log_probabilities(self.tail.logits(H)).to(log_p.dtype)
        by_rank = torch.cat([log_p[:, :-1], among_others.add_(log_p[:, -1:])], 1)
        return by_rank.index_select(1, self.rank)

    @torch.no_grad()
    def best(self, H: Tensor, k: int) -> TopK:
        log_p = F.log_softmax(self._outcomes(H), 1)
        scores, ranks = log_p[:, :-1].topk(min(k, self.frequent))
        if k > self.frequent:  # too few: the tail supplies the others
            scores, ranks = F.pad(scores, (0, k - self.frequent), value=-torch.inf), F.pad(ranks, (0, k - self.frequent))
        # Only where "another class" is more probable than the last one found can the tail have a better one.
        open_ = (log_p[:, -1] > scores[:, -1]).nonzero().squeeze(1)
        hidden, other = H.index_select(0, open_), log_p[open_, -1:]
        found = self.tail.topk(hidden, min(k, self.tail.num_classes), self.loss).classes
        found_scores = other + self._tail_log_prob(hidden, found).to(other.dtype)
        merged = torch.cat([scores[open_], found_scores], 1).topk(k)
        scores[open_] = merged.values
        ranks[open_] = torch.cat([ranks[open_], found + self.frequent], 1).gather(1, merged.indices)
        return TopK(scores, self.order[ranks])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frequent={self.frequent}"

    def _outcomes(self, H: Tensor) -> Tensor:
        """The outputs of the softmax, (N, M + 1), the last one for "another class"; float32 at least."""
        o = F.linear(H, self.weight, self.bias)
        return o.to(widened(o.dtype)).mul_(self.scale)

    def _tail_log_prob(self, H: Tensor, ranks: Tensor) -> Tensor:
        """Log-probabilities of these classes among the classes of the tail, (N, K)."""
        s, q, o_c = self.tail.statistics(H, ranks)
        return -self.loss.formula(s.unsqueeze(1), q.unsqueeze(1), o_c, self.tail.num_classes)

    def _rank(self) -> None:
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


def _check_tail(tail: Head, in_features: int, rare: int, frequent: int) -> None:
    if (tail.in_features, tail.num_classes) != (in_features, rare):
        raise ValueError(
            f"the tail has in_features={tail.in_features} and num_classes={tail.num_classes}, but must have {in_features} and "
            f"{rare}: all classes but the {frequent} frequent ones"
        )
