"""The memory of a batch serves the next ones: never while something still needs it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads import FactoredHead, FactoredSGD, TieredHead, TieredSGD
from spherical_loss.heads.memory import Memory
from tests.support.cases import CASES

from ..reference import DenseReference, random_batch
from ..test_heads import assert_same_weights

d, D, lr = 6, 400, 0.3
LOSSES = CASES["taylor"].oracle
KINDS = [
    pytest.param(lambda: FactoredHead(d, D), FactoredSGD, id="factored"),
    pytest.param(lambda: TieredHead(d, D, cuts=(20,), kinds="factored"), partial(TieredSGD, power=0), id="tiered"),
]


def started(make, make_optimizer):
    """A head after steps of batches of several sizes, whose memory is there to be used again, and the same weights dense."""
    torch.manual_seed(0)
    head = make()
    optimizer, reference = make_optimizer(head, lr), DenseReference(head.weight, head.bias)
    for step, N in enumerate((12, 30, 5, 12)):
        hidden, target, _ = random_batch(N, d, D, seed=step)
        optimizer.zero_grad()
        sl.TaylorSoftmaxLoss()(head(hidden.float(), target)).backward()
        optimizer.step()
        reference.step(reference.gradients(LOSSES, hidden, target)[2], lr)
        assert_same_weights(head, reference, rtol=1e-4, atol=1e-5)
    assert len(head.memories) == 1
    return head, optimizer, reference


def batch(seed, N=12):
    hidden, target, _ = random_batch(N, d, D, seed=seed)
    return hidden.float().requires_grad_(), target


def assert_same_gradient(hidden, target, reference, times=1):
    expected = reference.gradients(LOSSES, hidden, target)[1]
    torch.testing.assert_close(hidden.grad.double(), times * expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("make", "make_optimizer"), KINDS)
def test_two_graphs_at_a_time(make, make_optimizer):
    head, optimizer, reference = started(make, make_optimizer)
    loss, batches = sl.TaylorSoftmaxLoss(), [batch(10), batch(11, N=20)]
    first, second = (loss(head(*each)) for each in batches)
    second.backward()
    first.backward()
    for each in batches:
        assert_same_gradient(*each, reference)
    optimizer.step()
    both = zip(*(reference.gradients(LOSSES, *each)[2] for each in batches), strict=True)
    reference.step([x + y for x, y in both], lr)
    assert_same_weights(head, reference, rtol=1e-4, atol=1e-5)
    assert len(head.memories) == 2


@pytest.mark.parametrize(("make", "make_optimizer"), KINDS)
def test_a_graph_whose_gradients_were_dropped_is_still_whole(make, make_optimizer):
    head, optimizer, reference = started(make, make_optimizer)
    loss, kept, other = sl.TaylorSoftmaxLoss(), batch(10), batch(11)
    value = loss(head(*kept))
    value.backward(retain_graph=True)
    optimizer.zero_grad()
    loss(head(*other)).backward()
    optimizer.zero_grad()
    value.backward()
    assert_same_gradient(*kept, reference, times=2)
    optimizer.step()
    reference.step(reference.gradients(LOSSES, *kept)[2], lr)
    assert_same_weights(head, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "make_optimizer"), KINDS)
def test_scores_between_forward_and_backward_pass(make, make_optimizer):
    head, _, reference = started(make, make_optimizer)
    loss, kept = sl.TaylorSoftmaxLoss(), batch(10)
    value = loss(head(*kept))
    with torch.no_grad():
        loss(head(*batch(11)))
    head.eval()(*batch(12))
    head.train()
    value.backward()
    assert_same_gradient(*kept, reference)


@pytest.mark.parametrize(("make", "make_optimizer"), KINDS)
def test_a_copy_has_memory_of_its_own(make, make_optimizer):
    head, _, reference = started(make, make_optimizer)
    twin = copy.deepcopy(head)
    loss, kept = sl.TaylorSoftmaxLoss(), batch(10)
    value = loss(head(*kept))
    loss(twin(*batch(11))).backward()
    value.backward()
    assert_same_gradient(*kept, reference)


def test_tensors_of_all_kinds():
    memory = Memory()
    for x in (torch.ones(3, 4), torch.ones(2, 2), torch.ones(5, 4), torch.ones(5, 4, dtype=torch.float64), torch.ones(0, 4)):
        memory.reuse()
        found, second = memory.like(x), memory.like(x, 2, 3)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        assert second.shape == (2, 3)
        found.copy_(x)
        second.fill_(7.0)
        assert torch.equal(found, x)
