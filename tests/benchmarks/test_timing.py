"""The MNIST benchmark compares the same network, and the summary of all has every goal."""

from __future__ import annotations

import json

import pytest
import torch

from spherical_loss.benchmarks import mnist_step, summary
from spherical_loss.benchmarks.timing import RESULTS, Times, interleaved, peak_memory, with_spread
from spherical_loss.experiments import models


def test_both_networks_are_the_same() -> None:
    torch.manual_seed(0)
    plain, engine = mnist_step.plain_network(), models.mnist_network(30, 10, "relu")
    with torch.no_grad():
        for a, b in zip(plain.parameters(), engine.parameters(), strict=True):
            a.copy_(b)
    x = torch.randn(3, 1, 28, 28)
    assert torch.allclose(plain(x), engine(x), atol=1e-5)


def test_it_measures() -> None:
    row = mnist_step.compare("taylor", repeats=1)
    assert row["loss"] == "taylor"
    assert row["ratio"].median == row["engine"].median / row["plain"].median > 0
    assert row["data_share"] == row["data"].median / row["engine"].median > 0


def test_ratios_are_taken_round_by_round() -> None:
    slow, quick = Times(), Times()
    slow.rounds = [[8.0], [80.0], [10.0]]  # the second round was ten times slower, for both
    quick.rounds = [[1.0, 1.0, 4.0], [10.0, 20.0, 30.0], [2.0, 2.0, 2.0]]
    assert slow.over(quick) == (4.0, 4.0, 4.5)
    assert quick.spread == (2.0, 2.0, 10.0)
    assert with_spread(slow.over(quick)) == "4x (4 to 4.5)"
    assert with_spread((1082.4, 1000.2, 1100.9)) == "1,082x (1,000 to 1,101)"
    assert with_spread((1.0, 1.0, 1.0)) == "1x"


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


def test_the_summary_has_every_goal_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """From the stored figures, whose ratios are about those of their medians."""
    measured = json.loads((RESULTS / "bench.json").read_text())
    for row in measured["side-by-side"][1:8]:
        assert row["ratio"][1] <= row["ratio"][0] <= row["ratio"][2]
        assert row["ratio"][0] == pytest.approx(row["seconds"][0] / row["ours"][0], rel=0.25)
    summary.print_summary(measured)
    lines = capsys.readouterr().out.splitlines()
    for what in ("F.linear + F.cross_entropy / GramHead", "F.linear_cross_entropy / GramHead", "GramHead's memory"):
        assert sum(what in line for line in lines) == 2
    for what in (
        *summary.FACTORED_GOALS,
        "refactoring",
        "slowest / fastest",
        "whole step: dense softmax / factored (N=250, d=1000",
    ):
        assert sum(what in line for line in lines) == 1
    summary.print_summary({})
    assert capsys.readouterr().out == ""
