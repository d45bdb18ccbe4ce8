"""The pictures of the growth are drawn from stored figures, for pages of any colour."""

from __future__ import annotations

from pathlib import Path

from benchmarks import growth
from benchmarks.growth import BASE


def test_pictures_are_drawn_from_rows(tmp_path: Path) -> None:
    rows = [
        {"sweep": name, **BASE, name: 10.0**k, "seconds": [10.0**k, 1.0, 2.0], "exponent": 1.0}
        for name in "DNd"
        for k in range(3)
    ]
    rows += [{"sweep": "dense", **BASE, "D": 10**k, "seconds": [10.0**k]} for k in range(2)]
    growth.draw(rows, tmp_path)
    for name in ("step_time.svg", "growth.svg"):
        drawn = (tmp_path / name).read_text()
        assert "fill: #ffffff" not in drawn  # transparent: a dark page stays dark
        assert "#2f6fc1" in drawn
    assert "#c1662f" in (tmp_path / "step_time.svg").read_text()  # the dense step, against D alone
    assert "#c1662f" not in drawn
    growth.draw(rows, tmp_path)
    assert (tmp_path / "growth.svg").read_text() == drawn  # the same figures give the same file
