"""The losses' peers at small sizes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import loss_speed


def test_naive_taylor_softmax_is_the_taylor_softmax() -> None:
    o, target = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 5
    numerators = ((o + 1) ** 2 + 1) / 2
    expected = (numerators.sum(1).log() - numerators[torch.arange(8), target].log()).mean()
    torch.testing.assert_close(loss_speed.naive_taylor_softmax(o, target), expected)


def test_losses_are_compared_in_rounds_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_speed.TARGETS, (4, 7), (1.0, None))
    monkeypatch.setattr(loss_speed, "compiled_cross_entropy", lambda: None)  # needs a C++ compiler, and a minute
    monkeypatch.setattr(loss_speed, "in_fresh_process", lambda measure, *arguments: measure(*arguments))
    size = loss_speed.Size(4, 7, calls=2, processes=3, rounds=2, peer_processes=1, peer_rounds=2)
    rows = loss_speed.compare(size)
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names))
    assert names[0] == loss_speed.REFERENCE
    assert {"TaylorSoftmaxLoss", "naive Taylor softmax", "entmax.sparsemax_loss"} <= set(names)
    assert all(row["seconds"].median > 0 for row in rows)
    quick = [row["name"] for row in loss_speed.compare(size, quick=True)]
    assert quick == [loss_speed.REFERENCE, *loss_speed.OURS]
