"""The picture of the learning curves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from spherical_loss.experiments.losses import LOSSES
from spherical_loss.experiments.runs import write_atomically
from spherical_loss.experiments.settings import Run


def draw_curves(path: Path, title: str, runs: Sequence[tuple[Run, list[dict[str, Any]]]]) -> None:
    """Validation error against epochs: each run thin, the mean over the runs of a loss (as far as all go) thick.

    ``runs`` are runs and their histories. The file's ending decides the format.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="validation error (%)", yscale="log", title=title)
    losses = list(dict.fromkeys(run.loss for run, _ in runs))
    for i, loss in enumerate(losses):
        histories = [history for run, history in runs if run.loss == loss and history]
        curves = [[100 * record["valid"]["error"] for record in history] for history in histories]
        if not curves:
            continue
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), _positive(curve), color=f"C{i}", linewidth=0.6, alpha=0.35)
        shared = min(len(curve) for curve in curves)
        mean = [sum(column) / len(curves) for column in zip(*(curve[:shared] for curve in curves), strict=True)]
        axes.plot(range(1, shared + 1), _positive(mean), color=f"C{i}", linewidth=2, label=LOSSES[loss].title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "spherical-loss"}):  # the same curves, the same file
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    write_atomically(path, content.getvalue())


def _positive(curve: list[float]) -> list[float]:
    """A log scale has no place for an error of 0: nan leaves a gap."""
    return [x if x > 0 else float("nan") for x in curve]
