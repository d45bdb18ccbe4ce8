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


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize(("make", "optimizer_of"), KINDS[:3])
def test_averages_of_buffers_are_refused(make, optimizer_of, use_buffers):
    """The weights of the copy were those of the last step, or an average of V, U and w0 each for itself: 2.3 and 0.16 off."""
    head = make()
    optimizer = optimizer_of(head, lr=0.01)
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(2, 2), "head": head})
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=use_buffers).eval()
    hidden, target = batch_of(head)
    average.update_parameters(model)  # nothing has changed yet: a copy
    torch.testing.assert_close(average.module["head"].weight, head.weight)
    for step in range(3):
        optimizer.zero_grad()
        sl.TaylorSoftmaxLoss()(head(*batch_of(head, step))).backward()
        optimizer.step()
        average.update_parameters(model)
    for read in (
        lambda h: h.weight,
        lambda h: h.bias,
        lambda h: h(hidden, target),
        lambda h: h.train()(hidden, target),
        lambda h: h.logits(hidden),
        lambda h: h.topk(hidden, 3, sl.TaylorSoftmaxLoss()),
        lambda h: h.to_linear(),
    ):
        with pytest.raises(RuntimeError, match=r"overwritten from outside, as AveragedModel.*head\.average_into"):
            read(average.module["head"])
    assert head(hidden, target).q.isfinite().all()  # the head itself is as it was


@pytest.mark.parametrize(("make", "optimizer_of"), KINDS[:3])
def test_averages_through_a_state_dict_are_refused(make, optimizer_of):
    """In place, as many training scripts do, and loaded."""
    head = make()
    optimizer, average, before = optimizer_of(head, lr=0.5), copy.deepcopy(head).eval(), copy.deepcopy(head.state_dict())
    for step in range(30):
        optimizer.zero_grad()
        hidden, target = batch_of(head, step)
        sl.TaylorSoftmaxLoss()(head(hidden, target)).backward()
        optimizer.step()
    with torch.no_grad():
        for theirs, ours in zip(average.state_dict().values(), head.state_dict().values(), strict=True):
            theirs.copy_(0.5 * theirs + 0.5 * ours)
    with pytest.raises(RuntimeError, match=r"overwritten from outside.*head\.average_into"):
        average(hidden, target)
    if any(not span.head.is_small for span in head.spans):
        mean = {name: (x + before[name]) / 2 if x.is_floating_point() else x for name, x in head.state_dict().items()}
        with pytest.raises(ValueError, match=r"do not belong together.*head\.average_into"):
            head.load_state_dict(mean)
        with pytest.raises(RuntimeError, match="overwritten from outside"):
            head.eval()(hidden, target)


@pytest.mark.parametrize(("make", "optimizer_of"), KINDS)
def test_an_exact_average(make, optimizer_of):
    torch.manual_seed(0)
    head, decay = make().double(), 0.9
    optimizer, average = optimizer_of(head, lr=0.5), head.to_linear()
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    for step in range(5):
        optimizer.zero_grad()
        hidden, target = batch_of(head, step)
        sl.TaylorSoftmaxLoss()(head(hidden.double(), target)).backward()
        optimizer.step()
        head.average_into(average, 1 - decay)
        weight, bias = decay * weight + (1 - decay) * head.weight, decay * bias + (1 - decay) * head.bias
    torch.testing.assert_close(average.weight, weight)
    torch.testing.assert_close(average.bias, bias)
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        head.average_into(average, 1.5)
    with pytest.raises(ValueError, match=r"start from head\.to_linear"):
        head.average_into(torch.nn.Linear(3, D), 0.5)


@pytest.mark.parametrize(("make", "optimizer_of"), KINDS)
def test_made_on_the_meta_device(make, optimizer_of):
    saved = make()
    optimizer = optimizer_of(saved, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        sl.TaylorSoftmaxLoss()(saved(*batch_of(saved, step))).backward()
        optimizer.step()
    with torch.device("meta"):
        head = make()
    assert all(x.is_meta for x in (*head.buffers(), *head.parameters()))
    head.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"after to_empty\(\), call load_state_dict"):
        head.weight  # noqa: B018
    head.load_state_dict(saved.state_dict())
    for h in (saved, head):
        optimizer = optimizer_of(h, lr=0.1)
        optimizer.zero_grad()
        sl.TaylorSoftmaxLoss()(h(*batch_of(h, 9))).backward()
        optimizer.step()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name]), name


@pytest.mark.parametrize(("make", "optimizer_of"), KINDS)
def test_a_device_without_float64(monkeypatch, make, optimizer_of):
    """MPS has none, and refuses to be asked for it: here the CPU plays its part."""
    head = make()
    before = head.weight.detach().clone()
    for module in ("head", "statistics"):
        monkeypatch.setattr(f"spherical_loss.heads.factored.{module}.statistics_dtype", lambda device: torch.float32)

    def without_float64(x):
        if x.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return x.clone()

    head._apply(without_float64)
    assert all(x.dtype == torch.float32 for x in head.buffers() if x.is_floating_point())
    optimizer = optimizer_of(head, lr=0.1)
    sl.TaylorSoftmaxLoss()(head(*batch_of(head))).backward()
    optimizer.step()
    monkeypatch.undo()
    head.cpu()  # and back
    sl.TaylorSoftmaxLoss()(head(*batch_of(head))).backward()
    optimizer.step()
    assert not torch.equal(head.weight, before)
    assert all(span.w.dtype == span.Q.base.dtype == torch.float64 for span in head.modules() if isinstance(span, FactoredHead))
