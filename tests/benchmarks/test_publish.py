"""Tables of README.md and docs/ are written from results/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import parts, publish


def test_publishing_names_the_parts_that_were_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="no figures of losses, gram"):
        publish.stored_figures()
    (tmp_path / "bench.json").write_text(json.dumps({part: [{}] for part in parts.PARTS}))
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.crossover"):
        publish.stored_figures()


def test_pages_have_what_publishing_would_write() -> None:
    """After a new measurement: python -m benchmarks.publish."""
    for (page, name), text in publish.generated(publish.stored_figures()).items():
        marked = f"<!-- {name} -->\n{text}\n<!-- end {name} -->"
        assert marked in (publish.ROOT / page).read_text(encoding="utf-8"), f"{page}: {name}"
