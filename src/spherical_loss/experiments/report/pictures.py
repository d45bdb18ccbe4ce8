"""Pictures for the report: SVG to embed in an HTML page, in its colours (light or dark), each with a text alternative."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from spherical_loss.experiments.report.curves import METRICS, color_of, mean_curve, plot_curves, validations
from spherical_loss.experiments.report.time_curves import plot_time_curve, time_curve
from spherical_loss.experiments.results.paper import PaperTable
from spherical_loss.experiments.results.selection import Group
from spherical_loss.experiments.results.significance import interval
from spherical_loss.experiments.results.store import Study
from spherical_loss.experiments.results.tables import by_seed, label_text, loss_of

INK = "#010203"  # becomes the colour of the page's text
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLORS = [matplotlib.colors.to_hex(f"C{i}") for i in range(10)]
SIZE = (4.6, 3.5)
FEWEST = 3  # points: a picture of fewer shows nothing that its table does not
HOW_TO_READ = (
    "In the pictures a large point is the mean of our runs, with its 95% interval; small points are runs. A diamond is the "
    "paper's mean, with its standard deviation. Of learning curves a thin line is a run and a thick one the mean of a loss. "
    "Times are those of training without validation, of runs that had the machine to themselves; a line is a run."
)


@dataclass(frozen=True)
class Picture:
    """A picture, its caption (empty if the axes say all), and its text alternative: what it shows, in words and numbers."""

    svg: str
    caption: str
    alternative: str


def picture(caption: str, alternative: str, *panels: Callable[[Axes], None], heights: Sequence[float] | None = None) -> Picture:
    """One figure with the panels, one below the other, and their ``heights`` in inches."""
    heights = heights or [SIZE[1] if len(panels) == 1 else 0.85 * SIZE[1]] * len(panels)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": alternative}):  # the same picture gives the same bytes; ids differ
        figure = Figure(figsize=(SIZE[0], sum(heights)), layout="constrained")
        all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, panel in zip(all_axes, panels, strict=True):
            panel(axes)
        handles = {label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small")
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Picture(themed(content.getvalue(), alternative), caption, alternative)


def themed(svg: str, alternative: str) -> str:
    """Matplotlib's file as an element of a page: the page's colours and font, no fixed size, fewer digits, the alternative."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Two digits are enough for coordinates. Tick labels are text and keep theirs; the alternative is added later.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    svg = re.sub(r"<svg[^>]*>", f'<svg {box[0]} role="img" aria-label="{escape(alternative)}">', svg, count=1)
    svg = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", svg)  # ids of groups; those of clip paths and markers (hashes) are needed
    svg = re.sub(r"font: (\d+) ([\d.]+px) [^;\"]*", r"font-weight: \1; font-size: \2", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    for i, color in enumerate(COLORS):
        svg = svg.replace(color, f"var(--c{i})")
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def plain_numbers(axes: Axes) -> None:
    """A log scale of y with ordinary numbers, not only powers of ten."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        MaxNLocator(5) if high < 10 * low else LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def whole_numbers(axes: Axes) -> None:
    """A scale of x for epochs, which also works for a single one."""
    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xticks([round((low + high) / 2)])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def powers_of_ten(axes: Axes) -> None:
    """A log scale of x, with ordinary numbers."""
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def labels_of(group: Group) -> list[str]:
    return list(group.results)


def learning_curves(title: str, group: Group, metric: str) -> Picture | None:
    """Validation against epochs."""
    name, factor = METRICS[metric]
    found, longest = [], 0
    for label in labels_of(group):
        curves = [c for run in group.runs if run.label == label and (c := validations(run.history, metric, factor))]
        if curves:
            mean = mean_curve(curves)
            longest = max(longest, len(mean))
            best = min(range(len(mean)), key=mean.__getitem__)
            found.append(
                f"{label_text(label)}, mean of {len(curves)}: {mean[0]:.3g} after epoch 1, {mean[best]:.3g} at best, "
                f"after epoch {best + 1} of {len(mean)}"
            )
    if longest < FEWEST:
        return None

    def panel(axes: Axes) -> None:
        plot_curves(axes, group.histories, metric)
        whole_numbers(axes)
        plain_numbers(axes)

    return picture("", f"{title}. Line chart of {name} against epochs. {'. '.join(found)}.", panel)


def time_curves(title: str, group: Group, metrics: Sequence[str]) -> Picture | None:
    """Validation against the seconds of training, for runs that had the machine to themselves; None if there are none."""
    timed = [run for run in group.runs if run.alone]
    found, longest = [], 0
    for metric in metrics:
        name, factor = METRICS[metric]
        for label in labels_of(group):
            curves = [c for run in timed if run.label == label and (c := time_curve(run.history, metric))[1]]
            if curves:
                longest = max(longest, *(len(values) for _, values in curves))
                best = min(factor * min(values) for _, values in curves)
                last = max(seconds[-1] for seconds, _ in curves)
                found.append(f"{label_text(label)}: {name} {best:.3g} at best, {last:,.0f} seconds in all")
    if longest < FEWEST:
        return None

    def panel_of(metric: str) -> Callable[[Axes], None]:
        def panel(axes: Axes) -> None:
            plot_time_curve(axes, metric, [(run, run.history) for run in timed])
            plain_numbers(axes)

        return panel

    names = " and ".join(METRICS[metric][0] for metric in metrics)
    alternative = f"{title}. Line chart of {names} against time. {'. '.join(found)}."
    return picture("", alternative, *(panel_of(metric) for metric in metrics))


def error_bars(title: str, group: Group, table: PaperTable | None, metric: str) -> Picture | None:
    """The test metric of each loss with its confidence interval, and the paper's with its standard deviation."""
    names = {"error": "test error (%)", "perplexity": "test perplexity", "top10": "test top-10 error (%)"}
    factor = METRICS[metric][1]
    rows: list[tuple[str, list[float], Any]] = []
    for label, runs in group.results.items():
        values = [factor * x for x in by_seed(runs, metric).values()]
        row = table.rows.get(loss_of(label)) if table is not None else None
        if values:
            rows.append((label, values, getattr(row, metric) if row is not None else None))
    if sum(1 if paper is None else 2 for *_, paper in rows) < FEWEST:
        return None
    found = []
    for label, values, paper in rows:
        bounds = interval(values)
        text = f"{label_text(label)}: {statistics.fmean(values):.3g}"
        text += f" (95% interval {bounds[0]:.3g} to {bounds[1]:.3g}, {len(values)} runs)" if bounds else " (one run)"
        found.append(text + (f", in the paper {factor * paper.mean:.3g}" if paper else ""))

    def panel(axes: Axes) -> None:
        for i, (label, values, paper) in enumerate(rows):
            plot_beside(axes, i, label, values, paper, factor)
        axes.set(xlabel=names[metric], yticks=range(len(rows)), yticklabels=[label_text(label) for label, *_ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(alpha=0.2, axis="x")

    alternative = f"{title}. {names[metric].capitalize()} of each loss. {'. '.join(found)}."
    return picture("", alternative, panel, heights=[0.8 + 0.4 * len(rows)])


def plot_beside(axes: Axes, y: float, label: str, values: Sequence[float], paper: Any, factor: float) -> None:
    """Our values with their mean and its confidence interval, and below the paper's figure (or None) with its deviation."""
    mean, bounds = statistics.fmean(values), interval(values)
    around = [[mean - bounds[0]], [bounds[1] - mean]] if bounds else None
    axes.plot(values, [y] * len(values), ".", color=color_of(label), alpha=0.35, markersize=4)
    axes.errorbar([mean], [y], xerr=around, fmt="o", color=color_of(label), capsize=3, markersize=5)
    if paper is not None:
        spread = None if paper.deviation is None else factor * paper.deviation
        axes.errorbar([factor * paper.mean], [y + 0.28], xerr=spread, fmt="D", color=INK, alpha=0.6, capsize=2, markersize=3)


def tuning_picture(task: str, studies: Sequence[Study]) -> Picture | None:
    """Validation against the learning rate of each trial; pruned trials are hollow, diverged ones at the upper edge."""
    found, values = [], [t["value"] for s in studies for t in s.trials if t["value"] is not None]
    top = 1.5 * max(values, default=1.0)
    for study in studies:
        best = study.best
        diverged = sum(trial["value"] is None for trial in study.trials)
        text = f"{label_text(study.loss)}: {len(study.trials)} trials, {diverged} diverged"
        found.append(text + (f", best {best['value']:.3g} at a learning rate of {best['values']['lr']:g}" if best else ""))
    if sum(len(study.trials) for study in studies) < FEWEST:
        return None
    judged = sorted({study.monitor for study in studies})

    def panel(axes: Axes) -> None:
        axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel=f"validation ({', '.join(judged)})")
        for study in studies:
            known = [trial for trial in study.trials if trial["value"] is not None]
            points = [(trial["values"]["lr"], trial["value"]) for trial in known]
            pruned = ["pruned" in trial for trial in known]
            whole, hollow = ([p for p, given_up in zip(points, pruned, strict=True) if given_up is x] for x in (False, True))
            alone = all(set(trial["values"]) == {"lr"} for trial in study.trials)
            style = "o-" if alone else "o"  # no line between trials that differ in more than the rate
            look: dict[str, Any] = {"color": color_of(study.loss), "markersize": 4, "linewidth": 0.8}
            axes.plot(*np.reshape(sorted(whole), (-1, 2)).T, style, label=label_text(study.loss), **look)
            axes.plot(*np.reshape(hollow, (-1, 2)).T, "o", fillstyle="none", **look)
            rates = [trial["values"]["lr"] for trial in study.trials if trial["value"] is None]
            axes.plot(rates, [top] * len(rates), "x", color=color_of(study.loss), markersize=5)
        plain_numbers(axes)
        axes.grid(alpha=0.2)

    return picture(f"{task}: the trials", f"Validation against the learning rate on {task}. {'. '.join(found)}.", panel)
