"""Factored heads in the training loops people write: without their optimizer, with a GradScaler, averaged, on a meta device."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads import FactoredHead, FactoredSGD, TieredHead, TieredSGD
from spherical_loss.heads.factored import keeper
from tests.support.cases import CASES

from ..reference import DenseReference, random_batch
from ..test_heads import assert_same_weights

d, D, N = 6, 40, 16


def tiered(kinds="factored"):
    return TieredHead(d, D, cuts=(10, 20), kinds=kinds)


KINDS = [
    pytest.param(lambda: FactoredHead(d, D), FactoredSGD, id="factored"),
    pytest.param(lambda: FactoredHead(64, D), FactoredSGD, id="small"),
    pytest.param(tiered, TieredSGD, id="tiered"),
    pytest.param(lambda: tiered(["dense", "factored", "gram"]), TieredSGD, id="mixed"),
]


def batch_of(head, seed=0):
    hidden, target, _ = random_batch(N, head.in_features, D, seed=seed)
    return hidden.float(), target


@pytest.mark.parametrize(("make", "_"), KINDS[:3])
def test_without_its_optimizer_it_says_so_once_and_memory_is_bounded(make, _):
    """Every batch was kept for ever: 311 to 880 MB in 2,000 steps."""
    head, loss = make(), sl.TaylorSoftmaxLoss()
    trunk = torch.nn.Linear(head.in_features, head.in_features)
    optimizer = torch.optim.SGD(trunk.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3 * keeper.WITHOUT_OPTIMIZER):
            hidden, target = batch_of(head, step)
            optimizer.zero_grad()
            loss(head(trunk(hidden), target)).backward()
            optimizer.step()
    assert len(head.gradients) == keeper.WITHOUT_OPTIMIZER
    assert len(said) == 1
    assert "has no optimizer" in str(said[0].message)
    assert f"{type(head).__name__.replace('Head', 'SGD')}(head, lr)" in str(said[0].message)


def test_an_optimizer_that_takes_no_step(monkeypatch):
    monkeypatch.setattr(keeper, "WITHOUT_STEP", 50)
    head, loss = FactoredHead(d, D), sl.TaylorSoftmaxLoss()
    optimizer = FactoredSGD(head, lr=1.0)
    hidden, target = batch_of(head)
    for _ in range(49):
        loss(head(hidden, target)).backward()
    with pytest.warns(UserWarning, match="takes no step"):
        loss(head(hidden, target)).backward()
    loss(head(hidden, target)).backward()
    assert len(head.gradients) == 51  # gradients of many small batches may be meant
    optimizer.step()
    assert head.gradients == []


@pytest.mark.parametrize(("make", "optimizer_of"), KINDS)
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(make, optimizer_of, unscale):
    """As with torch's optimizers: the step is that of the loss without the scale, whatever the scale was."""
    torch.manual_seed(0)
    head = make().double()
    reference = DenseReference(head.weight, head.bias)
    trunk = torch.nn.Linear(1, 1)
    optimizer, of_trunk = optimizer_of(head, lr=0.5, max_grad_norm=0.1), torch.optim.SGD(trunk.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # the same for all tiers
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        of_trunk.zero_grad()
        total = None
        for part in range(2):  # accumulated gradients
            hidden, target = batch_of(head, 10 * step + part)
            value = sl.TaylorSoftmaxLoss()(head(hidden.double(), target)) + trunk(torch.ones(1)).sum()
            scaler.scale(value).backward()
            _, _, grads = reference.gradients(CASES["taylor"].oracle, hidden, target)
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        if unscale:
            scaler.unscale_(optimizer)
            torch.testing.assert_close(optimizer.grad_norm(), torch.cat([g.flatten() for g in total]).norm())
        scaler.step(of_trunk)
        scaler.step(optimizer)
        scaler.update()
        reference.step(total, 0.5, max_grad_norm=0.1)
    assert scaler.get_scale() == 4096
    assert_same_weights(head, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("make", "optimizer_of"), KINDS)
@pytest.mark.parametrize("alone", [True, False])
def test_grad_scaler_skips_what_is_not_finite(make, optimizer_of, alone):
    head = make()
    optimizer, before, weight = optimizer_of(head, lr=0.5), copy.deepcopy(head.state_dict()), head.weight.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hidden, target = batch_of(head)
    hidden = hidden.clone().requires_grad_()
    for factor in [math.inf] if alone else [1.0, math.inf, 1.0]:  # the gradients of three batches, of which one overflows
        scaler.scale(factor * sl.TaylorSoftmaxLoss()(head(hidden, target))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    optimizer.zero_grad()
    scaler.scale(sl.TaylorSoftmaxLoss()(head(hidden, target))).backward()
    scaler.step(optimizer)
    assert not torch.equal(head.weight, weight)
