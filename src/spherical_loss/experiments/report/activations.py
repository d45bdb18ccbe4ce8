"""Hidden activations other than ReLU, which the paper's discussion tries: a softmax in the last hidden layer, and truncated
exponentials with batch normalization."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from spherical_loss.experiments.results.selection import group_of, grouped, has_relu
from spherical_loss.experiments.results.store import StoredRun
from spherical_loss.experiments.results.tables import COLUMNS, by_seed, difference_text, label_text, mean_text
from spherical_loss.experiments.table import Table

NAMES = {"softmax": "softmax in the last hidden layer", "exp": "truncated exponentials"}


def families(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """The finished runs under the same conditions but for the activation, where it is not always a ReLU."""
    parts = grouped([run for run in runs if run.finished], but=["activation"])
    return [part for part in parts if not all(has_relu(run) for run in part)]


def activation_table(title: str, family: Sequence[StoredRun]) -> Table:
    """A row for each loss and activation: the main metric, and how much more it is than with ReLUs, seeds paired."""
    metric = "perplexity" if "vocabulary" in family[0].settings else "error"
    column = next(column for column in COLUMNS if column.metric == metric)
    relu = group_of(with_relu).results if (with_relu := [run for run in family if has_relu(run)]) else {}
    rows = []
    for kind, text in NAMES.items():
        if mine := [run for run in family if run.settings.get("activation") == kind]:
            for label, results in group_of(mine).results.items():
                values, theirs = by_seed(results, metric), by_seed(relu.get(label, {}), metric)
                differences = [values[seed] - theirs[seed] for seed in values.keys() & theirs.keys()]
                more = difference_text(statistics.fmean(differences), metric) if differences else "-"
                rows.append([label_text(label), text, str(len(values)), mean_text(list(values.values()), column), more])
    heading = f"more than with ReLUs, {column.heading}"
    return Table(title, ["loss function", "hidden activation", "runs", column.heading, heading], rows)
