"""The experiments beyond the paper's tables: the bounds, the number of classes, tiers, the large vocabulary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from spherical_loss.experiments.report.curves import color_of
from spherical_loss.experiments.report.pictures import FEWEST, Picture, picture, plain_numbers, powers_of_ten, whole_numbers
from spherical_loss.experiments.report.time_curves import time_curve
from spherical_loss.experiments.results.selection import Group, group_of, grouped
from spherical_loss.experiments.results.significance import interval
from spherical_loss.experiments.results.store import StoredRun
from spherical_loss.experiments.results.tables import (
    CLAIM_HEADINGS,
    Column,
    by_seed,
    label_text,
    mean_text,
    of_loss,
    paired_row,
    significant,
)
from spherical_loss.experiments.table import Table

PERPLEXITY = Column("perplexity", "perplexity", digits=4)


def trained_on(run: StoredRun) -> str:
    """How much text a run has seen, such as ``at most 2 epochs of the first 100,000 words``."""
    words = run.settings.get("words")
    text = f"the first {words:,} words" if words else "the training text"
    return f"one pass over {text}" if run.settings.get("online") else f"at most {run.settings['epochs']} epochs of {text}"


def perplexities(run: StoredRun) -> list[float]:
    """Validation perplexity before training, and after every epoch."""
    return [run.result["start"]["perplexity"], *(record["valid"]["perplexity"] for record in run.history)]


def bound_group(runs: Sequence[StoredRun]) -> Group | None:
    """The finished runs of the task bounds that have a perplexity, from the largest set under the same conditions."""
    mine = [run for run in runs if run.task == "bounds" and run.finished and None not in perplexities(run)]
    return max((group_of(part) for part in grouped(mine)), key=lambda group: len(group.runs), default=None)


def bounds_table(group: Group) -> Table:
    """A row per loss: perplexity of the validation set at the start, after each epoch, and at its best."""
    by_label = {label: [perplexities(run) for run in group.runs if run.label == label] for label in group.results}
    epochs = max(len(curve) for curves in by_label.values() for curve in curves) - 1
    after = [f"after epoch {k + 1}" for k in range(epochs)]
    headings = ["loss function", "learning rate", "runs", "at the start", *after, "at its best"]
    rows = []
    for label, curves in by_label.items():
        columns = [[curve[k] for curve in curves if k < len(curve)] for k in range(epochs + 1)]
        best = [min(curve[1:]) for curve in curves]
        rate = f"{group.first(label).settings['lr']:g}"
        rows.append([label_text(label), rate, str(len(curves)), *(mean_text(x, PERPLEXITY) for x in [*columns, best])])
    title = f"Validation perplexity, mean (standard deviation) over runs; {trained_on(group.runs[0])}"
    return Table(title, headings, rows)


def bounds_claims(group: Group) -> Table:
    """The paper: "Optimizing the bound actually degraded the initial perplexity". Tested after the last epoch."""
    rows = []
    for label in group.results:
        if label.startswith("bound"):
            curves = {run.seed: perplexities(run) for run in group.runs if run.label == label}
            start, last = ({seed: curve[k] for seed, curve in curves.items()} for k in (0, -1))
            text = f"Minimizing the bound degrades the initial perplexity ({label_text(label)})"
            rows.append(paired_row(text, start, last, "perplexity"))
    return Table("Does it get worse than at the start, after the last epoch?", CLAIM_HEADINGS, rows)


def bounds_picture(group: Group) -> Picture | None:
    if max(len(perplexities(run)) for run in group.runs) < FEWEST:
        return None
    found = []
    for label in group.results:
        curves = [perplexities(run) for run in group.runs if run.label == label]
        start, last, best = (statistics.fmean(x) for x in zip(*((c[0], c[-1], min(c[1:])) for c in curves), strict=True))
        found.append(f"{label_text(label)}: {start:.4g} at the start, {best:.4g} at best, {last:.4g} after the last epoch")

    def panel(axes: Axes) -> None:
        axes.set(xlabel="epoch (0: before training)", ylabel="validation perplexity", yscale="log")
        named = set()
        for run in group.runs:
            axes.plot(
                perplexities(run), ".-", color=color_of(run.label), label=None if run.label in named else label_text(run.label)
            )
            named.add(run.label)
        whole_numbers(axes)
        plain_numbers(axes)
        axes.grid(alpha=0.2)

    return picture(
        "Validation perplexity from the start; a line is a run",
        f"The bounds. Line chart of validation perplexity against epochs. {'. '.join(found)}.",
        panel,
    )


@dataclass(frozen=True)
class Gap:
    """How far a loss is from the softmax with D classes: a mean over pairs of runs, with its interval if there are several."""

    label: str
    D: int
    metric: str
    mean: float
    bounds: tuple[float, float] | None
    n: int


GAPS = {"perplexity": "perplexity / softmax's", "top10": "top-10 error - softmax's (points)"}


def families(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Runs on one corpus that differ only in the vocabulary; at least two vocabularies each."""
    texts = [run for run in runs if run.D is not None and run.finished]
    parts = grouped(texts, but=["vocabulary"])
    return [part for part in parts if len({gap.D for gap in gaps(part)}) > 1]


