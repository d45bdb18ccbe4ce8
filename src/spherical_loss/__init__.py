"""Softmax alternatives of the spherical family for PyTorch.

Losses: :mod:`spherical_loss.losses` (modules), :mod:`spherical_loss.functional` (functions). Output layers that never compute
the logits: :mod:`spherical_loss.heads`.
"""

from typing import TYPE_CHECKING

from spherical_loss import functional
from spherical_loss.base import Loss, SphericalLoss
from spherical_loss.heads import (
    AdaptiveSphericalSoftmax,
    DenseHead,
    FactoredHead,
    FactoredSGD,
    GramHead,
    Head,
    SampledSoftmax,
)
from spherical_loss.losses import (
    AbsSoftmaxLoss,
    QuadraticSoftmaxLoss,
    SoftmaxBoundLoss,
    SoftmaxLoss,
    SphericalSoftmaxLoss,
    SquaredErrorLoss,
    TaylorSoftmaxLoss,
    ZLoss,
)
from spherical_loss.statistics import Statistics

__all__ = [
    "AbsSoftmaxLoss",
    "AdaptiveSphericalSoftmax",
    "DenseHead",
    "FactoredHead",
    "FactoredSGD",
    "GramHead",
    "Head",
    "Loss",
    "QuadraticSoftmaxLoss",
    "SampledSoftmax",
    "SoftmaxBoundLoss",
    "SoftmaxLoss",
    "SphericalLoss",
    "SphericalSoftmaxLoss",
    "SquaredErrorLoss",
    "Statistics",
    "TaylorSoftmaxLoss",
    "ZLoss",
    "functional",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """``__version__`` of the installed package, read when it is asked for."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("spherical-loss")
