"""The claims of the paper, tested on the stored runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spherical_loss.experiments.report import questions
from spherical_loss.experiments.results.paper import TABLES, Claim
from spherical_loss.experiments.results.selection import counterpart, table_groups
from spherical_loss.experiments.results.store import StoredRun
from spherical_loss.experiments.results.tables import claim_row, compared_runs, undecided_row
from spherical_loss.experiments.table import VERDICTS


def claim_rows(runs: Sequence[StoredRun], missing: dict[str, str]) -> list[list[str]]:
    """A row per claim of the paper: the number of its table, what :func:`comparison_row` gives, and the epochs of the runs."""
    found = []
    for name, table in TABLES.items():
        for claim in table.claims:
            untested = undecided_row(claim.text, why=missing.get(table.task, "no runs yet")), "-"
            row, epochs = tested(claim, name, runs) or untested
            found.append([row[0], str(table.number), *row[1:], epochs])
    if (bounds := questions.bound_group(runs)) is not None:
        found += [[row[0], "text", *row[1:], epochs_text(bounds.runs)] for row in questions.bounds_claims(bounds).rows]
    return found


def tested(claim: Claim, name: str, runs: Sequence[StoredRun]) -> tuple[list[str], str] | None:
    """Test the claim on the longest runs under the same conditions of which there are two pairs, or else one; None if the table
    has no runs."""
    candidates = []
    for group in table_groups(name, runs):
        elsewhere = counterpart(group, TABLES[name], claim.elsewhere, runs) if claim.elsewhere else None
        candidates.append((group, elsewhere, min(2, compared_runs(claim, group.results, elsewhere))))
    if not candidates:
        return None
    group, elsewhere, count = max(candidates, key=lambda candidate: candidate[2])  # of several, the first, which is the longest
    mine = [run for run in group.runs if run.loss in (claim.better, claim.worse)]
    return claim_row(claim, group.results, elsewhere), epochs_text(mine) if count else "-"


def epochs_text(runs: Sequence[StoredRun]) -> str:
    """How many epochs the runs were trained for, such as ``4`` or ``12 to 31``."""
    epochs = sorted({run.result["epochs"] for run in runs if run.finished})
    return "-" if not epochs else str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"


def verdict_counts(rows: Sequence[Sequence[str]]) -> str:
    counts = Counter(row[2] for row in rows)
    return f"Of {len(rows)} claims of the paper, " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