def gaps(family: Sequence[StoredRun]) -> list[Gap]:
    """For every loss and every D at which softmax was run, too: the geometric mean of the ratio of the perplexities, and the
    mean difference of the top-10 errors in percentage points."""
    found = []
    for D in sorted({run.D for run in family if run.D is not None}):
        results = group_of([run for run in family if run.D == D]).results
        softmax = of_loss(results, "softmax")
        for label, runs in results.items():
            if label == "softmax":
                continue
            for metric in GAPS:
                ours, theirs = by_seed(runs, metric), by_seed(softmax, metric)
                seeds = sorted(ours.keys() & theirs.keys())
                if not seeds:
                    continue
                if metric == "perplexity":
                    values = [math.log(ours[seed] / theirs[seed]) for seed in seeds]
                    bounds = interval(values)
                    limits = None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1]))
                    found.append(Gap(label, D, metric, math.exp(statistics.fmean(values)), limits, len(seeds)))
                else:
                    values = [100 * (ours[seed] - theirs[seed]) for seed in seeds]
                    found.append(Gap(label, D, metric, statistics.fmean(values), interval(values), len(seeds)))
    return found


def family_title(family: Sequence[StoredRun]) -> str:
    return f"{family[0].task}, {trained_on(family[0])}"


def gap_table(title: str, found: Sequence[Gap]) -> Table:
    headings = ["loss function", "classes", "pairs", GAPS["perplexity"], "95% interval", GAPS["top10"], "95% interval"]
    rows = []
    for label, D in dict.fromkeys((gap.label, gap.D) for gap in found):
        row, pairs = [], 0
        for metric in GAPS:
            gap = next((g for g in found if (g.label, g.D, g.metric) == (label, D, metric)), None)
            row += (
                ["-", "-"]
                if gap is None
                else [
                    significant(gap.mean, 3),
                    "-" if gap.bounds is None else " to ".join(significant(x, 3) for x in gap.bounds),
                ]
            )
            pairs = max(pairs, gap.n if gap else 0)
        rows.append([label_text(label), f"{D:,}", str(pairs), *row])
    return Table(f"The gap to the softmax: {title}", headings, rows)


def gap_picture(title: str, found: Sequence[Gap]) -> Picture | None:
    if len({gap.D for gap in found}) < FEWEST:
        return None
    text = []
    for label in dict.fromkeys(gap.label for gap in found):
        for metric, name in GAPS.items():
            points = [gap for gap in found if (gap.label, gap.metric) == (label, metric)]
            if points:
                text.append(f"{label_text(label)}, {name}: " + ", ".join(f"{p.mean:.3g} at {p.D:,} classes" for p in points))

    def panel_of(metric: str) -> Callable[[Axes], None]:
        def panel(axes: Axes) -> None:
            axes.set(xscale="log", xlabel="classes D", ylabel=GAPS[metric])
            axes.axhline(
                1 if metric == "perplexity" else 0, color=color_of("softmax"), linewidth=1, label=label_text("softmax")
            )
            for label in dict.fromkeys(gap.label for gap in found):
                points = [gap for gap in found if (gap.label, gap.metric) == (label, metric)]
                around = [
                    [max(0.0, p.mean - p.bounds[0]) if p.bounds else 0.0 for p in points],
                    [max(0.0, p.bounds[1] - p.mean) if p.bounds else 0.0 for p in points],
                ]
                axes.errorbar(
                    [p.D for p in points],
                    [p.mean for p in points],
                    yerr=around,
                    fmt="o-",
                    color=color_of(label),
                    markersize=4,
                    capsize=2,
                    label=label_text(label),
                )
            powers_of_ten(axes)
            axes.grid(alpha=0.2)

        return panel

    return picture(
        "The gap to softmax against the number of classes, with 95% intervals; above the line softmax is better",
        f"{title}. The gap to the softmax against the number of classes. {'. '.join(text)}.",
        *(panel_of(metric) for metric in GAPS),
    )


