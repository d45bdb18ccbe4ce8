"""The upper bound of log-softmax: it holds for every xi, and the tightest xi is the tightest."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spherical_loss as sl
from spherical_loss.bound import bound_lambda, tightest_xi
from tests.support.cases import data
from tests.support.oracle import best_xi, bouchard, softmax


def outputs(D, spread, N=5):
    """N outputs of D classes whose q - s^2 / D is ``spread``."""
    o = data(N, D)[0]
    o = o - o.mean(1, keepdim=True)
    if D > 1:
        o = o * (spread / o.square().sum(1, keepdim=True)).sqrt()
    return o + 0.7


@pytest.mark.parametrize("xi", [0.0, 1e-8, 1e-4, 1e-2, 1.0, -1.0, 5.0, 30.0, 1000.0])
@pytest.mark.parametrize("D", [1, 2, 3, 10, 1000])
def test_bound_holds_for_every_xi(D, xi):
    for spread in (1e-6, 1.0, 1e4):
        o = outputs(D, spread)
        target = torch.arange(5) % D
        bound = sl.SoftmaxBoundLoss(xi, reduction="none")(o, target)
        exact = softmax(o).gather(1, target.unsqueeze(1)).squeeze(1)
        assert (bound >= exact - 1e-9 * (1 + bound.abs())).all()


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.floats(-100, 100))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_bound_holds_for_any_outputs(values, xi):
    o = torch.tensor([values], dtype=torch.float64)
    exact = softmax(o)[:, 0]
    target = torch.tensor([0])
    fixed, tightest = (sl.SoftmaxBoundLoss(x, reduction="none")(o, target) for x in (xi, None))
    slack = 1e-9 * (1 + fixed.abs())
    assert fixed >= exact - slack
    assert exact - slack <= tightest <= fixed + slack


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-4, 1.0, 100.0, 1e6, 1e12])
@pytest.mark.parametrize("D", [2, 3, 10, 1000, 10**5])
def test_tightest_is_the_least_of_a_fine_grid(D, spread):
    """A grid of 4,000 values of xi, from 1e-6 to far beyond the spread, and no better value next to the one found."""
    o = outputs(D, spread, N=1)
    found = float(sl.SoftmaxBoundLoss()(o, torch.tensor([0])))
    xi = float(best_xi(o)[0])
    grid = torch.cat(
        [torch.logspace(-6, 8, 2000, dtype=torch.float64), xi * torch.linspace(0.9, 1.1, 101, dtype=torch.float64)]
    )
    s, q = float(o.sum()), float((o - o.mean()).square().sum())
    lam = torch.tanh(grid / 2) / (4 * grid)
    least = D * (torch.log1p(torch.exp(-grid)) + grid / 2 - lam * grid**2) - (D - 2) ** 2 / (16 * D * lam) + q * lam
    noise = 1e-15 * D * float(grid[least.argmin()]) + 1e-11
    wanted = float(least.min()) + s / D - float(o[0, 0])
    assert found <= wanted + noise + 1e-12 * abs(wanted)
    assert found >= wanted - 1e-3 * (1 + abs(wanted))  # the grid is not as fine as Newton, but close


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-4, 1.0, 100.0, 1e6, 1e12])
@pytest.mark.parametrize("D", [2, 3, 4, 10, 1000, 10**5, 10**6])
def test_newton_has_converged(D, spread):
    """Against the bisection of the oracle's derivative; and one more step would change nothing."""
    xi = tightest_xi(torch.tensor([spread], dtype=torch.float64), D)
    assert xi.isfinite().all()
    if D > 10**5:
        return
    o = outputs(D, spread, N=1)
    wanted = best_xi(o)
    atol = 1e-5 if spread < 1e-6 else 0.0  # the bound is flat in xi where xi is near zero
    torch.testing.assert_close(xi, wanted, rtol=1e-6, atol=atol)
    exact = bouchard(o, wanted) - o[:, 0]
    torch.testing.assert_close(sl.SoftmaxBoundLoss()(o, torch.tensor([0])), exact.sum(), rtol=1e-9, atol=1e-9)


def test_one_class_costs_nothing():
    o = data(4, 1)[0].requires_grad_()
    loss = sl.SoftmaxBoundLoss()(o, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, o)[0], torch.zeros_like(o), atol=1e-12, rtol=0)


def test_equal_outputs_have_the_gradient_of_log_softmax():
    o = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    loss = sl.SoftmaxBoundLoss()(o, torch.tensor([0]))
    torch.testing.assert_close(loss, 2 * torch.tensor(2.0, dtype=torch.float64).log())
    torch.testing.assert_close(torch.autograd.grad(loss, o)[0], torch.tensor([[-0.5, 0.5]], dtype=torch.float64))


def test_lambda():
    xi = torch.tensor([0.0, 1e-9, 9.99e-4, 1.01e-3, 1.0, 800.0], dtype=torch.float64)
    series = 1 / 8 - xi**2 / 96 + xi**4 / 960
    direct = (torch.sigmoid(xi) - 0.5) / (2 * xi)
    torch.testing.assert_close(bound_lambda(xi), torch.where(xi < 0.01, series, direct), rtol=1e-13, atol=0)
    x = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bound_lambda, x[1:].detach().requires_grad_())
    assert torch.autograd.grad(bound_lambda(x).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("D", [3, 20, 1000])
def test_a_large_xi_is_no_less_exact(D):
    """Above 20 torch's softplus leaves out e^-xi, which the bound has D times."""
    spread = 21.0**2 * D * (1 - ((D - 2) / D) ** 2)
    o, target = outputs(D, spread), torch.tensor([0, 1, 2, 0, 1])
    xi = best_xi(o)
    assert ((xi > 20) & (xi < 23)).all()
    found = sl.SoftmaxBoundLoss(reduction="none")(o, target)
    expected = bouchard(o, xi) - o.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
