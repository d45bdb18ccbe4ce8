"""Quality for time needs data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import quality
from spherical_loss.experiments.data.folder import VARIABLE


def test_quality_without_data_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert quality.run() == []
    assert "imdb.train.txt" in capsys.readouterr().out
