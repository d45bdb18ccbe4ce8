"""The picture at the top of the report: our figures beside the paper's, for every table of which there are runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from spherical_loss.experiments.report.pictures import Picture, picture, plot_beside
from spherical_loss.experiments.report.summary import SUMMARIZED
from spherical_loss.experiments.results.paper import TABLES, Figure
from spherical_loss.experiments.results.selection import table_group, table_groups
from spherical_loss.experiments.results.store import StoredRun
from spherical_loss.experiments.results.tables import by_seed, label_text, of_loss

PANELS = {"error": ("test error (%)", 100.0), "perplexity": ("test perplexity", 1.0)}
LINE = 0.2  # inches


@dataclass(frozen=True)
class Beside:
    """One loss in one table: our values, one per run, and the paper's figure, in the unit of the panel."""

    table: str
    loss: str
    values: list[float]
    paper: Figure | None


def figures(runs: Sequence[StoredRun], metric: str) -> list[Beside]:
    """What a panel shows: the losses of the README's summary, in the tables whose main metric this is."""
    found = []
    for name, table in TABLES.items():
        groups = table_groups(name, runs)
        if table.main_metric != metric or not groups:
            continue
        results = table_group(groups).results
        for loss in SUMMARIZED:
            values = [PANELS[metric][1] * x for x in by_seed(of_loss(results, loss), metric).values()]
            if values:
                row = table.rows.get(loss)
                found.append(Beside(f"{table.number} {name}", loss, values, getattr(row, metric) if row else None))
    return found


def overview(runs: Sequence[StoredRun]) -> Picture | None:
    panels = {metric: found for metric in PANELS if (found := figures(runs, metric))}
    if not panels:
        return None
    text = []
    for metric, found in panels.items():
        for each in found:
            paper = "" if each.paper is None else f", in the paper {PANELS[metric][1] * each.paper.mean:.3g}"
            name = f"Table {each.table}, {label_text(each.loss)}, {PANELS[metric][0]}"
            text.append(f"{name}: {statistics.fmean(each.values):.3g}{paper}")
    return picture(
        "Our figures beside the paper's; lower is better",
        f"Our figures beside the paper's. {'. '.join(text)}.",
        *(panel_of(metric, found) for metric, found in panels.items()),
        heights=[LINE * lines(found) + 0.5 for found in panels.values()],
    )


def lines(found: Sequence[Beside]) -> int:
    """A line for every figure, and one for the name of its table."""
    return len(found) + len({each.table for each in found})


def panel_of(metric: str, found: Sequence[Beside]) -> Callable[[Axes], None]:
    name, factor = PANELS[metric]

    def panel(axes: Axes) -> None:
        ticks, y, table = [], 0, ""
        for each in found:
            if each.table != table:
                table = each.table
                ticks.append((y, f"Table {table}"))
                y += 1
            plot_beside(axes, y, each.loss, each.values, each.paper, factor)
            ticks.append((y, SUMMARIZED[each.loss]))
            y += 1
        axes.set(xlabel=name, xscale="log", yticks=[at for at, _ in ticks], yticklabels=[label for _, label in ticks])
        axes.set_ylim(y - 0.3, -0.7)
        axes.tick_params(axis="y", length=0)
        for label in axes.get_yticklabels():
            if label.get_text().startswith("Table"):
                label.set_fontweight("bold")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.grid(alpha=0.2, axis="x")

    return panel
