"""The table and the picture of the study, from what is stored."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.quality.contenders import CONTENDERS
from benchmarks.quality.training import BATCH, CURVE, MEASURED
from benchmarks.timing import readable
from spherical_loss.experiments.table import Table

HEADER = ["output layer", "step", "words seen", "perplexity", "top-1 error", "top-10", "top-100", "rates: trunk, output (a, b)"]
ONE_HEAD, TIERS, THREE_TIERS, Z_LOSS = "Taylor, one head", "Taylor, tiers", "Taylor, three tiers", "Z-loss, three tiers"
COLORS = {"adaptive spherical": "#c1662f", "Taylor": "#2f6fc1", "spherical": "#2f9c6f", "Z-loss": "#8a5fb5"}
GREY = "#666666"
STYLES = {
    "--": (ONE_HEAD, "spherical, one head", "adaptive softmax"),
    ":": ("dense softmax", "adaptive spherical softmax, spherical"),
}


def finished(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The runs of a contender that did not diverge."""
    return [run for run in part["runs"] if run["contender"] == name and "end" in run]


def table(part: dict[str, Any]) -> list[list[str]]:
    """A row per contender: the mean over the seeds at the end, and their range."""
    rows = []
    for name in CONTENDERS:
        if runs := finished(part, name):
            ends = [run["end"] for run in runs]
            words = f"{BATCH * runs[0]['steps']:,}"
            rates = ", ".join(f"{x:g}" for x in (runs[0]["lr"], runs[0]["output_lr"], *runs[0]["options"].values()))
            errors = [f"{100 * statistics.fmean(end[k] for end in ends):.1f}%" for k in ("top1", "top10", "top100")]
            rows.append([name, readable(part["paces"][name]), words, perplexity(ends), *errors, rates])
    return rows


def perplexity(ends: list[dict[str, Any]]) -> str:
    """The mean over the seeds, and their range.

    >>> perplexity([{"perplexity": 210.0}, {"perplexity": 214.0}])
    '212 (210 to 214)'
    """
    values = [end["perplexity"] for end in ends if end["perplexity"] is not None]
    if not values:
        return "ranks only"
    mean = f"{statistics.fmean(values):.0f}"
    return f"{mean} ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else mean


def title(part: dict[str, Any]) -> str:
    seeds = {len(finished(part, name)) for name in CONTENDERS} - {0}
    runs = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"{max(seeds)}"
    amount = part["budget"]["training"]
    long = f"{amount / 60:g} minutes of one thread" if part["budget"]["unit"] == "seconds" else f"{amount:,} steps of {BATCH}"
    return f"{part['words']:,} words, {long}, seeds: {runs}, {MEASURED:,} test words"


def by_classes(parts: dict[str, dict[str, Any]]) -> Table:
    """The effect of tiers as classes are added: a row per vocabulary, seeds paired."""
    budget = next(iter(parts.values()))["budget"]
    rows = []
    for part in parts.values():
        one, tiers = ({run["seed"]: run["end"]["perplexity"] for run in finished(part, name)} for name in (ONE_HEAD, TIERS))
        ratios = [tiers[seed] / one[seed] for seed in sorted(one.keys() & tiers.keys())]
        if ratios:
            ends = [perplexity([run["end"] for run in finished(part, name)]) for name in (ONE_HEAD, TIERS)]
            rows.append(
                [f"{part['words']:,}", *ends, f"{statistics.fmean(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
            )
    title = f"Perplexity after {budget['training']:,} steps of {BATCH}: the mean of the seeds, and their range"
    return Table(title, ["words", ONE_HEAD, TIERS, "tiers / one head", "range"], rows)


def draw(parts: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity and top-10 error against the seconds of training, a row per vocabulary; bands are the range of the seeds."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(7, 3.3 * len(parts) + 0.5), layout=ConstrainedLayoutEngine(hspace=0.08))
    for part, pair in zip(parts.values(), figure.subplots(len(parts), 2, squeeze=False), strict=True):
        for axes, (metric, label, factor) in zip(
            pair, (("perplexity", "test perplexity", 1), ("top10", "test top-10 error (%)", 100)), strict=True
        ):
            for name in CONTENDERS:
                if (runs := finished(part, name)) and runs[0]["curve"][0][metric] is not None:
                    draw_curve(axes, name, runs, part["paces"][name], metric, factor)
            axes.set(xscale="log", xlabel="seconds of training, one thread", ylabel=label, title=f"{part['words']:,} words")
            ticks = [share * part["budget"]["training"] for share in CURVE]  # rounded up to whole steps in the data
            axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}  # some have no perplexity, or one size only
    names = [name for name in CONTENDERS if name in lines]
    figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=2)
    with matplotlib.rc_context({"svg.hashsalt": "spherical-loss"}):  # the same figures, the same file
        figure.savefig(path, metadata={"Date": None})


def draw_curve(axes: Any, name: str, runs: list[dict[str, Any]], pace: float, metric: str, factor: float) -> None:
    points = list(zip(*(run["curve"] for run in runs), strict=True))
    seconds = [pace * seeds[0]["step"] for seeds in points]
    values = [[factor * seed[metric] for seed in seeds] for seeds in points]
    color = next((color for start, color in COLORS.items() if name.startswith(start)), GREY)
    style = next((style for style, names in STYLES.items() if name in names), "-")
    axes.plot(seconds, [statistics.fmean(v) for v in values], style, color=color, marker="o", markersize=3, label=name)
    axes.fill_between(seconds, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, linewidth=0)
