"""Tables made from stored runs, with the paper's figures beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console

from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.results.paper import Claim, Figure, PaperRow, PaperTable
from spherical_loss.experiments.results.significance import Comparison, interval, paired, unpaired
from spherical_loss.experiments.table import Table, width
from spherical_loss.experiments.training.settings import Run

Results = dict[str, dict[int, dict[str, Any]]]
"""Results of runs by label (the loss, and the head if it is not the dense one) and seed."""


@dataclass(frozen=True)
class Column:
    """A metric: its heading, how to print it, and whether it is a fraction to print in percent."""

    metric: str
    heading: str
    digits: int = 3
    percent: bool = False


COLUMNS = (
    Column("loss", "loss"),
    Column("nll", "neg. log-lik."),
    Column("error", "error %", percent=True),
    Column("perplexity", "perplexity", digits=4),
    Column("measured", "on words", digits=6),
    Column("start", "valid. perplexity at start", digits=4),
    Column("valid", "valid. perplexity", digits=4),
    Column("top5", "top-5 error %", percent=True),
    Column("top10", "top-10 error %", percent=True),
    Column("ranked", "of words", digits=6),
    Column("simlex_input", "SimLex in"),
    Column("simlex_output", "SimLex out"),
    Column("simlex_pairs", "pairs"),
    Column("calibration", "calibration %", percent=True),
    Column("epochs", "epochs"),
    Column("to_best", "s to best"),
    Column("seconds", "s / epoch"),
)


def by_label(runs: Sequence[tuple[Run, dict[str, Any]]]) -> Results:
    """Results by label and seed."""
    results: Results = {}
    for run, result in runs:
        results.setdefault(run.label, {})[run.seed] = result
    return results


def loss_of(label: str) -> str:
    return label.partition("/")[0]


def label_text(label: str) -> str:
    """
    >>> label_text("taylor"), label_text("taylor/gram")
    ('Log Taylor softmax', 'Log Taylor softmax, gram head')
    """
    loss, _, head = label.partition("/")
    title = LOSSES[loss].title if loss in LOSSES else loss  # this version may not have the loss of a stored run
    return title + (f", {head} head" if head else "")


EXACT_HEADS = ("gram", "factored", "tiered")


def of_loss(results: Results, loss: str) -> dict[int, dict[str, Any]]:
    """The results of a loss with the first exact head that has any; the other heads are approximations, or different models."""
    exact = [loss, *(f"{loss}/{head}" for head in EXACT_HEADS)]
    return next((runs for label, runs in results.items() if label in exact), {})


def value(result: dict[str, Any], metric: str) -> float | None:
    """A number of a finished run: ``epochs`` to the best validation; ``to_best`` and ``seconds`` (per epoch), if the run had
    the machine to itself; the perplexities ``start`` and ``valid`` of the validation set before training and at its best;
    or a test metric."""
    if result["status"] != "finished":
        return None
    if metric == "epochs":
        return float(result["best_epoch"])
    if metric in ("seconds", "to_best"):
        name = "seconds_per_epoch" if metric == "seconds" else "seconds_to_best"
        return result.get(name) if result.get("alone") else None
    if metric in ("start", "valid"):
        return result[metric]["perplexity"] if "start" in result else None
    return result["test"].get(metric)


def by_seed(results: dict[int, dict[str, Any]], metric: str) -> dict[int, float]:
    """The metric of every run that has it."""
    found = {seed: value(result, metric) for seed, result in results.items()}
    return {seed: x for seed, x in found.items() if x is not None}


def significant(x: float, digits: int) -> str:
    """``x`` with this many significant digits, or, if it is large, with all digits before the point.

    >>> significant(0.0123456, 3), significant(12543.2, 3)
    ('0.0123', '12,543')
    """
    return f"{x:.{digits}g}" if abs(x) < 10**digits else f"{x:,.0f}"


def mean_text(values: Sequence[float], column: Column) -> str:
    """Mean (standard deviation), as in the paper; the deviation needs two runs.

    >>> mean_text([0.008, 0.010], Column("error", "error %", percent=True))
    '0.9 (0.141)'
    """
    if not values:
        return "-"
    factor = 100 if column.percent else 1
    mean = significant(factor * statistics.fmean(values), column.digits)
    return mean if len(values) < 2 else f"{mean} ({factor * statistics.stdev(values):.{column.digits}g})"


def interval_text(values: Sequence[float], column: Column) -> str:
    bounds = interval(values)
    if bounds is None:
        return "-"
    factor = 100 if column.percent else 1
    return " to ".join(significant(factor * x, column.digits) for x in bounds)


def figure_text(figure: Figure | None, column: Column) -> str:
    """A figure of the paper, printed like ours."""
    if figure is None:
        return "-"
    factor = 100 if column.percent else 1
    text = significant(factor * figure.mean, column.digits)
    return text if figure.deviation is None else f"{text} ({factor * figure.deviation:.3g})"


INTERVALS = ("nll", "error", "perplexity", "top10")
"""The metrics that have a confidence interval in a table."""
BESIDE = ("paper", "95% interval")
"""Headings of the columns that belong to the metric before them."""


def result_table(title: str, results: Results, paper: PaperTable | None) -> Table:
    """A row per loss: each metric with the paper's figure, if it has one, and its confidence interval.
    Columns without a number are left out."""
    headings = ["loss function", "runs"]
    paper_rows = [] if paper is None else list(paper.rows.values())
    in_paper = {field.name for field in fields(PaperRow) if any(getattr(row, field.name) is not None for row in paper_rows)}
    columns = [c for c in COLUMNS if c.metric in in_paper or any(by_seed(runs, c.metric) for runs in results.values())]
    for column in columns:
        headings.append(column.heading)
        if column.metric in in_paper:
            headings.append("paper")
        if column.metric in INTERVALS:
            headings.append("95% interval")
    rows = []
    for label, runs in results.items():
        finished = sum(result["status"] == "finished" for result in runs.values())
        diverged = sum(result["status"] == "diverged" for result in runs.values())
        row = [label_text(label), str(finished) + (f" (+ {diverged} diverged)" if diverged else "")]
        figures = paper.rows.get(loss_of(label), PaperRow()) if paper is not None else PaperRow()
        for column in columns:
            values = list(by_seed(runs, column.metric).values())
            row.append(mean_text(values, column))
            if column.metric in in_paper:
                row.append(figure_text(getattr(figures, column.metric), column))
            if column.metric in INTERVALS:
                row.append(interval_text(values, column))
        rows.append(row)
    return Table(title, headings, rows)


def sides(claim: Claim, results: Results, elsewhere: Results | None) -> tuple[dict[int, float], dict[int, float]]:
    """The values that the claim compares, by seed: of the better loss and of the worse one, which may be ``elsewhere``."""
    others = results if claim.elsewhere is None else elsewhere or {}
    return by_seed(of_loss(results, claim.better), claim.metric), by_seed(of_loss(others, claim.worse), claim.metric)


def compared_runs(claim: Claim, results: Results, elsewhere: Results | None) -> int:
    """How many runs each side of the claim has; within one table, pairs of the same seed."""
    better, worse = sides(claim, results, elsewhere)
    return len(better.keys() & worse.keys()) if claim.elsewhere is None else min(len(better), len(worse))


def claim_row(claim: Claim, results: Results, elsewhere: Results | None = None) -> list[str]:
    """Test the claim on our runs; ``elsewhere`` are those of another table, if the claim compares with it."""
    better, worse = sides(claim, results, elsewhere)
    if claim.elsewhere is None:
        return paired_row(claim.text, better, worse, claim.metric)
    found = unpaired(list(better.values()), list(worse.values()))
    return undecided_row(claim.text) if found is None else comparison_row(claim.text, found, claim.metric)


def paired_row(text: str, better: dict[int, float], worse: dict[int, float], metric: str) -> list[str]:
    """Test a claim on pairs of runs; for a single pair, give the difference alone."""
    if (found := paired(better, worse)) is not None:
        return comparison_row(text, found, metric)
    seeds = better.keys() & worse.keys()
    differences = [difference_text(worse[seed] - better[seed], metric) for seed in seeds]
    return undecided_row(text, differences[0] if differences else "-", str(len(seeds)))


def undecided_row(text: str, difference: str = "-", n: str = "-", why: str = "two runs of each are needed") -> list[str]:
    return [text, verdict(None), difference, "-", "-", why, n]


def verdict(found: Comparison | None) -> str:
    """Confirmed or contradicted if the 95% interval of the difference lies on that side of zero; otherwise undecided.

    Single runs decide nothing.

    >>> low, high = {0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.01}
    >>> verdict(None), verdict(paired(low, high)), verdict(paired(high, low))
    ('undecided', 'confirmed', 'contradicted')
    """
    return "undecided" if found is None or 0.025 <= found.p <= 0.975 else "confirmed" if found.p < 0.025 else "contradicted"


CLAIM_HEADINGS = ["claim of the paper", "here", "mean difference", "95% interval", "p (one-sided)", "test", "n"]


def claim_table(title: str, claims: Sequence[Claim], results: Results, others: dict[str, Results]) -> Table:
    """A row per claim of the paper, tested on our runs."""
    rows = [claim_row(claim, results, others.get(claim.elsewhere or "")) for claim in claims]
    return Table(title, CLAIM_HEADINGS, rows)


def difference_text(x: float, metric: str) -> str:
    return f"{100 * x:.3g} %" if metric in ("error", "top5", "top10") else significant(x, 3)


def comparison_row(text: str, found: Comparison, metric: str) -> list[str]:
    numbers = [difference_text(x, metric) for x in (found.difference, found.low, found.high)]
    return [text, verdict(found), numbers[0], f"{numbers[1]} to {numbers[2]}", f"{found.p:.3g}", found.test, str(found.n)]


DROPPED_FIRST = (
    "calibration %",
    "top-5 error %",
    "test",
    "on words",
    "of words",
    "pairs",
    "neg. log-lik.",
    "valid. perplexity at start",
    "valid. perplexity",
    "s to best",
    "SimLex out",
    "SimLex in",
    "s / epoch",
    "loss",
    "95% interval",
    "epochs",
)
"""The columns that a narrow table leaves out, the first ones first."""
DROPPED_LAST = {"perplexity": ("error %", "top-10 error %", "runs"), "error %": ("runs",)}


def fitted(table: Table, console: Console) -> Table:
    """The table, without the columns that do not fit a narrow console (``DROPPED_FIRST``)."""
    main = next((heading for heading in DROPPED_LAST if heading in table.header), "")
    order = (*DROPPED_FIRST, *DROPPED_LAST.get(main, ()))
    dropped = next((heading for heading in order if heading in table.header), None)
    if dropped is None or width(table, console) <= console.width:
        return table
    return fitted(table.select(without(table.header, dropped)), console)


def without(headings: Sequence[str], dropped: str) -> list[int]:
    """The indices of the columns that remain without ``dropped`` and the columns that belong to it.

    >>> without(["loss", "paper", "error %", "paper", "95% interval"], "loss")
    [2, 3, 4]
    >>> without(["loss", "paper", "error %", "paper", "95% interval"], "95% interval")
    [0, 1, 2, 3]
    """
    keep, beside = [], False
    for i, heading in enumerate(headings):
        beside = heading == dropped or (beside and heading in BESIDE)
        if not beside:
            keep.append(i)
    return keep
