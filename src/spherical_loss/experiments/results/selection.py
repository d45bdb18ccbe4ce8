"""Which runs of the store belong together in a table, and how they differ from what the paper did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from spherical_loss.experiments.report.curves import Histories
from spherical_loss.experiments.results.paper import TABLES, PaperTable, table_of
from spherical_loss.experiments.results.store import StoredRun
from spherical_loss.experiments.results.tables import Results
from spherical_loss.experiments.training.tasks import TASKS

OF_THE_LOSS = {"lr", "eps", "a", "b", "xi", "embedding_std", "embedding_rate", "output_rate", "tier_power", "head"}
"""The settings that each loss may have its own value of."""
OF_THE_LANGUAGE_MODEL = {"layers", "width", "normalize", "epochs"}
"""The same, where each loss has the language model that suits it best."""
INCIDENTAL = {"device", "threads"}
COMPARED = {
    "epochs": "at most {} epochs",
    "patience": "patience {}",
    "halve_after": "rate halved after {}",
    "decay": "{} decay of the rate",
    "batch_size": "batches of {}",
    "momentum": "momentum {}",
    "weight_decay": "weight decay {}",
    "monitor": "stopped by {}",
    "activation": "{} activations",
    "width": "width {}",
    "layers": "{} hidden layers",
    "normalize": "{} normalization of the hidden vectors",
    "context": "contexts of {}",
    "embedding": "embeddings of {}",
    "vocabulary": "vocabulary {}",
    "online": "online: {}",
}
"""The settings that are compared with the paper's, and their text in a table."""


@dataclass(frozen=True)
class Group:
    """Runs under the same conditions (:func:`group_of`), or the runs that a table shows, where conditions may
    differ between losses (:func:`table_group`). The runs of one label differ in the seed alone."""

    runs: list[StoredRun]
    left_out: list[StoredRun]
    """Runs of the same labels with other values of ``OF_THE_LOSS`` (learning rates, for example)."""

    @property
    def results(self) -> Results:
        found: Results = {}
        for run in self.runs:
            found.setdefault(run.label, {})[run.seed] = run.result
        return found

    @property
    def histories(self) -> Histories:
        return [(run, run.history) for run in self.runs]

    @property
    def conditions(self) -> dict[str, Any]:
        return conditions(self.runs[0])

    def first(self, label: str) -> StoredRun:
        return next(run for run in self.runs if run.label == label)


def conditions(run: StoredRun) -> dict[str, Any]:
    """The settings that the runs of a comparison share. Language models have the architecture and the number of epochs that
    suit the loss best, so these may differ."""
    own = OF_THE_LOSS | INCIDENTAL | (OF_THE_LANGUAGE_MODEL if "vocabulary" in run.settings else set())
    return {"task": run.task, **{key: value for key, value in run.settings.items() if key not in own}}


def grouped(runs: Sequence[StoredRun], but: Sequence[str] = ()) -> list[list[StoredRun]]:
    """The runs grouped by their conditions, without those named in ``but``, which may differ."""
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        key = json.dumps({k: v for k, v in conditions(run).items() if k not in but}, sort_keys=True)
        found.setdefault(key, []).append(run)
    return list(found.values())


def group_of(runs: Sequence[StoredRun]) -> Group:
    """For each label, the settings with the most runs; among equals, those with the best validation."""
    chosen, left_out = [], []
    for label in dict.fromkeys(run.label for run in runs):
        variants: dict[str, list[StoredRun]] = {}
        for run in runs:
            if run.label == label:
                variants.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
        best = min(variants, key=lambda key: (-finished(variants[key]), validation(variants[key]), key))
        chosen += variants.pop(best)
        left_out += [run for others in variants.values() for run in others]
    return ordered(chosen, left_out)


def ordered(runs: Sequence[StoredRun], left_out: list[StoredRun]) -> Group:
    """The runs in the order of the task's losses."""
    losses = list(TASKS[runs[0].task].losses) if runs[0].task in TASKS else []
    place = {loss: i for i, loss in enumerate(losses)}
    return Group(sorted(runs, key=lambda run: (place.get(run.loss, len(place)), run.label, run.seed)), left_out)


def finished(runs: Sequence[StoredRun]) -> int:
    return sum(run.finished for run in runs)


def validation(runs: Sequence[StoredRun]) -> float:
    """The mean of the validation metric of the runs; infinite if none is finished."""
    values = []
    for run in (run for run in runs if run.finished):
        value = run.result["valid"].get(run.settings["monitor"])
        values.append(run.result["valid"]["loss"] if value is None else value)
    return sum(values) / len(values) if values else float("inf")


