"""The suggested learning rate: its formulas against their own definition, and what it says of whole trainings."""

from __future__ import annotations

import pytest
import torch

import spherical_loss as sl
from spherical_loss.learning_rate import NOISE, STABLE_SHARE, stable_lr, suggested_lr


def zipf(D: int) -> torch.Tensor:
    return 1 / torch.arange(1, D + 1, dtype=torch.float64)


def start(loss: sl.SphericalLoss, D: int, d: int = 15, frequencies: torch.Tensor | None = None) -> sl.FactoredHead:
    head = sl.FactoredHead(d, D, init="zero").double()
    head.set_bias(loss.prior_bias(torch.ones(D) if frequencies is None else frequencies))
    return head


@pytest.mark.parametrize("loss", [sl.TaylorSoftmaxLoss(), sl.SphericalSoftmaxLoss(0.02), sl.SquaredErrorLoss()])
def test_stability_is_the_trace_of_the_first_step(loss):
    """The same share of what a backward pass with hidden vectors of this norm finds."""
    D, d, N = 200, 15, 4000
    head = start(loss, D, d, zipf(D))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, d, generator=generator, dtype=torch.float64)
    loss(head(hidden, torch.multinomial(zipf(D), N, replacement=True, generator=generator))).backward()
    square = float(hidden.square().sum(1).mean())
    assert suggested_lr(head, loss, N, square, noise=None) == pytest.approx(STABLE_SHARE * stable_lr(head), rel=0.01)


def test_formulas_of_the_taylor_softmax():
    D, d, N = 1000, 15, 10
    loss, p = sl.TaylorSoftmaxLoss(), zipf(1000) / zipf(1000).sum()
    even = start(loss, D, d)
    assert suggested_lr(even, loss, N, noise=None) == pytest.approx(STABLE_SHARE * D / (d + 1))
    head = start(loss, D, d, p)
    Z = 1 / float(p.min())
    assert suggested_lr(head, loss, N, noise=None) == pytest.approx(STABLE_SHARE * Z / (d + 1), rel=1e-6)
    t = 1 + head.bias
    g_c_squared = float((p * (2 * t / (t**2 + 1)) ** 2).sum())
    assert suggested_lr(head, loss, N, noise=0.1) == pytest.approx(4 * 0.1 * N / ((d + 1) * g_c_squared), rel=1e-6)
    assert g_c_squared == pytest.approx(2 * D * float(p.min()), rel=0.3)
    assert suggested_lr(head, loss, N) == pytest.approx(NOISE / 0.1 * suggested_lr(head, loss, N, noise=0.1))


@pytest.mark.parametrize("noise", [None, 0.4])
def test_the_spherical_softmax_has_eps_times_the_rate_of_the_taylor_softmax(noise):
    """With o' = o / sqrt(eps) it is the same loss, up to a shift of the bias."""
    rates = []
    for loss in (sl.TaylorSoftmaxLoss(), sl.SphericalSoftmaxLoss(0.02)):
        rates.append(suggested_lr(start(loss, 500, frequencies=zipf(500)), loss, 20, noise=noise))
    assert rates[1] == pytest.approx(0.02 * rates[0], rel=1e-6)


def tiers(D: int, d: int = 15) -> sl.TieredHead:
    generator = torch.Generator().manual_seed(0)
    counts = zipf(D)[torch.randperm(D, generator=generator)]
    return sl.TieredHead.by_frequency(d, counts, loss=sl.TaylorSoftmaxLoss()).double()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_tiers_have_the_limits_of_their_own_rates(power):
    D, d, N = 1000, 15, 10
    head, loss = tiers(D, d), sl.TaylorSoftmaxLoss()
    optimizer = sl.TieredSGD(head, 1.0, power=power)
    rank = head.bias.argsort(descending=True)
    factor = torch.empty(D, dtype=torch.float64)
    for group, start, stop in zip(optimizer.param_groups, head.bounds[:-1], head.bounds[1:], strict=True):
        factor[rank[start:stop]] = group["lr"]
    t = 1 + head.bias
    g = (t**2 + 1) / 2
    stable = STABLE_SHARE * float(g.sum()) / ((d + 1) * float(factor.max()))
    assert suggested_lr(head, loss, N, noise=None, power=power) == pytest.approx(stable, rel=1e-6)
    noise = 4 * 1e-3 * N / ((d + 1) * float((g / g.sum() * factor * (t / g) ** 2).sum()))
    assert suggested_lr(head, loss, N, noise=1e-3, power=power) == pytest.approx(min(stable, noise), rel=1e-6)


@pytest.mark.parametrize("D", [300, 1000, 5000])
def test_tiers_learn_at_the_suggested_rate(D):
    """The same examples in every step, whose hidden vectors are much alike, as after a ReLU: each step lowers the loss."""
    head, loss, d, N = tiers(D), sl.TaylorSoftmaxLoss(), 15, 500
    optimizer = sl.TieredSGD(head, suggested_lr(head, loss, N, noise=None))
    generator = torch.Generator().manual_seed(1)
    hidden = 1 + 0.1 * torch.randn(N, d, generator=generator, dtype=torch.float64)
    target = torch.multinomial(loss.probabilities(head.bias), N, replacement=True, generator=generator)
    values = []
    for _ in range(10):
        value = loss(head(hidden, target))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("Kind", [sl.DenseHead, sl.GramHead, sl.FactoredHead, sl.TieredHead])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_of_any_kind_and_dtype(Kind, dtype):
    head = Kind(15, 40, init="zero").to(dtype)
    single = sl.FactoredHead(15, 40, init="zero")
    assert suggested_lr(head, sl.TaylorSoftmaxLoss(), 10, power=0.0) == suggested_lr(single, sl.TaylorSoftmaxLoss(), 10)


def test_noise_costs_what_it_is_said_to_cost():
    """Targets that the inputs say nothing about: the equilibrium of many steps, against the entropy of the targets."""
    torch.manual_seed(0)
    D, d, N, nats = 40, 8, 50, 0.01
    loss, p = sl.TaylorSoftmaxLoss(), torch.full((D,), 1 / D, dtype=torch.float64)
    head = start(loss, D, d)
    lr = suggested_lr(head, loss, N, hidden_square=float(d), noise=nats)
    optimizer, values = sl.FactoredSGD(head, lr), []
    for step in range(3000):
        hidden, target = torch.randn(N, d, dtype=torch.float64), torch.multinomial(p, N, replacement=True)
        value = loss(head(hidden, target))
        value.backward()
        optimizer.step()
        values.append(float(value.detach()) if step >= 1000 else torch.nan)
    excess = float(torch.tensor(values).nanmean()) - float(-(p * p.log()).sum())
    assert excess == pytest.approx(nats, rel=0.2)


def test_bad_input():
    head, loss = sl.FactoredHead(3, 10, init="zero"), sl.TaylorSoftmaxLoss()
    with pytest.raises(ValueError, match="batch_size is 0"):
        suggested_lr(head, loss, 0)
    with pytest.raises(ValueError, match=r"noise -1\.0"):
        suggested_lr(head, loss, 5, noise=-1.0)
    with pytest.raises(ValueError, match=r"does not depend on q.*search over several decades"):
        suggested_lr(head, sl.ZLoss(1, 1), 5)
    with pytest.raises(TypeError, match=r"AdaptiveSphericalSoftmax.*layer\.tail"):
        suggested_lr(sl.AdaptiveSphericalSoftmax(3, 10, 5), loss, 5)
    with pytest.raises(TypeError, match=r"SoftmaxLoss.*spherical family"):
        suggested_lr(head, sl.SoftmaxLoss(), 5)
