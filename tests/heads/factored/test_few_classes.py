"""Heads of few classes, which take the dense step in float64; how exact that is: ``tests/fuzz/grid.py``."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads import FactoredHead, FactoredSGD
from spherical_loss.heads.factored import head as factored_head
from spherical_loss.heads.factored import nearby

from ...support.cases import CASES
from ..reference import DenseReference, random_batch


@pytest.fixture(autouse=True)
def dense_step(monkeypatch):
    monkeypatch.setattr(factored_head, "FEW_CLASSES", 256)


def train(head, steps, lr=1.0, **options):
    optimizer = FactoredSGD(head, lr, **options)
    for step in steps:
        hidden, target, _ = random_batch(32, 6, 40, seed=step)
        optimizer.zero_grad()
        sl.TaylorSoftmaxLoss()(head(hidden.float(), target)).backward()
        optimizer.step()


def test_float32_to_others_and_float64_to_itself():
    torch.manual_seed(0)
    head = FactoredHead(6, 40)
    reference = DenseReference(head.weight, head.bias)
    train(head, range(300), weight_decay=1e-3, max_grad_norm=0.5)
    for step in range(300):
        hidden, target, _ = random_batch(32, 6, 40, seed=step)
        _, _, grads = reference.gradients(CASES["taylor"].oracle, hidden.float(), target)
        reference.step(grads, 1.0, 1e-3, 0.5)
    torch.testing.assert_close(head.V[:, :6], reference.W, rtol=1e-12, atol=1e-13)  # float32 would have 1e-6
    x = torch.randn(3, 6)
    found = head.weight, head.bias, head.logits(x), head.to_linear()(x), head.dense_rows(slice(0, 2))
    assert {y.dtype for y in found} == {torch.float32}
    head.half()  # the dtype of a trunk
    assert (head.dtype, head.V.dtype) == (torch.float32, torch.float64)
    assert head.double().weight.dtype == torch.float64
    assert head.float().weight.dtype == torch.float32
    torch.testing.assert_close(head.V[:, :6], reference.W, rtol=1e-12, atol=1e-13)


def test_it_loads_the_state_of_the_factored_form(monkeypatch):
    """As an earlier version saved it, and before frames were closed."""
    monkeypatch.setattr(factored_head, "FEW_CLASSES", 0)
    torch.manual_seed(0)
    factored = FactoredHead(6, 40)
    train(factored, range(20))
    factored.close_frame()
    train(factored, range(20, 30))
    assert not factored.U.is_identity
    monkeypatch.setattr(factored_head, "FEW_CLASSES", 256)
    head = FactoredHead(6, 40, init="zero")
    head.load_state_dict(factored.state_dict())
    assert head.is_small
    torch.testing.assert_close(head.weight, factored.weight, rtol=1e-6, atol=1e-6)
    hidden, target, _ = random_batch(32, 6, 40, seed=99)
    o = hidden @ factored.weight.double().T + factored.bias.double()
    wanted = o.sum(1), o.square().sum(1), o.gather(1, target.unsqueeze(1)).squeeze(1)
    for mine, right in zip(head(hidden, target)[:3], wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_watching_changes_nothing(monkeypatch):
    """Neither values nor gradients nor steps, nor what is saved."""
    results = []
    for most in (64, 0):
        monkeypatch.setattr(factored_head, "MOST_CLASSES", most)
        torch.manual_seed(0)
        head = FactoredHead(6, 40)
        train(head, range(150))
        H, target, _ = random_batch(32, 6, 40, seed=200)
        H = H.float().requires_grad_()
        value = sl.TaylorSoftmaxLoss()(head(H, target))
        assert (head.nearby is not None) == (most > 0)
        value.backward()
        results.append([value.detach(), H.grad, head.V, *head.state_dict().values(), torch.rand(3)])
    for watched, alone in zip(*results, strict=True):
        assert torch.equal(watched, alone)


def test_long_training_at_an_ordinary_rate_is_no_chaos():
    torch.manual_seed(0)
    head = FactoredHead(6, 5)
    optimizer, m = FactoredSGD(head, lr=1.0), torch.randn(5, 6)
    for _ in range(1_000):
        target = torch.randint(5, (32,))
        optimizer.zero_grad()
        sl.TaylorSoftmaxLoss()(head((0.5 * m[target] + torch.randn(32, 6)).relu(), target)).backward()
        optimizer.step()


def chaotic(head, loss):
    """The rate of a run of ``tests/fuzz/grid.py``."""
    optimizer, m = FactoredSGD(head, lr=1_000.0), torch.randn(3, 16)
    for _ in range(60):
        target = torch.randint(3, (64,))
        optimizer.zero_grad()
        loss(head((0.5 * m[target] + torch.randn(64, 16)).relu(), target)).backward()
        before = head.V.clone()
        try:
            optimizer.step()
        except FloatingPointError as error:
            assert torch.equal(head.V, before)
            return str(error)
    return None


def test_chaos_is_an_error_that_names_the_rate():
    torch.manual_seed(0)
    head = FactoredHead(16, 3)
    said = chaotic(head, sl.SphericalSoftmaxLoss(0.3))
    assert "training 3 classes at lr=1000 is chaotic" in said
    assert "lower the learning rate" in said
    head.set_weight(torch.randn(3, 16))  # and then as before
    train_on = FactoredSGD(head, lr=0.1)
    for _ in range(5):
        train_on.zero_grad()
        sl.TaylorSoftmaxLoss()(head(torch.randn(8, 16), torch.randint(3, (8,)))).backward()
        train_on.step()


def test_a_loss_of_the_users_own_is_not_watched():
    torch.manual_seed(0)
    head, formula = FactoredHead(16, 3), sl.SphericalSoftmaxLoss(0.3).formula
    assert chaotic(head, lambda statistics: formula(*statistics[:4]).mean()) is None
    assert head.nearby is None


def test_copied_and_saved_with_what_it_watches():
    torch.manual_seed(0)
    head = FactoredHead(6, 40)
    train(head, range(nearby.STEPS + 5))
    assert head.nearby.steps == 5  # it began again
    other, file = copy.deepcopy(head), io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    third = torch.load(file, weights_only=False)
    for one in (head, other, third):
        train(one, range(200, 210))
    assert torch.equal(other.V, head.V)
    assert torch.equal(third.V, head.V)


@pytest.mark.parametrize("D", [40, 400])
@pytest.mark.parametrize("lr", [1e20, 1e200])
def test_rates_beyond_the_dtype(D, lr):
    head = FactoredHead(6, D)
    before = head.weight
    sl.TaylorSoftmaxLoss()(head(torch.rand(4, 6), torch.arange(4))).backward()
    with pytest.raises(FloatingPointError, match=f"lr={lr:g} would make".replace("+", r"\+")):
        FactoredSGD(head, lr).step()
    assert torch.equal(head.weight, before)


@pytest.mark.parametrize("Head", [sl.DenseHead, sl.GramHead, FactoredHead, sl.TieredHead])
def test_no_target_at_all_for_a_head(Head):
    nothing = torch.zeros(3, 0)
    with pytest.raises(ValueError, match=r"shape \(3, 0\): an example needs one target"):
        Head(6, 40)(torch.rand(3, 6), nothing.long(), nothing)
