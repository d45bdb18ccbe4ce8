"""The summary for the README: one row for every table of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from spherical_loss.experiments.report.claims import claim_rows, tested, verdict_counts
from spherical_loss.experiments.results.paper import TABLES, Claim, PaperRow
from spherical_loss.experiments.results.selection import table_group, table_groups
from spherical_loss.experiments.results.store import StoredRun
from spherical_loss.experiments.results.tables import COLUMNS, Column, by_seed, figure_text, mean_text, of_loss
from spherical_loss.experiments.table import Table, markdown

SUMMARIZED = {"softmax": "softmax", "taylor": "Taylor softmax", "spherical": "spherical softmax"}
"""The losses of the README's summary, and what they are called there."""


def summary(runs: Sequence[StoredRun], missing: dict[str, str]) -> str:
    """A Markdown table: softmax, Taylor and spherical softmax in every table of the paper, with our figure and the paper's, and
    whether the paper's order of the first two is confirmed."""
    rows = []
    for name, table in TABLES.items():
        column = next(column for column in COLUMNS if column.metric == table.main_metric)
        groups = table_groups(name, runs)
        results = table_group(groups).results if groups else {}
        claim = next(c for c in table.claims if {c.better, c.worse} == {"softmax", "taylor"} and c.metric == column.metric)
        order = f"{SUMMARIZED[claim.better]} before {SUMMARIZED[claim.worse]}: "
        cells = [beside(of_loss(results, loss), table.rows.get(loss), column) for loss in SUMMARIZED]
        verdict = order + tested_text(claim, name, runs) if groups else missing.get(table.task, "no runs yet")
        rows.append([f"{table.number} `{name}`", column.heading, *cells, verdict])
    headings = ["table", "ours (the paper's)", *SUMMARIZED.values(), "the paper's order, here"]
    counts = f"{verdict_counts(claim_rows(runs, missing))}."
    return f"{markdown(Table('The tables of the paper', headings, rows))}\n\n{counts}"


def beside(results: dict[int, dict[str, Any]], row: PaperRow | None, column: Column) -> str:
    """Our figure, and the paper's in brackets."""
    values = list(by_seed(results, column.metric).values())
    figure = getattr(row, column.metric) if row else None
    paper = figure_text(None if figure is None else figure._replace(deviation=None), column)
    ours = mean_text([statistics.fmean(values)] if values else [], column)
    return "-" if (ours, paper) == ("-", "-") else f"{ours} ({paper})"


def tested_text(claim: Claim, name: str, runs: Sequence[StoredRun]) -> str:
    """A verdict; if it was tested, with the p value, the number of pairs of runs, and their epochs."""
    row, epochs = tested(claim, name, runs) or ([], "")
    return f"{row[1]} (p = {row[4]}, n = {row[6]}, {epochs} epochs)" if row[4] != "-" else row[1]