def tier_groups(runs: Sequence[StoredRun]) -> list[Group]:
    """The finished runs of one text under the same conditions, where softmax and a loss with tiers are among them."""
    texts = [run for run in runs if "vocabulary" in run.settings and run.finished]
    groups = [group_of(part) for part in grouped(texts)]
    return [group for group in groups if "softmax" in group.results and tiered_losses(group)]


def tiered_losses(group: Group) -> list[str]:
    return [label.removesuffix("/tiered") for label in group.results if label.endswith("/tiered")]


def one_rate(group: Group, loss: str) -> dict[int, float]:
    """Perplexities of the loss with one rate for all classes, by seed."""
    return by_seed(of_loss({k: v for k, v in group.results.items() if k != f"{loss}/tiered"}, loss), "perplexity")


def tier_table(title: str, group: Group) -> Table:
    """A row per loss that has tiers: softmax's perplexity, the loss's with one rate and with tiers, and how much of the gap to
    softmax the tiers close, of the mean perplexities."""
    softmax = list(by_seed(group.results["softmax"], "perplexity").values())
    rows = []
    for loss in tiered_losses(group):
        single = list(one_rate(group, loss).values())
        tiers = list(by_seed(group.results[f"{loss}/tiered"], "perplexity").values())
        means = [statistics.fmean(x) if x else None for x in (softmax, single, tiers)]
        rows.append([label_text(loss), *(mean_text(x, PERPLEXITY) for x in (softmax, single, tiers)), closed_text(*means)])
    headings = ["loss function", "softmax", "one rate", "tiers", "of the gap closed"]
    return Table(f"Perplexity with one rate and with tiers: {title}", headings, rows)


def closed_text(softmax: float | None, single: float | None, tiers: float | None) -> str:
    """
    >>> closed_text(100.0, 150.0, 120.0), closed_text(100.0, 90.0, 80.0), closed_text(100.0, None, 120.0)
    ('60%', '-', '-')
    """
    if softmax is None or single is None or tiers is None or single <= softmax:
        return "-"
    return f"{(single - tiers) / (single - softmax):.0%}"


def tier_tests(title: str, group: Group) -> Table:
    softmax, rows = by_seed(group.results["softmax"], "perplexity"), []
    for loss in tiered_losses(group):
        tiers = by_seed(group.results[f"{loss}/tiered"], "perplexity")
        rows += [
            paired_row(f"{label_text(loss)}: tiers beat one rate", tiers, one_rate(group, loss), "perplexity"),
            paired_row(f"Log softmax beats {label_text(loss)} with tiers", softmax, tiers, "perplexity"),
        ]
    return Table(f"Do tiers close the gap to softmax? {title}", ["question", *CLAIM_HEADINGS[1:]], rows)


def equal_time_table(title: str, group: Group) -> Table:
    """What each loss has reached after the training time of the shortest run, interpolated between two validations; for runs
    that had the machine to themselves."""
    runs = [run for run in group.runs if run.history and run.alone]
    limit = min(sum(record["train_seconds"] for record in run.history) for run in runs)
    headings = ["loss function", "runs", f"perplexity after {limit:,.0f} s", "top-10 error %", "words in all", "seconds in all"]
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        mine = [run for run in runs if run.label == label]
        reached = [[v for run in mine if (v := at_time(run, metric, limit)) is not None] for metric in GAPS]
        words = max(run.settings.get("words") or run.data.get("train", 0) for run in mine)
        seconds = [sum(record["train_seconds"] for record in run.history) for run in mine]
        rows.append(
            [
                label_text(label),
                str(len(mine)),
                mean_text(reached[0], PERPLEXITY),
                mean_text(reached[1], Column("top10", "", percent=True)),
                f"{words:,}" if words else "-",
                f"{statistics.fmean(seconds):,.0f}",
            ]
        )
    return Table(f"{title}: on the validation set after the same training time", headings, rows)


def at_time(run: StoredRun, metric: str, limit: float) -> float | None:
    """The validation after ``limit`` seconds of training, interpolated between the validations before and after."""
    seconds, values = time_curve(run.history, metric)
    start = run.result.get("start", {}).get(metric)
    if start is not None:
        seconds, values = [0.0, *seconds], [start, *values]
    return float(np.interp(limit, seconds, values)) if seconds and seconds[0] <= limit else None
