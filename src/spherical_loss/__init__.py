"""Softmax alternatives of the spherical family for PyTorch.

Losses: :mod:`spherical_loss.losses` (modules), :mod:`spherical_loss.functional` (functions). Output layers that never compute
the logits: :mod:`spherical_loss.heads`.
"""

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
