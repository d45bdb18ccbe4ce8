"""Tests of the heads have few classes, for which a factored head would take the dense step: here it takes the factored one."""

from __future__ import annotations

import pytest

from spherical_loss.heads.factored import head


@pytest.fixture(autouse=True)
def factored_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "FEW_CLASSES", 0)  # it stays dense for D <= d