def trained(run: StoredRun) -> float:
    """How long a run was trained: in epochs, or for a text, which may be a part of the paper's, in words."""
    if not run.finished:
        return 0.0
    if "vocabulary" not in run.settings:
        return float(run.result["epochs"])
    words = run.data.get("train") or run.settings.get("words") or 0
    return float(words if run.settings.get("online") else words * run.result["epochs"])


def table_groups(name: str, runs: Sequence[StoredRun]) -> list[Group]:
    """The runs that belong to a table of the paper, grouped by their conditions. Groups are sorted by how long they were
    trained; then by how little they differ from the paper; then by how many of its losses they have; then by their size."""
    table = TABLES[name]
    mine = [run for run in runs if table_of(run.task, SimpleNamespace(**run.settings)) is table and has_relu(run)]
    groups = [group_of(part) for part in grouped(mine)]

    def rank(group: Group) -> tuple[float, int, int, int]:
        covered = {run.loss for run in group.runs if run.finished} & set(table.losses)
        different = max(len(differences(run, table)) for run in group.runs)
        return -max(trained(run) for run in group.runs), different, -len(covered), -finished(group.runs)

    return sorted(groups, key=rank)


def has_relu(run: StoredRun) -> bool:
    """Whether the network has the activation of the paper's tables; other activations are a separate experiment."""
    return run.settings.get("activation", "relu") == "relu"


def table_group(groups: Sequence[Group]) -> Group:
    """The runs that a table shows: for each loss, those of the first group in which one is finished."""
    chosen: dict[str, Group] = {}
    for group in groups:
        for loss in {run.loss for run in group.runs if run.finished}:
            chosen.setdefault(loss, group)
    for group in groups:  # for losses of which all runs diverged
        for run in group.runs:
            chosen.setdefault(run.loss, group)
    parts = [[run for run in runs if chosen[run.loss] is group] for group in groups for runs in (group.runs, group.left_out)]
    return ordered([run for part in parts[::2] for run in part], [run for part in parts[1::2] for run in part])


def counterpart(group: Group, table: PaperTable, other: str, runs: Sequence[StoredRun]) -> Results:
    """The runs of another table that differ from ``group`` in the tables' settings alone."""
    free = {*table.settings, *TABLES[other].settings}
    wanted = {key: value for key, value in group.conditions.items() if key not in free}
    for candidate in table_groups(other, runs):
        if {key: value for key, value in candidate.conditions.items() if key not in free} == wanted:
            return candidate.results
    return {}


def paper_settings(table: PaperTable, loss: str) -> dict[str, Any]:
    """The settings of ``reproduce``: the paper's, where the paper gives them."""
    task = TASKS[table.task]
    return {**dataclasses.asdict(task.settings), **task.values.get(loss, {}), **table.settings}


def differences(run: StoredRun, table: PaperTable) -> list[str]:
    """How a run differs from the paper, in words."""
    paper = paper_settings(table, run.loss)
    unused = {"width"} if run.settings.get("layers") == 0 else set()
    unused |= {"epochs", "patience"} if run.settings.get("online") else set()  # where epochs are the pieces of one pass
    used = run.settings.keys() - unused
    found = [
        text.format(readable(run.settings[key])) + ("" if paper.get(key) is None else f" instead of {readable(paper[key])}")
        for key, text in COMPARED.items()
        if key in used and run.settings[key] != paper.get(key)
    ]
    if table.words is not None:
        found.append(words_of(run, table.words))
    elif run.settings.get("words") is not None:
        found.append(f"the first {run.settings['words']:,} words")
    return found


def words_of(run: StoredRun, words: int) -> str:
    return f"{run.data['train']:,} words of {words:,}" if run.data else f"an unknown number of words instead of {words:,}"


def readable(value: Any) -> str:
    """
    >>> readable(800_000_000), readable(0.9), readable("relu")
    ('800,000,000', '0.9', 'relu')
    """
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def scaled_down(group: Group, label: str, table: PaperTable) -> str:
    """What was smaller than in the paper, or different: runs and settings."""
    run = group.first(label)
    count = finished([r for r in group.runs if r.label == label])
    fewer = [f"{count} of {table.runs} runs"] if count < table.runs else []
    return "; ".join([*fewer, *differences(run, table)]) or "nothing"
