"""The command ``python -m benchmarks``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import parts
from benchmarks.__main__ import main


@pytest.fixture(autouse=True)
def no_memory_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "touch_memory", lambda: 0)  # it takes seconds


def test_it_measures_the_parts_that_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(parts.PARTS, "losses", lambda quick: [{"name": "a", "seconds": 1.0}])
    (tmp_path / "bench.json").write_text('{"gram": [{"name": "before"}]}')
    main(["losses", "--results", str(tmp_path)])
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert measured["losses"] == [{"name": "a", "seconds": 1.0}]
    assert measured["gram"] == [{"name": "before"}]


def test_quick_figures_are_shown_and_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setitem(parts.PARTS, "losses", lambda quick: asked.append(quick) or [{"name": "a"}])
    (tmp_path / "bench.json").write_text("{}")
    main(["losses", "--quick", "--results", str(tmp_path)])
    assert asked == [True]
    assert (tmp_path / "bench.json").read_text() == "{}"
    assert "all figures" not in capsys.readouterr().out


def test_without_linux_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="needs Linux"):
        main(["losses", "--results", str(tmp_path)])


def test_an_unknown_part_lists_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["speed"])
    assert stopped.value.code == 2
    assert "side-by-side" in capsys.readouterr().err
