"""The output layers that compete, behind one interface.

A contender is an entry of ``CONTENDERS``. Words are in the order of their frequency, the most frequent first. Every layer
starts with zero weights at the word frequencies, but for torch's adaptive softmax, which starts as torch starts it, and the
Z-loss, which has no such start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from spherical_loss import (
    AdaptiveSphericalSoftmax,
    FactoredHead,
    FactoredSGD,
    SampledSoftmax,
    SphericalLoss,
    SphericalSoftmaxLoss,
    TaylorSoftmaxLoss,
    TieredHead,
    TieredSGD,
    ZLoss,
)
from spherical_loss.experiments.models.language_model import FREQUENT_OF_MANY
from spherical_loss.experiments.models.language_model import TAIL_CUTOFFS as TAIL_CUTOFFS_OF_MANY

NEGATIVES = 1_024
FREQUENT, TAIL_CUTOFFS = FREQUENT_OF_MANY, TAIL_CUTOFFS_OF_MANY  # of AdaptiveSphericalSoftmax
EPS = 0.02  # of the spherical softmax; its rates are those of the Taylor softmax times eps
LATER_SOFTMAXES = 2.0  # their learning rate, in that of the first softmax
TAILS = 0.16  # the same of a tail, times the square root of its number of classes
WAITING = 80  # examples that wait for a step of a tail: fewer would not be worth what a step costs
CUTOFFS = (2_000, 20_000)  # of nn.AdaptiveLogSoftmaxWithLoss
CUTS, POWER = (100, 3_000), 0.35  # of three tiers, which cost less than the automatic four, and learn as much in a step

Measure = Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]]


class Layer(nn.Module, ABC):
    """An output layer under test."""

    @abstractmethod
    def objective(self, hidden: Tensor, target: Tensor) -> Tensor:
        """What is minimized: the mean loss of a batch."""

    @abstractmethod
    def optimizers(self, lr: float) -> list[Optimizer]:
        """What trains this layer at the rate ``lr``, which the search finds."""

    def is_due(self, optimizer: Optimizer, step: int) -> bool:
        """Whether this optimizer takes a step after this batch, counted from 1; else the gradients of batches add up."""
        return True

    @abstractmethod
    def measure(self) -> Measure:
        """A function of hidden vectors (N, d) and targets (N,): the exact log-probability of each target, (N,) (None for a
        layer that only ranks), and its rank among all classes, (N,), 0 for the most probable."""


class Likelihood(Layer):
    """A layer with the interface of ``torch.nn.AdaptiveLogSoftmaxWithLoss``: that one, or one of ours."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def objective(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.layer(hidden, target).loss

    def optimizers(self, lr: float) -> list[Optimizer]:
        return [SGD(self.layer.parameters(), lr)]

    def log_probabilities(self) -> Callable[[Tensor], Tensor]:
        """Of hidden vectors (N, d), the log-probabilities of all classes, (N, D)."""
        return self.layer.log_prob

    def measure(self) -> Measure:
        return of_log_probabilities(self.log_probabilities())


class Mixed(Likelihood):
    """``AdaptiveSphericalSoftmax``: softmaxes over the frequent words, the family over the others."""

    def __init__(self, d: int, counts: Tensor, loss: SphericalLoss, tails: float) -> None:
        layer = AdaptiveSphericalSoftmax(d, len(counts), FREQUENT, loss, frequencies=counts, tail_cutoffs=TAIL_CUTOFFS)
        super().__init__(layer)
        self.tails = tails

    def optimizers(self, lr: float) -> list[Optimizer]:
        later = [p for softmax in self.layer.softmaxes for p in softmax.parameters()]
        softmaxes: list[dict[str, Any]] = [
            {"params": [self.layer.weight, self.layer.bias]},
            {"params": later, "lr": LATER_SOFTMAXES * lr},
        ]
        return [SGD(softmaxes, lr), *(FactoredSGD(tail, self.tails * tail.num_classes**0.5 * lr) for tail in self.layer.tails)]

    def is_due(self, optimizer: Optimizer, step: int) -> bool:
        if not isinstance(optimizer, FactoredSGD) or step == 1:
            return True
        return sum(len(batch.H) for batch in optimizer.head.gradients) >= WAITING

    def log_probabilities(self) -> Callable[[Tensor], Tensor]:
        for tail in self.layer.tails:  # else each call would bring all rows up to date
            tail.refactor()
        return super().log_probabilities()


class DenseSoftmax(Layer):
    """A linear layer and its cross-entropy."""

    def __init__(self, d: int, counts: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(d, len(counts))
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.copy_((counts / counts.sum()).log())

    def objective(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden), target)

    def optimizers(self, lr: float) -> list[Optimizer]:
        return [SGD(self.linear.parameters(), lr)]

    def measure(self) -> Measure:
        return of_log_probabilities(lambda hidden: self.linear(hidden).log_softmax(1))


