"""Softmax alternatives of the spherical family for PyTorch.

Losses: :mod:`spherical_loss.losses` (modules), :mod:`spherical_loss.functional` (functions).
"""

from spherical_loss import functional
from spherical_loss.base import Loss, SphericalLoss
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
    "Loss",
    "QuadraticSoftmaxLoss",
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
