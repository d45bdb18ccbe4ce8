"""The losses and their distributions as functions, for those who prefer ``F.cross_entropy`` to ``nn.CrossEntropyLoss``.

Functions and the modules of :mod:`spherical_loss.losses` share the formulas, which are there. ``options`` are those of
:class:`spherical_loss.Loss` (``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``) and, for the members of the
family, ``overwrite_logits``.

>>> import torch
>>> o, target = torch.tensor([[2.0, 0.0, -2.0]]), torch.tensor([0])
>>> taylor_softmax_loss(o, target, reduction="none")
tensor([0.3365])
>>> log_taylor_softmax(o)
tensor([[-0.3365, -1.9459, -1.9459]])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from spherical_loss import _logits, losses
from spherical_loss.likelihoods import quadratic_log_probabilities, quadratic_loss, quadratic_probabilities
from spherical_loss.quadratic import Quadratic

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

    from spherical_loss.base import LossOptions
    from spherical_loss.base import SphericalLossOptions as Options


def taylor_softmax_loss(o: Tensor, target: Tensor, **options: Unpack[Options]) -> Tensor:
    """``-log`` of :func:`taylor_softmax` at the target; see :class:`~spherical_loss.TaylorSoftmaxLoss`."""
    return _quadratic_loss(losses.TAYLOR, o, target, options)


def spherical_softmax_loss(o: Tensor, target: Tensor, eps: float = losses.DEFAULT_EPS, **options: Unpack[Options]) -> Tensor:
    """``-log`` of :func:`spherical_softmax` at the target; see :class:`~spherical_loss.SphericalSoftmaxLoss`."""
    return _quadratic_loss(losses._spherical(eps), o, target, options)


def quadratic_softmax_loss(o: Tensor, target: Tensor, a1: float, a2: float, a3: float, **options: Unpack[Options]) -> Tensor:
    """``-log`` of :func:`quadratic_softmax` at the target; see :class:`~spherical_loss.QuadraticSoftmaxLoss`."""
    return _quadratic_loss(losses._positive_quadratic(a1, a2, a3), o, target, options)


def squared_error_loss(o: Tensor, target: Tensor, target_value: float = 1.0, **options: Unpack[Options]) -> Tensor:
    """``||o - target_value e_c||^2``, summed over classes; see :class:`~spherical_loss.SquaredErrorLoss`."""
    losses._check_target_value(target_value)
    return _family_loss(lambda s, q, o_c, D: losses._squared_error(target_value, q, o_c), o, target, options)


def softmax_bound_loss(o: Tensor, target: Tensor, xi: float | None = None, **options: Unpack[Options]) -> Tensor:
    """An upper bound of log-softmax; see :class:`~spherical_loss.SoftmaxBoundLoss`."""
    losses._check_xi(xi)
    return _family_loss(partial(losses._softmax_bound, xi), o, target, options)


def z_loss(o: Tensor, target: Tensor, a: float, b: float, **options: Unpack[Options]) -> Tensor:
    """``softplus(a (b - z_c)) / a``; see :class:`~spherical_loss.ZLoss`."""
    losses._check_z(a, b)
    return _family_loss(partial(losses._z_loss, a, b), o, target, options)


def softmax_loss(o: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
    """Log-softmax, the baseline; see :class:`~spherical_loss.SoftmaxLoss`."""
    return _softmax_loss(losses.SoftmaxLoss.log_numerator, o, target, options)


def abs_softmax_loss(o: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
    """Log-softmax of ``|o|``; see :class:`~spherical_loss.AbsSoftmaxLoss`."""
    return _softmax_loss(losses.AbsSoftmaxLoss.log_numerator, o, target, options)


def taylor_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """``(1 + o + o^2 / 2)`` over its sum along ``dim``."""
    return quadratic_probabilities(losses.TAYLOR, o, dim)


def log_taylor_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """Log of :func:`taylor_softmax`."""
    return quadratic_log_probabilities(losses.TAYLOR, o, dim)


def spherical_softmax(o: Tensor, eps: float = losses.DEFAULT_EPS, dim: int = -1) -> Tensor:
    """``(o^2 + eps)`` over its sum along ``dim``."""
    return quadratic_probabilities(losses._spherical(eps), o, dim)


def log_spherical_softmax(o: Tensor, eps: float = losses.DEFAULT_EPS, dim: int = -1) -> Tensor:
    """Log of :func:`spherical_softmax`."""
    return quadratic_log_probabilities(losses._spherical(eps), o, dim)


def quadratic_softmax(o: Tensor, a1: float, a2: float, a3: float, dim: int = -1) -> Tensor:
    """``(a1 + a2 o + a3 o^2)`` over its sum along ``dim``."""
    return quadratic_probabilities(losses._positive_quadratic(a1, a2, a3), o, dim)


def log_quadratic_softmax(o: Tensor, a1: float, a2: float, a3: float, dim: int = -1) -> Tensor:
    """Log of :func:`quadratic_softmax`."""
    return quadratic_log_probabilities(losses._positive_quadratic(a1, a2, a3), o, dim)


def abs_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """``exp(|o|)`` over its sum along ``dim``."""
    return log_abs_softmax(o, dim).exp()


def log_abs_softmax(o: Tensor, dim: int = -1) -> Tensor:
    """Log of :func:`abs_softmax`."""
    return F.log_softmax(losses.AbsSoftmaxLoss.log_numerator(o), dim)


def _quadratic_loss(g: Quadratic, o: Tensor, target: Tensor, options: Options) -> Tensor:
    _check(o, options)
    return quadratic_loss(g, o, target, **options)


def _family_loss(formula: _logits.Formula, o: Tensor, target: Tensor, options: Options) -> Tensor:
    _check(o, options)
    return _logits.family_loss(formula, o, target, **options)


def _softmax_loss(log_numerator: Callable[[Tensor], Tensor], o: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    _check(o, options)
    return _logits.softmax_loss(log_numerator, o, target, **options)


def _check(o: object, options: Options | LossOptions) -> None:
    if not isinstance(o, Tensor):
        raise TypeError(f"logits are {type(o).__name__}, but must be a tensor; Statistics of a head go to the loss as a module")
    _logits.check_options(**options)
