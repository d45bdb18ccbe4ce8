"""The pictures of the growth are drawn from stored figures, for pages of any colour."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

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


def test_every_axis_has_several_numbers() -> None:
    seconds = (0.0028, 0.0027, 0.0043, 0.0115, 0.0331)
    rows = [{"sweep": "d", "d": d, "seconds": (s, s, s)} for d, s in zip((64, 128, 256, 512, 1024), seconds, strict=True)]
    axes = Figure().add_subplot()
    growth.plot(axes, rows, "d", "step", growth.OURS_COLOR)
    for axis, expected in ((axes.xaxis, ["64", "128", "256", "512", "1,024"]), (axes.yaxis, ["5", "10", "20"])):
        low, high = axis.get_view_interval()
        ticks = [tick for tick in axis.get_major_locator()() if low <= tick <= high]
        assert axis.get_major_formatter().format_ticks(ticks) == expected
