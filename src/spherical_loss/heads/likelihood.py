"""The base of layers that are both an output layer and its likelihood: targets, reductions, predictions."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spherical_loss._logits import REDUCTIONS, reduced
from spherical_loss.heads.base import TopK, check_batch, in_graph
from spherical_loss.likelihoods import as_tensor, normalized


class OutputAndLoss(NamedTuple):
    """What ``layer(hidden, target)`` returns, named as in ``torch.nn.AdaptiveLogSoftmaxWithLoss``."""

    output: Tensor
    """The log-probability of each target, ``(...)``; 0 where the target is ignored."""
    loss: Tensor
    """The negative of it, reduced."""


class LikelihoodLayer(nn.Module, ABC):
    """An output layer with its own likelihood, with the interface of ``torch.nn.AdaptiveLogSoftmaxWithLoss``.

    Args:
        in_features: d, the size of a hidden vector.
        n_classes: D, the number of classes.
        ignore_index: examples with this target are ignored, and left out of all computation.
        reduction: ``"mean"`` over the examples that count, ``"sum"``, or ``"none"``.
    """

    def __init__(self, in_features: int, n_classes: int, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        if in_features < 1 or n_classes < 2:
            raise ValueError(
                f"in_features is {in_features} and n_classes is {n_classes}, but they must be at least 1 and at least 2"
            )
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction {reduction!r} is not known; use one of {', '.join(REDUCTIONS)}")
        self.in_features = in_features
        self.n_classes = n_classes
        self.ignore_index = ignore_index
        self.reduction = reduction
        # The compiler would trace the backward pass of a factored head, and store nothing for its optimizer. Here, since
        # `disable` imports torch._dynamo, which takes as long as torch: not everyone who imports this module should wait.
        if not hasattr(LikelihoodLayer._of_targets, "_torchdynamo_disable"):
            LikelihoodLayer._of_targets = torch.compiler.disable(LikelihoodLayer._of_targets)  # type: ignore[method-assign]

    # What each layer defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def training_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        """What training maximizes, ``(N,)``, of hidden vectors (N, d) and in-range classes (N,)."""

    @abstractmethod
    def target_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        """The exact log-probability of these classes, ``(N,)``."""

    @abstractmethod
    def all_log_prob(self, H: Tensor) -> Tensor:
        """The exact log-probability of all classes, ``(N, D)``, without gradient."""

    @abstractmethod
    def best(self, H: Tensor, k: int) -> TopK:
        """Log-probabilities and classes of the k most probable, ``(N, k)`` each, without gradient."""

    # What follows from it ------------------------------------------------------------------------------------------

    def forward(self, hidden: Tensor, target: Tensor) -> OutputAndLoss:
        """Log-probabilities and loss of hidden vectors ``(..., d)`` and targets ``(...)``."""
        output = self._of_targets(hidden, target, exact=not self.training)
        return OutputAndLoss(output, reduced(-output, target != self.ignore_index, self.reduction))

    def log_prob(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """The exact log-probability of each target, ``(...)``; without targets, of all classes, ``(..., D)``, with no gradient.

        For targets an :class:`AdaptiveSphericalSoftmax` never computes the outputs of all classes.
        """
        if target is not None:
            return self._of_targets(hidden, target, exact=True)
        return self.all_log_prob(self._rows(hidden)).reshape(*hidden.shape[:-1], self.n_classes)

    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable class of each example, ``(...)``."""
        return self.topk(hidden, 1).classes.squeeze(-1)

    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The ``k`` most probable classes, best first, with their log-probabilities as scores: an exact search."""
        if not 1 <= k <= self.n_classes:
            raise ValueError(f"k is {k}, but must be between 1 and the {self.n_classes} classes")
        H = self._rows(hidden)
        # In a graph the search of the tail cannot depend on the examples: all classes are ranked.
        scores, classes = self.all_log_prob(H).topk(k) if in_graph() else self.best(H, k)
        shape = (*hidden.shape[:-1], k)
        return TopK(scores.reshape(shape), classes.reshape(shape))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, n_classes={self.n_classes}"

    def _rows(self, hidden: Tensor) -> Tensor:
        if hidden.dim() == 0 or hidden.shape[-1] != self.in_features:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}, but must end in in_features={self.in_features}")
        return hidden.reshape(-1, self.in_features)

    def _of_targets(self, hidden: Tensor, target: Tensor, exact: bool) -> Tensor:
        all_count = check_batch(hidden, target, None, self.in_features, self.n_classes, self.ignore_index)
        log_prob = self.target_log_prob if exact else self.training_log_prob
        H = hidden if hidden.dim() == 2 else hidden.reshape(-1, self.in_features)
        classes = target.reshape(-1).long()
        counted = None if all_count else classes != self.ignore_index
        if counted is None or counted.all():
            return log_prob(H, classes).reshape(target.shape)
        kept = counted.nonzero().squeeze(1)
        found = log_prob(H.index_select(0, kept), classes[kept])
        return found.new_zeros(len(classes)).index_copy(0, kept, found).reshape(target.shape)


def zipf(n_classes: int) -> Tensor:
    """Zipf's law, ``P(c) = log((c + 2) / (c + 1)) / log(D + 1)``: frequencies of classes in the order of their frequency."""
    return torch.log1p(1 / torch.arange(1, n_classes + 1, dtype=torch.float64))


def checked_frequencies(frequencies: Tensor | Sequence[float], n_classes: int) -> Tensor:
    """Frequencies (or counts) of n classes as float64 probabilities, or an error."""
    frequencies = as_tensor(frequencies)
    if frequencies.shape != (n_classes,):
        raise ValueError(
            f"frequencies have shape {tuple(frequencies.shape)}, but must be one number for each of the classes, ({n_classes},)"
        )
    return normalized(frequencies)


def checked_ranks(name: str, ranks: int | Sequence[int]) -> list[int]:
    """One rank or several, also from numpy and torch, as integers, or an error."""
    for each in ([ranks], ranks):
        try:
            return [operator.index(rank) for rank in each]  # type: ignore[union-attr, arg-type]
        except TypeError:
            continue
    raise TypeError(f"{name} is {ranks!r}, but must be an integer, or several of them, such as (100, 1_000)")
