"""The error against float64 is no larger than that of the naive formula in the same dtype."""

import math

import pytest
import torch

import spherical_loss as sl
from spherical_loss.statistics import sums
from tests.support.cases import CASES, Case
from tests.support.oracle import expected, quadratic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["taylor", "taylor-kernel", "spherical", "spherical-kernel", "quadratic", "squared-error", "bound-fixed", "z", "cosine"]


SMALL_EPS = Case(lambda **options: sl.SphericalSoftmaxLoss(1e-5, **options), quadratic(1e-5, 0, 1))


def outputs(D, dtype, scale, shift):
    o = scale * torch.randn(4, D, generator=torch.Generator().manual_seed(D)) + shift
    return o.to(dtype), torch.randint(D, (4,), generator=torch.Generator().manual_seed(D + 1))


def value_and_gradient(loss, o, target):
    o = o.detach().requires_grad_()
    value = loss(o, target)
    return value.double().detach(), torch.autograd.grad(value.sum(), o)[0].double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (10.0, 0.0), (0.1, 3.0)])
@pytest.mark.parametrize("name", [*NAMES, "small-eps"])
def test_no_worse_than_naive(name, scale, shift, dtype):
    case = SMALL_EPS if name == "small-eps" else CASES[name]
    for D in (10, 1000, 50_000):
        o, target = outputs(D, dtype, scale, shift)
        # only its last digit is the loss's own: the exact answer in the dtype of the answer is the most one can ask
        exact = value_and_gradient(lambda x, t: expected(case.oracle, x, t, reduction="none"), o.double(), target)
        naive = value_and_gradient(lambda x, t: expected(case.oracle, x, t, reduction="none"), o, target)
        ours = value_and_gradient(case.make(reduction="none"), o, target)
        rounding = (torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)
        for what, mine, theirs, right, eps in zip(("value", "gradient"), ours, naive, exact, rounding, strict=True):
            error, allowed = (mine - right).abs().max(), (theirs - right).abs().max().nan_to_num(torch.inf)
            last_digit = eps * right.abs().max()
            assert error <= max(allowed, last_digit), f"{what} at D={D}: {error:.3g} > {allowed:.3g} and {last_digit:.3g}"


@pytest.mark.parametrize("D", [10, 1000, 50_000])
@pytest.mark.parametrize("a", [(1, 1, 0.5), (0.3, 0, 1), (1.5, -1, 0.7), (1, -1.99, 1)], ids=str)
def test_sums_where_their_terms_cancel(a, D):
    """Outputs of size sqrt(a1 / a3), by the kernel: the terms of a1 D + a2 s + a3 q cancel there more than anywhere else."""

    class Kernel(sl.QuadraticSoftmaxLoss):
        forward = sl.SphericalLoss.forward

    o, target = outputs(D, torch.float32, 0.01, -math.copysign(math.sqrt(a[0] / a[2]), a[1]))
    exact = expected(quadratic(*a), o.double(), target, reduction="none")
    naive = expected(quadratic(*a), o, target, reduction="none").double()
    error = (Kernel(*a, reduction="none")(o, target).double() - exact).abs().max()
    last_digit = torch.finfo(torch.float32).eps * exact.abs().max()
    assert error <= max((naive - exact).abs().max(), last_digit)


@pytest.mark.parametrize("D", [600, 10_000, 200_000])
def test_equal_outputs(D):
    """Their squares, added one by one, are all rounded in the same direction: 3e-4 in a running sum of 200,000."""
    o = torch.linspace(0.01, 4, 50).unsqueeze(1).expand(-1, D).contiguous()
    exact = o.double().square().sum(1)
    s, q = sums(o.unsqueeze(2), torch.float32)
    naive = (o.square().sum(1).double() / exact - 1).abs().max()
    assert (q.squeeze(1) / exact - 1).abs().max() <= max(naive, 5e-7)
    torch.testing.assert_close(s.squeeze(1), o.double().sum(1), rtol=1e-6, atol=0)
