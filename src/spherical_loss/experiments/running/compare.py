"""Train losses side by side on a task, and say how they compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.files.locks import locked
from spherical_loss.experiments.results import paper
from spherical_loss.experiments.results.tables import (
    Results,
    claim_cells,
    collect,
    loss_of,
    markdown_table,
    result_cells,
    rich_table,
)
from spherical_loss.experiments.running.progress import make_reporter
from spherical_loss.experiments.running.train_all import train_all
from spherical_loss.experiments.running.workers import Workers
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import LanguageSettings, Run, Settings, check, check_loss, heads_of, resolved
from spherical_loss.experiments.training.tasks import open_values

Finished = list[tuple[Run, dict[str, Any]]]


def plan(task: str, losses: Sequence[str], seeds: Sequence[int], settings: Settings, quiet: bool = True) -> list[Run]:
    """The runs to make: seed by seed, so that a comparison stopped half-way has as many runs of each loss."""
    check(settings)
    for loss in losses:
        check_loss(loss, settings)
    settings = RECIPES[task].prepare(settings, quiet)
    filled = {
        loss: [resolved(each, loss, open_values(task, loss, each)) for each in each_head(settings, loss)] for loss in losses
    }
    return [Run(task, loss, seed, each) for seed in seeds for loss in losses for each in filled[loss]]


def each_head(settings: Settings, loss: str) -> list[Settings]:
    """The settings once for every head that they name and the loss works with."""
    if not isinstance(settings, LanguageSettings):
        return [settings]
    changes: list[dict[str, Any]] = [{"head": (head,)} for head in heads_of(loss, settings)]
    return [dataclasses.replace(settings, **change) for change in changes]


def execute(
    runs: Sequence[Run], out: Path, console: Console, quiet: bool, tensorboard: bool, workers: Workers | None = None
) -> Finished:
    """Train every run that is not finished yet; a diverging one is recorded, and the others go on."""
    with make_reporter(console, len(runs), quiet) as reporter:
        results = train_all(runs, out, reporter, tensorboard, workers)
    return [(run, results[run]) for run in runs]


def stored(runs: Sequence[Run], out: Path) -> Finished:
    """The runs among ``runs`` that are finished, without training any."""
    found = [(run, RunFolder(out, run).result()) for run in runs]
    return [(run, result) for run, result in found if result is not None]


def report(name: str, title: str, finished: Finished, table: paper.Table | None, out: Path, console: Console) -> None:
    """Print the tables, and write them (Markdown) and the learning curves to ``out/NAME``."""
    from spherical_loss.experiments.report.curves import draw_curves  # matplotlib takes a while to import
    from spherical_loss.experiments.report.time_curves import draw_time_curves

    draw = draw_time_curves if any(isinstance(run.settings, LanguageSettings) for run, _ in finished) else draw_curves
    results = collect(finished)
    parts = [(title, *result_cells(results, table))]
    if table is not None and (claims := relevant(table, results)):
        others = {name: elsewhere(name, finished, out) for name in {c.elsewhere for c in claims} if name is not None}
        parts.append((f"The claims of table {table.number} on these runs", *claim_cells(claims, results, others)))
    for part in parts:
        console.print(rich_table(console, *part))
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    histories = [(run, RunFolder(out, run).history()) for run, _ in finished]
    with locked(folder / "lock"):
        write_atomically(folder / "table.md", "\n".join(markdown_table(*part) for part in parts).encode())
        draw(folder / "curves.png", title, histories)
    console.print(f"tables: {folder / 'table.md'}\nlearning curves: {folder / 'curves.png'}", highlight=False, soft_wrap=True)


def relevant(table: paper.Table, results: Results) -> list[paper.Claim]:
    """The claims about losses that were run."""
    losses = {loss_of(label) for label in results}
    return [claim for claim in table.claims if claim.better in losses and (claim.worse in losses or claim.elsewhere)]


def elsewhere(name: str, finished: Finished, out: Path) -> Results:
    """The stored runs of another table that differ from these by that table's settings alone."""
    other = paper.TABLES[name]
    runs = [dataclasses.replace(run, settings=dataclasses.replace(run.settings, **other.settings)) for run, _ in finished]
    return collect(stored(runs, out))
