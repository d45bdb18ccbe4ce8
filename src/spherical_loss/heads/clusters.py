"""Clusters: classes that have probabilities among themselves, by a softmax or by a loss of the family on a head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss.base import SphericalLoss
from spherical_loss.heads.base import Head, TopK
from spherical_loss.heads.factored.disjoint import can_share, disjoint_statistics
from spherical_loss.heads.factored.statistics import Span
from spherical_loss.likelihoods import QuadraticLikelihood
from spherical_loss.statistics import Statistics, widened


class Cluster(nn.Module):
    """``p(c | h)`` of the classes of one cluster, numbered from 0, given that the class is one of them."""

    @abstractmethod
    def log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        """Log-probabilities of these classes, ``(N, K)``, of hidden vectors (N, d)."""

    @abstractmethod
    def all_log_prob(self, H: Tensor) -> Tensor:
        """Log-probabilities of all classes of the cluster, ``(N, size)``."""

    @abstractmethod
    def topk(self, H: Tensor, k: int) -> TopK:
        """The ``k`` most probable classes of the cluster, or all of them, with their log-probabilities."""


class SoftmaxCluster(Cluster):
    """A softmax over the outputs of a linear layer, which starts at these probabilities ``p``, ``(size,)``."""

    def __init__(self, in_features: int, p: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(p), in_features))
        self.bias = nn.Parameter((p / p.sum()).log().to(self.weight))

    def log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        return self.all_log_prob(H).gather(1, classes)

    def all_log_prob(self, H: Tensor) -> Tensor:
        o = F.linear(H, self.weight, self.bias)
        return F.log_softmax(o, 1, dtype=widened(o.dtype))

    def topk(self, H: Tensor, k: int) -> TopK:
        return TopK(*self.all_log_prob(H).topk(min(k, len(self.bias))))


class SphericalCluster(Cluster):
    """A likelihood of the family on the statistics of a head, without the outputs of all its classes."""

    def __init__(self, head: Head, loss: SphericalLoss) -> None:
        super().__init__()
        self.head, self.loss = head, loss

    def log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        return -self.loss.each(self.head.of_classes(H, classes))

    def all_log_prob(self, H: Tensor) -> Tensor:
        return self.loss.log_probabilities(self.head.logits(H))

    def topk(self, H: Tensor, k: int) -> TopK:
        found = self.head.topk(H, min(k, self.head.num_classes), self.loss).classes
        return TopK(self.log_prob(H, found), found)


def log_prob_by_cluster(
    clusters: Sequence[Cluster], H: Tensor, ranks: Tensor, starts: Sequence[int], sizes: Sequence[int]
) -> list[Tensor]:
    """Log-probabilities of classes in the clusters that have them, as parts whose lengths add up to N.

    Args:
        clusters: T of them, softmaxes first.
        H: (N, d) hidden vectors; the first ``sizes[0]`` are those of the first cluster, and so on.
        ranks: (N,) the classes, in increasing order: ``starts[t]`` stands for class 0 of cluster t.
        starts: T numbers.
        sizes: T numbers.
    """
    tails = [cluster for cluster in clusters if isinstance(cluster, SphericalCluster)]
    alone = len(clusters) - (len(tails) if _can_share(tails) else 0)
    lengths = [*sizes[:alone], sum(sizes[alone:])]
    (*hidden, H), (*theirs, ranks) = H.split(lengths), ranks.split(lengths)
    each = zip(clusters[:alone], hidden, theirs, starts[:alone], strict=True)
    # A cluster without examples still gets its gradient: zero.
    found = [cluster.log_prob(h, (r - start).unsqueeze(1)).squeeze(1) for cluster, h, r, start in each]
    if alone < len(clusters):
        spans = [Span(tail.head, start) for tail, start in zip(tails, starts[alone:], strict=True)]  # type: ignore[arg-type]
        s, q, o_c, D = disjoint_statistics(spans, H, ranks, sizes[alone:])
        found.append(-tails[0].loss.each(Statistics(s, q, o_c, D)))  # type: ignore[arg-type]  # a D for each example
    return found


def _can_share(tails: Sequence[SphericalCluster]) -> bool:
    """Whether one call can serve all of these tails: factored heads, and a formula that takes a D for each example."""
    formulas = {type(tail.loss).formula for tail in tails}
    return formulas == {QuadraticLikelihood.formula} and can_share([tail.head for tail in tails])
