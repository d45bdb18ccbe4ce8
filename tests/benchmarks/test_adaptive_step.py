"""The benchmark of AdaptiveSphericalSoftmax has a row for every peer and every number of classes."""

from __future__ import annotations

import pytest

from benchmarks import adaptive_step, summary


def test_a_row_for_every_peer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # tables are not wrapped; libraries that import readline set it to 80
    monkeypatch.setattr(adaptive_step, "FREQUENT", (10, 20))
    monkeypatch.setattr(adaptive_step, "in_fresh_process", lambda measure, *arguments: measure(*arguments))
    rows = adaptive_step.run(size=(16, 8, 3000), classes=(1000, 2000), seconds=0.0)
    found = {(row["part"], row["name"]): row for row in rows if "name" in row}
    assert set(summary.ADAPTIVE_GOALS) < set(found)
    assert all(0 < row["ratio"].low <= row["ratio"].high for row in found.values())
    assert [row["D"] for row in rows if row["part"] == "growth"] == [1000, 2000]
    assert "tokens per second" in capsys.readouterr().out
