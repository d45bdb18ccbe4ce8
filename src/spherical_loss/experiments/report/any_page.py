"""Pictures as files, for pages of any colour: transparent, with ink that can be read on white and on black."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

GREY = "#757d88"  # its contrast is 4.2 with white and 4.4 with the dark page of the documentation
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "spherical-loss",  # the same figures give the same file
    "savefig.transparent": True,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}
"""For ``matplotlib.rc_context``, around the drawing and :func:`write`."""


def write(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def plain_log_ticks(axes: Axes, measured: Sequence[float]) -> None:
    """Numbers instead of exponents: those measured along x; along y powers of ten, and where these are few, 2 and 5."""
    low, high = axes.get_ylim()
    axes.set_xticks(measured)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _: power_text(x)))


def power_text(x: float) -> str:
    """
    >>> power_text(0.1), power_text(10_000.0), power_text(1e7)
    ('0.1', '10,000', '10 million')
    """
    return f"{x / 1e6:,.10g} million" if x >= 1e6 else f"{x:,.10g}"
