"""Learning curves against time: which loss, with which head, is best after the same training time?"""

from __future__ import annotations

import io
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.report.curves import METRICS, Histories, color_of, log_scale, positive
from spherical_loss.experiments.results.tables import label_text

STYLES = {
    "dense": "-",
    "gram": "--",
    "factored": ":",
    "tiered": (0, (1, 3)),
    "adaptive-spherical": (0, (8, 2)),
    "sampled": "-.",
    "adaptive": (0, (6, 2, 1, 2, 1, 2)),
}
MARKERS = {"tiered": "v", "adaptive-spherical": "D", "sampled": "^", "adaptive": "s"}


def draw_time_curves(path: Path, title: str, runs: Histories) -> None:
    """:func:`plot_time_curve` of perplexity and of top-10 error as a file; its suffix decides the format."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for axes, metric in zip(figure.subplots(1, 2), ("perplexity", "top10"), strict=True):
        plot_time_curve(axes, metric, runs)
        if axes.lines:
            axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=150)
    write_atomically(path, content.getvalue())


def plot_time_curve(axes: Axes, metric: str, runs: Histories) -> None:
    """A metric of the validation set against the seconds spent on training, a line per run.

    Colours are losses and line styles are heads. The time of validation is left out, since how often to validate is a choice.
    """
    name, factor = METRICS[metric]
    axes.set(xlabel="seconds of training", ylabel=name)
    named = set()
    for run, history in runs:
        seconds, values = time_curve(history, metric)
        head = run.label.partition("/")[2] or "dense"
        if not values:
            continue
        axes.plot(
            seconds,
            positive([factor * value for value in values]),
            marker=MARKERS.get(head, "."),
            markersize=4,
            color=color_of(run.label),
            linestyle=STYLES.get(head, "-."),
            label=None if run.label in named else label_text(run.label),
        )
        named.add(run.label)
    log_scale(axes)
    axes.grid(alpha=0.3, which="both")


def time_curve(history: list[dict[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    """Seconds of training and the metric at that time, for every epoch that has it.

    >>> time_curve([{"train_seconds": 2.0, "valid": {"top10": 0.5}}, {"train_seconds": 3.0, "valid": {"top10": 0.4}}], "top10")
    ([2.0, 5.0], [0.5, 0.4])
    """
    times = accumulate(record["train_seconds"] for record in history)
    points = [(t, record["valid"][metric]) for t, record in zip(times, history, strict=True)]
    return [t for t, value in points if value is not None], [value for _, value in points if value is not None]
