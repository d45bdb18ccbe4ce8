"""Contenders take turns, ratios are taken round by round, and peak memory is what a run frees."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Times, in_fresh_process, interleaved, peak_memory, ratio_cells, touch_memory


def test_ratios_are_taken_round_by_round() -> None:
    slow, quick = Times(), Times()
    slow.rounds = [[8.0], [80.0], [10.0]]  # the second round was ten times slower, for both
    quick.rounds = [[1.0, 1.0, 4.0], [10.0, 20.0, 30.0], [2.0, 2.0, 2.0]]
    assert slow.over(quick) == (4.0, 4.0, 4.5)
    assert quick.spread == (2.0, 2.0, 10.0)
    assert ratio_cells(slow.over(quick)) == ("4x", "4 to 4.5")
    assert ratio_cells((1082.4, 1000.2, 1100.9)) == ("1,082x", "1,000 to 1,101")


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    work = {name: (lambda name=name: calls.append(name)) for name in "AB"}
    times = interleaved(work, repeats=2, warmup=1, turns={"B": 2})
    assert "".join(calls) == "ABB" * 3
    assert [len(turns) for turns in times["B"].rounds] == [2, 2]


def test_peak_memory_counts_what_a_run_frees() -> None:
    kept: list[torch.Tensor] = []

    def keeping() -> None:
        kept.clear()
        kept.append(torch.ones(2**25))

    def freeing() -> None:
        torch.ones(2**25)

    assert peak_memory(freeing) == pytest.approx(2**27, rel=0.1)
    assert peak_memory(keeping) < 2**24


def test_a_fresh_process_is_another_one() -> None:
    assert in_fresh_process(os.getpid) != os.getpid()
    assert in_fresh_process(max, 2, 3) == 3


def test_no_more_memory_is_touched_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_memory(lambda: touch_memory(2**27)) == pytest.approx(2**27, rel=0.1)  # written, and freed again
    monkeypatch.setattr(timing, "available", lambda: 2**20)
    assert touch_memory(2**27) == 2**19
