"""The losses that every test of the contract runs over, each with its independent oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import spherical_loss as sl
from spherical_loss import functional

from . import oracle


class CosineLoss(sl.SphericalLoss):
    """A member as a user would write it: one formula, and nothing else."""

    def formula(self, s, q, o_c, D):
        return 1 - o_c / q.sqrt()


class KernelTaylorSoftmaxLoss(sl.TaylorSoftmaxLoss):
    """The Taylor softmax by the kernel at any size: small inputs otherwise take torch's cross-entropy."""

    forward = sl.SphericalLoss.forward


class KernelSphericalSoftmaxLoss(sl.SphericalSoftmaxLoss):
    forward = sl.SphericalLoss.forward


class Case(NamedTuple):
    make: Callable[..., sl.Loss]
    oracle: oracle.Oracle
    function: Callable[..., Tensor] | None = None
    """The functional form, with the same options."""


CASES = {
    "taylor": Case(sl.TaylorSoftmaxLoss, oracle.quadratic(1, 1, 0.5), functional.taylor_softmax_loss),
    "taylor-kernel": Case(KernelTaylorSoftmaxLoss, oracle.quadratic(1, 1, 0.5)),
    "spherical": Case(
        lambda **options: sl.SphericalSoftmaxLoss(0.3, **options),
        oracle.quadratic(0.3, 0, 1),
        lambda o, target, **options: functional.spherical_softmax_loss(o, target, 0.3, **options),
    ),
    "spherical-kernel": Case(lambda **options: KernelSphericalSoftmaxLoss(0.3, **options), oracle.quadratic(0.3, 0, 1)),
    "quadratic": Case(
        lambda **options: sl.QuadraticSoftmaxLoss(1.5, -1.0, 0.7, **options),
        oracle.quadratic(1.5, -1.0, 0.7),
        lambda o, target, **options: functional.quadratic_softmax_loss(o, target, 1.5, -1.0, 0.7, **options),
    ),
    "squared-error": Case(
        lambda **options: sl.SquaredErrorLoss(1.7, **options),
        oracle.squared_error(1.7),
        lambda o, target, **options: functional.squared_error_loss(o, target, 1.7, **options),
    ),
    "bound-tightest": Case(sl.SoftmaxBoundLoss, oracle.softmax_bound(None), functional.softmax_bound_loss),
    "bound-fixed": Case(
        lambda **options: sl.SoftmaxBoundLoss(-1.3, **options),
        oracle.softmax_bound(1.3),
        lambda o, target, **options: functional.softmax_bound_loss(o, target, -1.3, **options),
    ),
    "z": Case(
        lambda **options: sl.ZLoss(0.8, 1.2, **options),
        oracle.z_loss(0.8, 1.2),
        lambda o, target, **options: functional.z_loss(o, target, 0.8, 1.2, **options),
    ),
    "softmax": Case(sl.SoftmaxLoss, oracle.softmax, functional.softmax_loss),
    "abs-softmax": Case(sl.AbsSoftmaxLoss, oracle.abs_softmax, functional.abs_softmax_loss),
    "cosine": Case(CosineLoss, oracle.cosine),
}
FAMILY = {name: case for name, case in CASES.items() if isinstance(case.make(), sl.SphericalLoss)}

every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_function = pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.function], ids=[name for name, case in CASES.items() if case.function]
)
every_member = pytest.mark.parametrize("case", FAMILY.values(), ids=FAMILY)


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs of the shape (D,) or (N, D, ...), and targets."""
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    D, rest = (shape[0], ()) if len(shape) == 1 else (shape[1], (shape[0], *shape[2:]))
    return o, torch.randint(D, rest, generator=generator)
