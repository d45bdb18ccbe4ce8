"""The losses and their distributions as functions, for those who prefer ``F.cross_entropy`` to ``nn.CrossEntropyLoss``.

Every function calls the module of the same name in :mod:`spherical_loss.losses`, which has the formula. ``options`` are
those of :class:`spherical_loss.Loss` (``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``) and, for the members
of the family, ``overwrite_logits``.

>>> import torch
>>> o, target = torch.tensor([[2.0, 0.0, -2.0]]), torch.tensor([0])
>>> taylor_softmax_loss(o, target, reduction="none")
tensor([0.3365])
>>> log_taylor_softmax(o)
tensor([[-0.3365, -1.9459, -1.9459]])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from spherical_loss import losses

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

    from spherical_loss.base import LossOptions
    from spherical_loss.base import SphericalLossOptions as Options


def taylor_softmax_loss(o: Tensor, target: Tensor, **options: Unpack[Options]) -> Tensor:
    """``-log`` of :func:`taylor_softmax` at the target; see :class:`~spherical_loss.TaylorSoftmaxLoss`."""
    return losses.TaylorSoftmaxLoss(**options)(o, target)


def spherical_softmax_loss(o: Tensor, target: Tensor, eps: float = losses.DEFAULT_EPS, **options: Unpack[Options]) -> Tensor:
    """``-log`` of :func:`spherical_softmax` at the target; see :class:`~spherical_loss.SphericalSoftmaxLoss`."""
    return losses.SphericalSoftmaxLoss(eps, **options)(o, target)


def quadratic_softmax_loss(o: Tensor, target: Tensor, a1: float, a2: float, a3: float, **options: Unpack[Options]) -> Tensor:
    """``-log`` of :func:`quadratic_softmax` at the target; see :class:`~spherical_loss.QuadraticSoftmaxLoss`."""
    return losses.QuadraticSoftmaxLoss(a1, a2, a3, **options)(o, target)


def squared_error_loss(o: Tensor, target: Tensor, target_value: float = 1.0, **options: Unpack[Options]) -> Tensor:
    """``||o - target_value e_c||^2``, summed over classes; see :class:`~spherical_loss.SquaredErrorLoss`."""
    return losses.SquaredErrorLoss(target_value, **options)(o, target)


def softmax_bound_loss(o: Tensor, target: Tensor, xi: float | None = None, **options: Unpack[Options]) -> Tensor:
    """An upper bound of log-softmax; see :class:`~spherical_loss.SoftmaxBoundLoss`."""
    return losses.SoftmaxBoundLoss(xi, **options)(o, target)


def z_loss(o: Tensor, target: Tensor, a: float, b: float, **options: Unpack[Options]) -> Tensor:
    """``softplus(a (b - z_c)) / a``; see :class:`~spherical_loss.ZLoss`."""
    return losses.ZLoss(a, b, **options)(o, target)


def softmax_loss(o: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
    """Log-softmax, the baseline; see :class:`~spherical_loss.SoftmaxLoss`."""
    return losses.SoftmaxLoss(**options)(o, target)


def abs_softmax_loss(o: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
    """Log-softmax of ``|o|``; see :class:`~spherical_loss.AbsSoftmaxLoss`."""
    return losses.AbsSoftmaxLoss(**options)(o, target)


def taylor_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """``(1 + o + o^2 / 2)`` over its sum along ``dim``."""
    return losses.TaylorSoftmaxLoss().probabilities(o, dim)


def log_taylor_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """Log of :func:`taylor_softmax`."""
    return losses.TaylorSoftmaxLoss().log_probabilities(o, dim)


def spherical_softmax(o: Tensor, eps: float = losses.DEFAULT_EPS, dim: int = -1) -> Tensor:
    """``(o^2 + eps)`` over its sum along ``dim``."""
    return losses.SphericalSoftmaxLoss(eps).probabilities(o, dim)


def log_spherical_softmax(o: Tensor, eps: float = losses.DEFAULT_EPS, dim: int = -1) -> Tensor:
    """Log of :func:`spherical_softmax`."""
    return losses.SphericalSoftmaxLoss(eps).log_probabilities(o, dim)


def quadratic_softmax(o: Tensor, a1: float, a2: float, a3: float, dim: int = -1) -> Tensor:
    """``(a1 + a2 o + a3 o^2)`` over its sum along ``dim``."""
    return losses.QuadraticSoftmaxLoss(a1, a2, a3).probabilities(o, dim)


def log_quadratic_softmax(o: Tensor, a1: float, a2: float, a3: float, dim: int = -1) -> Tensor:
    """Log of :func:`quadratic_softmax`."""
    return losses.QuadraticSoftmaxLoss(a1, a2, a3).log_probabilities(o, dim)


def abs_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """``exp(|o|)`` over its sum along ``dim``."""
    return losses.AbsSoftmaxLoss().probabilities(o, dim)


def log_abs_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """Log of :func:`abs_softmax`."""
    return losses.AbsSoftmaxLoss().log_probabilities(o, dim)
