"""Factored tails of an AdaptiveSphericalSoftmax that are computed in one call, against a dense float64 computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import spherical_loss as sl
from spherical_loss import AdaptiveSphericalSoftmax
from spherical_loss.heads.factored.disjoint import can_share

from .adaptive_reference import (
    LIKELIHOODS,
    Reference,
    assert_same_weights,
    check_training,
    every_likelihood,
    optimizers_of,
    randomized,
    shuffled_frequencies,
)
from .reference import random_batch


def sharing_tails(loss, frequencies: Tensor | None = None) -> AdaptiveSphericalSoftmax:
    """A layer of 60 classes with three tails that are computed in one call: as factored heads of many classes are."""
    layer = AdaptiveSphericalSoftmax(6, 60, (3, 9), loss, frequencies, tail_cutoffs=(20, 35)).double()
    assert can_share(layer.tails)
    return randomized(layer)


@every_likelihood
@pytest.mark.parametrize("ordered", [True, False])
def test_tails_that_share_a_call(case, ordered):
    frequencies = None if ordered else shuffled_frequencies(60)
    layer = sharing_tails(case.make(), frequencies)
    batches = [random_batch(14, 6, 60, seed=step, ignored=step % 3)[:2] for step in range(6)]
    by_rank = layer.order.tolist()
    for ranks in ([50, 40, 59], [0, 30, 2], [8, 1], [22, 22, 22, 12]):  # tails without examples, and one class several times
        target = torch.tensor([by_rank[rank] for rank in ranks])
        batches.append((torch.randn(len(target), 6, dtype=torch.float64), target))
    check_training(layer, Reference(layer, case.oracle, frequencies), batches)


def test_tails_that_share_a_call_wait_for_their_steps():
    """Each tail takes its step after another number of batches; until then their gradients add up."""
    layer = sharing_tails(sl.TaylorSoftmaxLoss())
    reference = Reference(layer, LIKELIHOODS["taylor"].oracle, None)
    softmaxes, *tails = optimizers_of(layer, 0.05, 0.1)
    waiting = [torch.zeros_like(p) for p in reference.parameters]
    for step in range(1, 7):
        hidden, target, _ = random_batch(14, 6, 60, seed=step)
        _, _, grads = reference.gradients(hidden, target)
        layer(hidden, target).loss.backward()
        softmaxes.step()
        softmaxes.zero_grad()
        due = [True] * 4 + [step % (1 + i // 2) == 0 for i in range(6)]
        for i, optimizer in enumerate(tails):
            if due[4 + 2 * i]:
                optimizer.step()
                optimizer.zero_grad()
        waiting = [w + g for w, g in zip(waiting, grads, strict=True)]
        reference.step([w if now else torch.zeros_like(w) for w, now in zip(waiting, due, strict=True)], 0.05, 0.1)
        waiting = [torch.zeros_like(w) if now else w for w, now in zip(waiting, due, strict=True)]
    assert_same_weights(layer, reference, rtol=1e-7, atol=1e-9)


def test_a_shared_call_after_a_step_needs_another_forward_pass():
    layer = sharing_tails(sl.TaylorSoftmaxLoss())
    _, first, *_ = optimizers_of(layer, 0.05, 0.1)
    hidden, target, _ = random_batch(14, 6, 60, seed=0)
    layer(hidden, target).loss.backward()
    too_old = layer(hidden, target).loss
    first.step()
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        too_old.backward()


def test_a_tail_in_eval_mode_keeps_no_gradient_of_a_shared_call():
    layer = sharing_tails(sl.TaylorSoftmaxLoss())
    layer.tails[1].eval()
    hidden, target, _ = random_batch(14, 6, 60, seed=0)
    layer(hidden, target).loss.backward()
    assert [len(tail.gradients) for tail in layer.tails] == [1, 0, 1]
