"""The losses by the names they have on the command line and in the stored runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import spherical_loss

if TYPE_CHECKING:
    from spherical_loss import Loss


STATISTICS = ("dense", "gram", "factored", "tiered")
LIKELIHOOD = (*STATISTICS, "adaptive-spherical")  # the loss of its tail


@dataclass(frozen=True)
class LossEntry:
    """A loss, its name in the paper's tables, its class, its options, and the ranges ``tune`` searches (on a log scale)."""

    title: str
    class_name: str
    """In :mod:`spherical_loss`; a name, so that the command line needs no torch."""
    defaults: dict[str, float | None] = field(default_factory=dict)
    search: dict[str, tuple[float, float]] = field(default_factory=dict)
    heads: tuple[str, ...] = STATISTICS
    """The output layers of the language model that it works with: all that make statistics, for the losses of the family."""


# Z-loss: with D classes z_c is at most sqrt(D - 1), which is 3 for ten classes; a and b need tuning, like eps.
LOSSES: dict[str, LossEntry] = {
    "mse": LossEntry("MSE", "SquaredErrorLoss"),
    "softmax": LossEntry("Log softmax", "SoftmaxLoss", heads=("dense", "sampled", "adaptive")),
    "abs": LossEntry("Log softmax abs", "AbsSoftmaxLoss", heads=("dense",)),
    "spherical": LossEntry("Log spherical softmax", "SphericalSoftmaxLoss", {"eps": 0.01}, {"eps": (1e-4, 1.0)}),
    "taylor": LossEntry("Log Taylor softmax", "TaylorSoftmaxLoss"),
    "z": LossEntry("Z-loss", "ZLoss", {"a": 1.0, "b": 3.0}, {"a": (0.1, 10.0), "b": (1.0, 30.0)}),
    "bound": LossEntry("Bound of log softmax", "SoftmaxBoundLoss", {"xi": None}),
    "bound-fixed": LossEntry("Bound of log softmax, fixed xi", "SoftmaxBoundLoss", {"xi": 3.0}, {"xi": (1.0, 100.0)}),
}

LOSS_OPTIONS = ("eps", "a", "b", "xi")


def make_loss(name: str, options: dict[str, float | None]) -> Loss:
    """The loss of this name, with those of ``options`` that it has.

    >>> make_loss("spherical", {"eps": 0.5, "a": 1.0})
    SphericalSoftmaxLoss(eps=0.5)
    """
    entry = LOSSES[name]
    loss = getattr(spherical_loss, entry.class_name)
    return loss(**{key: options.get(key, default) for key, default in entry.defaults.items()})
