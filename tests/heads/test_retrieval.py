"""Retrieval through faiss, against the exact search."""

from __future__ import annotations

import builtins

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads import DenseHead, FactoredHead, FactoredSGD, FaissIndex, Head

from .reference import random_batch
from .test_heads import train_step


def trained_head(bias: bool) -> Head:
    torch.manual_seed(0)
    head = FactoredHead(12, 3000, bias=bias)
    optimizer = FactoredSGD(head, lr=300.0)
    for step in range(30):
        hidden, target, _ = random_batch(32, 12, 3000, seed=step)
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden.float(), target)
    return head


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "loss",
    [sl.TaylorSoftmaxLoss(), sl.SphericalSoftmaxLoss(0.1), sl.AbsSoftmaxLoss(), sl.SoftmaxLoss(), sl.ZLoss(1, 2)],
    ids=str,
)
def test_a_flat_index_is_exact(bias, loss):
    head, hidden = trained_head(bias), torch.randn(20, 12)
    assert FaissIndex(head, "Flat").recall(hidden, 10, loss) > 0.999  # rounding may swap the last places


def test_both_signs_are_searched():
    head = DenseHead(2, 4, bias=False)
    head.set_weight(torch.tensor([[3.0, 0], [-5.0, 0], [1.0, 0], [0.5, 0]]))
    index, hidden = FaissIndex(head, "Flat"), torch.tensor([[1.0, 0]])
    assert index.topk(hidden, 2, sl.SphericalSoftmaxLoss(0.1)).classes.tolist() == [[1, 0]]
    assert index.topk(hidden, 2, sl.SoftmaxLoss()).classes.tolist() == [[0, 2]]
    assert index.topk(hidden, 4, sl.SphericalSoftmaxLoss(0.1)).classes.tolist() == [[1, 0, 2, 3]]


def test_more_probes_find_more():
    head, hidden, loss = trained_head(bias=True), torch.randn(50, 12), sl.TaylorSoftmaxLoss()
    few, all_ = (FaissIndex(head, "IVF32,Flat", nprobe=n).recall(hidden, 10, loss) for n in (1, 32))
    assert few < all_
    assert all_ > 0.999


def test_bad_input_and_the_missing_extra(monkeypatch):
    head = DenseHead(4, 20)
    with pytest.raises(ValueError, match="between 1 and the 20 classes"):
        FaissIndex(head, "Flat").topk(torch.randn(3, 4), 21, sl.TaylorSoftmaxLoss())
    original = builtins.__import__

    def without_faiss(name, *args, **kwargs):
        if name == "faiss":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_faiss)
    with pytest.raises(ImportError, match=r"spherical-loss\[faiss\]"):
        FaissIndex(head, "Flat")
