"""The state of a factored head: saved, loaded, copied, converted, replaced; and read as precisely as it is kept."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

import spherical_loss as sl
from spherical_loss.heads import FactoredHead, FactoredSGD, FaissIndex
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint
from spherical_loss.heads.factored import transform

from ..reference import random_batch
from .test_steps import trained


@pytest.mark.parametrize("through", ["state_dict", "state_dict of 0.1.0", "safetensors", "deepcopy"])
def test_a_saved_head_resumes_bit_for_bit(monkeypatch, tmp_path, through):
    monkeypatch.setattr(transform, "MAX_CONDITION", 3.0)
    torch.manual_seed(0)
    head = FactoredHead(6, 40)
    trained(head, FactoredSGD(head, lr=3.0), 50)
    assert len(head.U.past) > 0
    if through == "deepcopy":
        other = copy.deepcopy(head)
    else:
        other = FactoredHead(6, 40)
        state = head.state_dict()
        if through == "state_dict of 0.1.0":
            del state["written"]
        if through == "safetensors":
            save_file(state, tmp_path / "head.safetensors")
            state = load_file(tmp_path / "head.safetensors")
        other.load_state_dict(state)
    for h in (head, other):
        trained(h, FactoredSGD(h, lr=3.0), 50, start=50)
    for name, value in head.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_conversions_keep_the_small_state_precise():
    head = trained(h := FactoredHead(6, 40), FactoredSGD(h, lr=1.0), 5)
    before = copy.deepcopy(head.state_dict())
    for same in (head.float(), head.to("cpu"), head.to(torch.bfloat16), head.half()):
        assert {name: value.dtype for name, value in same.state_dict().items()} == {n: v.dtype for n, v in before.items()}
        for name, value in same.state_dict().items():
            assert torch.equal(value, before[name]), name
    dense = head.weight
    head.double()
    assert head.V.dtype == torch.float64
    torch.testing.assert_close(head.weight.float(), dense)
    torch.testing.assert_close(head.Q.exact[:6, :6], head.weight.T @ head.weight)
    assert FactoredHead.from_linear(torch.nn.Linear(6, 40).half()).V.dtype == torch.float32


@pytest.mark.parametrize("after", ["forward", "backward"])
@pytest.mark.parametrize("how", ["refactor", "save_checkpoint", "close_frame", "two frames"])
def test_another_form_of_the_same_weights_before_the_step(tmp_path, how, after):
    """Between the forward pass and the step, frames may be closed and rows rewritten: the step is the same."""

    def between(head):
        if how == "save_checkpoint":
            save_checkpoint(head, tmp_path / "saved")
        elif how == "two frames":
            head.close_frame()
            head.close_frame()
        else:
            getattr(head, how)()

    heads = [FactoredHead(6, 40, init="zero").double() for _ in range(2)]
    for head in heads:
        trained(head, FactoredSGD(head, lr=3.0), 20, loss=sl.TaylorSoftmaxLoss())
    hidden, target, _ = random_batch(16, 6, 40, seed=99)
    for head in heads:
        optimizer = FactoredSGD(head, lr=3.0)
        value = sl.TaylorSoftmaxLoss()(head(hidden, target))
        if head is heads[1] and after == "forward":
            between(head)
        value.backward()
        if head is heads[1] and after == "backward":
            between(head)
        optimizer.step()
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("D", "dtype"), [(40, torch.float32), (40, torch.float64), (5, torch.float32)])
def test_a_copy_between_backward_and_step_takes_the_same_step(D, dtype):
    torch.manual_seed(0)
    head = FactoredHead(6, D).to(dtype)
    hidden, target, _ = random_batch(16, 6, D, seed=0)
    sl.TaylorSoftmaxLoss()(head(hidden, target)).backward()
    copied = copy.deepcopy(head)
    for h in (head, copied):
        FactoredSGD(h, lr=1.0).step()
    assert torch.equal(head.weight, copied.weight)


def test_gradients_in_another_dtype_are_refused():
    head = FactoredHead(6, 40)
    hidden, target, _ = random_batch(16, 6, 40, seed=0)
    sl.TaylorSoftmaxLoss()(head(hidden.float(), target)).backward()
    before = head.double().weight
    with pytest.raises(RuntimeError, match="found no gradient"):
        FactoredSGD(head, lr=1.0).step()
    assert torch.equal(head.weight, before)


def test_gradients_of_weights_that_were_replaced_are_refused():
    head, loss = FactoredHead(6, 40), sl.TaylorSoftmaxLoss()
    optimizer = FactoredSGD(head, lr=1.0)
    hidden, target, _ = random_batch(16, 6, 40, seed=0)
    first, second = (loss(head(hidden.float(), target)) for _ in range(2))
    first.backward()
    head.set_bias(torch.arange(40.0))
    with pytest.raises(RuntimeError, match="found no gradient"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed .* between this forward pass"):
        second.backward()
    torch.testing.assert_close(head.bias, torch.arange(40.0))


@pytest.mark.parametrize(("features", "bias"), [(7, True), (5, False)])
def test_a_head_of_another_layout_is_not_loaded(features, bias, tmp_path):
    """Its V has the same shape: columns are filled up to a multiple of 8."""
    saved, other = FactoredHead(4, 10), FactoredHead(features, 10, bias=bias)
    before = other.weight
    message = rf"in_features=4, bias=1, num_classes=10 was saved, but this one has in_features={features}, bias={bias:d}"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    save_checkpoint(saved, tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(other, tmp_path / "saved")
    assert torch.equal(other.weight, before)


def test_printing_computes_no_weights(monkeypatch):
    head = FactoredHead(4, 10)
    monkeypatch.setattr(FactoredHead, "rows", lambda *_: pytest.fail("rows were computed"))
    assert "in_features=4, num_classes=10, bias=True" in repr(head)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_optimizer_trains_its_own_head(copied):
    head = FactoredHead(6, 40)
    head, optimizer = copied((head, FactoredSGD(head, lr=1.0)))
    before = head.weight
    trained(head, optimizer, 1)
    assert optimizer.head is head
    assert not torch.equal(head.weight, before)


def test_the_optimizer_holds_no_tensor_of_the_head():
    head = FactoredHead(6, 40)
    optimizer = FactoredSGD(head, lr=1.0)
    old = weakref.ref(head.V)
    trained(head.double(), optimizer, 2)
    assert old() is None


def test_reading_under_autocast_is_precise():
    head = FactoredHead(6, 40)
    trained(head, FactoredSGD(head, lr=1.0), 5)
    hidden = random_batch(16, 6, 40, seed=0)[0].float()
    exact = head.weight, head.logits(hidden), head.sums(hidden)[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = head.weight, head.logits(hidden), head.sums(hidden)[1]
    for x, y in zip(found, exact, strict=True):
        assert torch.equal(x, y)


def test_weights_are_float32_at_least_whatever_the_default():
    try:
        torch.set_default_dtype(torch.bfloat16)
        head = FactoredHead(6, 40)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in (head.V, head.U.deviation, head.U.inverse_deviation, head.U.past)} == {torch.float32}
    trained(head, FactoredSGD(head, lr=1.0), 3)


@pytest.mark.parametrize("values", ["weight", "bias"])
def test_dense_values_are_read_a_chunk_at_a_time(monkeypatch, values):
    """No chunk of dense rows is kept while others are computed: together they would be a second D x d matrix."""
    monkeypatch.setattr("spherical_loss.heads.factored.head.CHUNK", 80)
    head, alive, most = FactoredHead(5, 100), weakref.WeakSet(), 0
    dense = FactoredHead.dense

    def counted(self, rows):
        nonlocal most
        alive.add(storage := dense(self, rows))
        most = max(most, len(alive))
        return storage

    monkeypatch.setattr(FactoredHead, "dense", counted)
    getattr(head, values)
    assert most <= 2


def test_no_index_of_a_part(monkeypatch):
    head = FactoredHead(6, 40)
    monkeypatch.setattr(head.shard, "group", object())
    with pytest.raises(ValueError, match="of the 40 rows: load"):
        FaissIndex(head, "Flat")