class Family(Layer):
    """A loss of the spherical family on a head."""

    def __init__(self, counts: Tensor, loss: SphericalLoss, head: FactoredHead | TieredHead) -> None:
        super().__init__()
        self.loss, self.head = loss, head
        if loss.has_prior_bias:
            self.head.set_bias(loss.prior_bias(counts))

    def seen(self, hidden: Tensor) -> Tensor:
        """The hidden vectors as the head sees them."""
        return hidden

    def objective(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(self.seen(hidden), target))

    def optimizers(self, lr: float) -> list[Optimizer]:
        return [TieredSGD(self.head, lr) if isinstance(self.head, TieredHead) else FactoredSGD(self.head, lr)]

    def measure(self) -> Measure:
        linear = self.head.to_linear()  # once for all examples

        def measured(hidden: Tensor, target: Tensor) -> tuple[Tensor | None, Tensor]:
            o, D = linear(self.seen(hidden)), linear.out_features
            s, q = (x.sum(1, keepdim=True, dtype=torch.float64) for x in (o, o.square()))
            o_c = o.gather(1, target.unsqueeze(1)).double()
            log_p = -self.loss.formula(s, q, o_c, D).squeeze(1) if self.loss.has_probabilities else None
            return log_p, rank(self.loss.score(s.float(), q.float(), o, D), target)

        return measured


class ThreeTiers(Family):
    """Three tiers, on hidden vectors of mean square 1: Adam lets those of the trunk grow to a squared norm of 10^4 and more,
    and with it the steps of the output layer."""

    head: TieredHead

    def seen(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[1:])

    def optimizers(self, lr: float) -> list[Optimizer]:
        return [TieredSGD(self.head, lr, POWER)]


def rank(scores: Tensor, target: Tensor) -> Tensor:
    """How many other classes have a score as high as the target's, (N,): equal scores count against it."""
    return (scores >= scores.gather(1, target.unsqueeze(1))).sum(1) - 1


def of_log_probabilities(log_prob: Callable[[Tensor], Tensor]) -> Measure:
    def measured(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_p = log_prob(hidden)
        return log_p.gather(1, target.unsqueeze(1)).squeeze(1), rank(log_p, target)

    return measured


@dataclass(frozen=True)
class Contender:
    """How to make a layer, ``make(d, counts, **options)``, and where the search begins."""

    make: Callable[..., Layer]
    lr: float
    """Of the trunk."""
    output_lr: float
    options: dict[str, float] = field(default_factory=dict)
    """Further values that are searched."""


def one_head(make_loss: Callable[[], SphericalLoss]) -> Callable[..., Layer]:
    return lambda d, counts: Family(counts, make_loss(), FactoredHead(d, len(counts), init="zero"))


def automatic_tiers(d: int, counts: Tensor) -> Layer:
    return Family(counts, TaylorSoftmaxLoss(), TieredHead.by_frequency(d, counts, init="zero"))


def three_tiers(make_loss: Callable[..., SphericalLoss], init: str = "zero") -> Callable[..., Layer]:
    def make(d: int, counts: Tensor, **options: float) -> Layer:
        cuts = [cut for cut in CUTS if cut < len(counts)]
        return ThreeTiers(counts, make_loss(**options), TieredHead.by_frequency(d, counts, cuts, init=init))

    return make


def mixed(make_loss: Callable[[], SphericalLoss], tails: float) -> Callable[..., Layer]:
    return lambda d, counts: Mixed(d, counts, make_loss(), tails)


def spherical() -> SphericalLoss:
    return SphericalSoftmaxLoss(eps=EPS)


def sampled(d: int, counts: Tensor) -> Layer:
    return Likelihood(SampledSoftmax(d, len(counts), NEGATIVES, counts))


def adaptive(d: int, counts: Tensor) -> Layer:
    return Likelihood(nn.AdaptiveLogSoftmaxWithLoss(d, len(counts), [cut for cut in CUTOFFS if cut < len(counts)]))


CONTENDERS = {  # in the order in which they are trained: the main question first
    "sampled softmax": Contender(sampled, 0.01, 0.014),
    "adaptive spherical softmax, Taylor": Contender(mixed(TaylorSoftmaxLoss, TAILS), 0.01, 0.014),
    "Taylor, three tiers": Contender(three_tiers(TaylorSoftmaxLoss), 0.01, 100.0),
    "Taylor, one head": Contender(one_head(TaylorSoftmaxLoss), 0.01, 10.0),
    "adaptive softmax": Contender(adaptive, 0.01, 0.05),
    "Z-loss, three tiers": Contender(three_tiers(ZLoss, init="he"), 0.01, 20.0, {"a": 0.1, "b": 30.0}),
    "dense softmax": Contender(DenseSoftmax, 0.01, 0.05),
    "adaptive spherical softmax, spherical": Contender(mixed(spherical, EPS * TAILS), 0.01, 0.014),
    "spherical, three tiers": Contender(three_tiers(spherical), 0.01, EPS * 100),
    "spherical, one head": Contender(one_head(spherical), 0.01, EPS * 10),
    "Taylor, tiers": Contender(automatic_tiers, 0.01, 1.0),  # of the study of the gap as classes are added
}
