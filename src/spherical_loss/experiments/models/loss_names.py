"""The losses by the names they have on the command line and in the stored runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import spherical_loss
from spherical_loss import Loss
from spherical_loss.losses import DEFAULT_EPS


@dataclass(frozen=True)
class LossEntry:
    """A loss, its name in the paper's tables, its options, and where :mod:`tune` looks for them (on a log scale)."""

    title: str
    make: Callable[..., Loss]
    defaults: dict[str, float | None] = field(default_factory=dict)
    search: dict[str, tuple[float, float]] = field(default_factory=dict)
    heads: tuple[str, ...] = ("dense", "gram", "factored")
    """The output layers of the language model that it works with: all that make statistics, for the losses of the family."""


# Z-loss: with D classes z_c is at most sqrt(D - 1), which is 3 for ten classes; a and b want tuning as eps does.
LOSSES: dict[str, LossEntry] = {
    "mse": LossEntry("MSE", spherical_loss.SquaredErrorLoss),
    "softmax": LossEntry("Log softmax", spherical_loss.SoftmaxLoss, heads=("dense", "sampled", "adaptive")),
    "abs": LossEntry("Log softmax abs", spherical_loss.AbsSoftmaxLoss, heads=("dense",)),
    "spherical": LossEntry(
        "Log spherical softmax", spherical_loss.SphericalSoftmaxLoss, {"eps": DEFAULT_EPS}, {"eps": (1e-4, 1.0)}
    ),
    "taylor": LossEntry("Log Taylor softmax", spherical_loss.TaylorSoftmaxLoss),
    "z": LossEntry("Z-loss", spherical_loss.ZLoss, {"a": 1.0, "b": 3.0}, {"a": (0.1, 10.0), "b": (1.0, 30.0)}),
    "bound": LossEntry("Bound of log softmax", spherical_loss.SoftmaxBoundLoss, {"xi": None}),
    "bound-fixed": LossEntry(
        "Bound of log softmax, fixed xi", spherical_loss.SoftmaxBoundLoss, {"xi": 3.0}, {"xi": (1.0, 100.0)}
    ),
}

LOSS_OPTIONS = ("eps", "a", "b", "xi")


def make_loss(name: str, options: dict[str, float | None]) -> Loss:
    """The loss of this name; of ``options``, the ones it knows.

    >>> make_loss("spherical", {"eps": 0.5, "a": 1.0})
    SphericalSoftmaxLoss(eps=0.5)
    """
    entry = LOSSES[name]
    return entry.make(**{key: options.get(key, default) for key, default in entry.defaults.items()})
