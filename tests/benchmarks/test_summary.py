"""The summary has a line for every goal."""

from __future__ import annotations

import pytest

from benchmarks import summary


def test_the_summary_has_every_goal_of_the_heads(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # tables are not wrapped; libraries that import readline set it to 80
    ratio, size = [2.0, 1.9, 2.1], {"N": 8192, "d": 4, "D": 100}
    names = ("GramHead + TaylorSoftmaxLoss", "F.linear + F.cross_entropy", "F.linear_cross_entropy")
    measured = {
        "gram": [{**size, "name": n, "ratio": ratio, "memory": 0.05 if n.startswith("Gram") else None} for n in names],
        "side-by-side": [{**size, "size": "word model", "name": n, "ratio": ratio} for n in summary.FACTORED_GOALS],
        "adaptive": [{**size, "part": part, "name": name, "ratio": ratio} for part, name in summary.ADAPTIVE_GOALS],
        "tiers": [
            {**size, "part": "step", "cuts": "automatic cuts", "ratio": ratio},
            *({"part": "growth", "D": D, "seconds": [s, s, s]} for D, s in ((10, 1.0), (1_000, 1.2))),
        ],
        "topk": [{**size, "name": name, "ratio": ratio} for name in ("DenseHead", "FactoredHead")],
        "refactoring": [{"share": 0.04}],
        "growth": [{"sweep": "D", "D": D, "seconds": [s, s, s]} for D, s in ((10, 1.0), (1_000, 1.1))],
        "language": [{**size, "part": part, "ratio": ratio, "goal": 10.0} for part in ("output", "whole")],
    }
    summary.print_summary(measured)
    lines = capsys.readouterr().out.splitlines()
    expected = (
        *("F.linear + F.cross_entropy / GramHead", "F.linear_cross_entropy / GramHead", "GramHead's memory"),
        *(f"{name} / FactoredHead" for name in summary.FACTORED_GOALS),
        *(f"{name} / AdaptiveSphericalSoftmax" for _, name in summary.ADAPTIVE_GOALS),
        *("TieredHead, automatic cuts / FactoredHead", "1.20x", "DenseHead.topk", "FactoredHead.topk"),
        *("refactoring", "1.10x", "output layer: dense softmax / factored", "whole step: dense softmax / factored"),
    )
    for what in expected:
        assert sum(what in line for line in lines) == 1, what
    assert sum("2x" in line and "1.9 to 2.1" in line for line in lines) == 14


def test_nothing_measured_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    summary.print_summary({})
    assert capsys.readouterr().out == ""
