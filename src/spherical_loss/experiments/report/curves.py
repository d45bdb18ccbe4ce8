"""The picture of the learning curves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.results.tables import label_text, loss_of


class Labelled(Protocol):
    """What a picture needs to know about a run."""

    @property
    def loss(self) -> str: ...
    @property
    def label(self) -> str: ...


METRICS = {
    "error": ("validation error (%)", 100.0),
    "perplexity": ("validation perplexity", 1.0),
    "top10": ("validation top-10 error (%)", 100.0),
}
"""The validation metrics that are drawn: the label of the axis, and the factor to its unit."""

Histories = Sequence[tuple[Labelled, list[dict[str, Any]]]]
"""Runs and their histories."""


def draw_curves(path: Path, title: str, runs: Histories) -> None:
    """:func:`plot_curves` as a file; its suffix decides the format."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title)
    plot_curves(axes, runs)
    if axes.lines:
        axes.legend(fontsize="small")
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "spherical-loss"}):  # the same curves give the same file
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    write_atomically(path, content.getvalue())


def plot_curves(axes: Axes, runs: Histories, metric: str = "error") -> None:
    """A metric of the validation set against epochs: each run thin, the mean of a loss (up to its shortest run) thick."""
    name, factor = METRICS[metric]
    axes.set(xlabel="epoch", ylabel=name)
    for label in dict.fromkeys(run.label for run, _ in runs):
        curves = [curve for run, history in runs if run.label == label and (curve := validations(history, metric, factor))]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), positive(curve), color=color_of(label), linewidth=0.6, alpha=0.35)
        if curves:
            mean = mean_curve(curves)
            axes.plot(range(1, len(mean) + 1), positive(mean), color=color_of(label), linewidth=2, label=label_text(label))
    log_scale(axes)
    axes.grid(alpha=0.3)


def log_scale(axes: Axes) -> None:
    """A log scale of y, unless all curves are zero: no log scale can show them."""
    if any(np.isfinite(line.get_ydata()).any() for line in axes.lines):
        axes.set_yscale("log")


def validations(history: list[dict[str, Any]], metric: str, factor: float) -> list[float]:
    """The metric after each epoch, in its unit; empty for a loss that does not have the metric."""
    values = [record["valid"].get(metric) for record in history]
    return [] if None in values else [factor * value for value in values]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of the curves, up to the length of the shortest.

    >>> mean_curve([[4.0, 2.0, 1.0], [2.0, 1.0]])
    [3.0, 1.5]
    """
    shared = min(len(curve) for curve in curves)
    return [sum(column) / len(curves) for column in zip(*(curve[:shared] for curve in curves), strict=True)]


def color_of(label: str) -> str:
    """A loss has the same colour in every picture; unknown losses share the last one."""
    losses = list(LOSSES)
    loss = loss_of(label)
    return f"C{min(losses.index(loss), 9) if loss in losses else 9}"


def positive(curve: Sequence[float]) -> list[float]:
    """Replace 0, which a log scale cannot show, by nan, which leaves a gap."""
    return [x if x > 0 else float("nan") for x in curve]
