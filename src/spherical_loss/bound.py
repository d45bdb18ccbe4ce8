"""The numbers in the bound of log-softmax (:class:`spherical_loss.SoftmaxBoundLoss`): lambda, and the tightest xi."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bound_lambda(xi: Tensor) -> Tensor:
    """``tanh(xi / 2) / (4 xi)`` for ``xi >= 0``, and its limit 1/8 (1 - xi^2 / 12) near zero."""
    small = xi < 1e-3  # the next term, xi^4 / 960, is below float64 rounding there
    safe = torch.where(small, 1.0, xi)
    return torch.where(small, (1 - xi * xi / 12) / 8, torch.tanh(safe / 2) / (4 * safe))


def tightest_xi(spread: Tensor, D: int) -> Tensor:
    r"""The ``xi`` that minimizes the bound, for each ``spread`` :math:`= q - s^2 / D`.

    Where the derivative vanishes, :math:`h(\xi) = \xi^2 - (k(\xi) (D-2) / D)^2 = \mathrm{spread} / D` with
    :math:`k(\xi) = \xi \coth(\xi / 2) = 1 / (4 \lambda)`. Newton's method starts from a lower bound of the
    root: the root for spread 0, which is ``log(D - 1)``, or the one for ``k = xi``.
    A last step is left in the graph, so that second derivatives see how xi moves; the first derivatives do not depend on it,
    since the bound is flat there.
    """
    if D == 1:  # the bound decreases towards the exact loss, 0, as xi grows
        return torch.full_like(spread, 50.0)
    c, r = (D - 2) / D, spread / D

    def h_and_slope(xi: Tensor) -> tuple[Tensor, Tensor]:
        coth = 1 / torch.tanh(xi / 2)
        k = xi * coth
        return xi**2 - (c * k) ** 2, 2 * xi - 2 * c * c * k * (coth - xi / 2 * (coth**2 - 1))

    with torch.no_grad():
        xi = torch.sqrt(r.detach() / (1 - c * c)).clamp_min(max(math.log(D - 1), 1e-6))
        for _ in range(12):
            h, slope = h_and_slope(xi)
            xi = xi - (h - r.detach()) / slope
        h, slope = h_and_slope(xi)
    return xi - (h - r) / slope
