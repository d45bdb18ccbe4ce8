"""The MNIST benchmark compares the same network, and the summary of all has every goal."""

from __future__ import annotations

import json

import pytest
import torch

from spherical_loss.benchmarks import mnist_step, summary
from spherical_loss.benchmarks.timing import RESULTS
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
    assert row["ratio"] == row["engine"].median / row["plain"].median > 0
    assert row["data_share"] == row["data"].median / row["engine"].median > 0


def test_the_summary_has_every_goal_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """From the stored figures, whose ratios are those of their own medians."""
    measured = json.loads((RESULTS / "bench.json").read_text())
    for row in measured["side-by-side"][1:8]:
        assert row["ratio"] == pytest.approx(row["seconds"][0] / row["ours"][0])
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
