"""The benchmark of tiers has a row for every way to cut, and for every number of classes."""

from __future__ import annotations

from benchmarks import tiered_step


def test_a_row_for_every_number_of_classes() -> None:
    rows = tiered_step.run(size=(16, 8, 9_000), classes=(6_000, 8_000), repeats=2)
    steps = [row for row in rows if row["part"] == "step"]
    assert [row["cuts"] for row in steps] == ["cuts (100, 1000, 5000)", "automatic cuts"]
    assert all(0 < row["ratio"].low <= row["ratio"].high for row in steps)
    assert [row["D"] for row in rows if row["part"] == "growth"] == [6_000, 8_000]
