"""The comparison of searches, with few classes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import search


def test_every_index_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "D", 5_000)
    monkeypatch.setattr(search, "INDEXES", {"default": (None, False), "clusters": ("IVF8,Flat", True)})
    torch.manual_seed(0)
    rows = [row for make in (search.random_rows, lambda: search.trained_rows(20)) for row in search.measured(make(), repeats=3)]
    assert [row["index"] for row in rows] == ["default", "clusters"] * 2
    assert all(0.5 < row["recall"] <= 1 and row["ratio 1"].median > 0 for row in rows)
    assert [cells[4] for cells in search.table(rows).rows][::2] == ["-", "-"]
