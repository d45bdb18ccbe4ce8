"""The benchmark of topk has a row for every head, and its product computes all outputs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import top_classes


def test_a_row_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_classes, "TRAINED", 2)
    rows = top_classes.run(size=(20, 8, 500), repeats=2)
    assert [row["name"] for row in rows] == ["DenseHead", "FactoredHead"]
    assert all(0 < row["ratio"].low <= row["ratio"].high for row in rows)


def test_the_product_has_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last piece is smaller than the others."""
    monkeypatch.setattr(top_classes, "PRODUCT", 5 * 6)
    H, W, seen = torch.randn(5, 3), torch.randn(20, 3), []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append(out.copy_(a @ b).clone()))
    top_classes.product(H, W)()
    torch.testing.assert_close(torch.cat(seen, 1), H @ W.T)
