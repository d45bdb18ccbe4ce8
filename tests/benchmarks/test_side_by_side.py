"""The table of training steps has every contender."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import side_by_side, timing


def test_side_by_side_has_a_row_for_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    for rate in (timing.matmul_rate, timing.copy_rate):  # of this machine they take seconds
        monkeypatch.setattr(side_by_side, rate.__name__, partial(rate, n=64, repeats=1))
    monkeypatch.setattr(side_by_side, "in_fresh_process", lambda measure, *arguments: measure(*arguments))
    rows = side_by_side.compared("small", 16, 8, 3000, seconds=0.0)
    assert [row["name"] for row in rows[1:]] == list(side_by_side.CONTENDERS)
    for row in rows[1:]:
        assert 0 < row["ratio"].low <= row["ratio"].median <= row["ratio"].high
        assert row["seconds"].median > 0
    # Weights and gradient of 3,000 x 8 take 192 kB, the three matrices of 16 x 3,000 of the dense layer 576 kB.
    monkeypatch.setattr(side_by_side, "available", lambda: 400_000)
    rows = side_by_side.compared("small", 16, 8, 3000, seconds=0.0)
    missing = [row for row in rows if row["seconds"] is None]
    assert [row["name"] for row in missing] == ["dense + cross-entropy + SGD", "F.linear_cross_entropy + SGD"]
    assert side_by_side.cells(missing[0])[2:] == ["does not fit", "", "", "", "1 MB"]
