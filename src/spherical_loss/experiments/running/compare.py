"""Train losses on a task and compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.files.locks import locked
from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.options import Compare, CompareHeads
from spherical_loss.experiments.results import paper
from spherical_loss.experiments.results.tables import (
    Results,
    by_label,
    claim_table,
    fitted,
    loss_of,
    result_table,
)
from spherical_loss.experiments.running.progress import make_display
from spherical_loss.experiments.running.train_all import train_all
from spherical_loss.experiments.running.workers import Workers, open_workers
from spherical_loss.experiments.table import markdown, show
from spherical_loss.experiments.training.distributed import on_first, ranks
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import (
    HeadName,
    LanguageSettings,
    Run,
    Settings,
    check,
    check_loss,
    no_head,
    resolved,
    with_threads,
)
from spherical_loss.experiments.training.tasks import open_values
from spherical_loss.experiments.tuning.tuned import tuned_in

Finished = list[tuple[Run, dict[str, Any]]]


def compare(options: Compare, console: Console) -> None:
    """``spherical-loss compare`` and ``reproduce``: train the runs, and show the tables."""
    settings = with_threads(options.settings, options.workers, options.cluster)
    heads = options.head if isinstance(options, CompareHeads) else ()
    seeds = range(options.seed, options.seed + options.runs)
    losses = list(dict.fromkeys(options.losses))
    runs = plan(options.task, losses, seeds, settings, options.quiet, heads, tuned_in(options.out))
    runs = [dataclasses.replace(run, ranks=ranks()) for run in runs]
    with open_workers(options.workers, options.cluster) as workers:
        finished = train_runs(runs, options.out, console, options.quiet, options.tensorboard, workers)
    table = paper.table_of(options.task, runs[0].settings)  # not ``settings``, which may leave the layers open
    file = getattr(settings, "file", None)
    title = options.title if file is None else f"{Path(file).name}: the next word"
    on_first(lambda: show_comparison(options.name, title, finished, table, options.out, console))


def plan(
    task: str,
    losses: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    quiet: bool = True,
    heads: Sequence[HeadName] = (),
    tuned: Path | None = None,
) -> list[Run]:
    """The runs to make: seed by seed, so that a comparison that is stopped half-way has equally many runs of each loss.

    With ``heads``, a run for each of them that the loss works with. ``tuned``: values that replace the shipped ones.
    """
    check(settings)
    each = {loss: with_heads(settings, loss, heads) for loss in losses}
    for loss in losses:
        check_loss(loss, each[loss][0])
    settings = RECIPES[task].prepare(settings, quiet)
    filled = {
        loss: [resolved(s, loss, open_values(task, loss, s, tuned)) for s in with_heads(settings, loss, heads)]
        for loss in losses
    }
    return [Run(task, loss, seed, s) for seed in seeds for loss in losses for s in filled[loss]]


def with_heads(settings: Settings, loss: str, heads: Sequence[HeadName]) -> list[Settings]:
    """The settings once for each of ``heads`` that the loss works with; as they are if there are none to choose from."""
    if not isinstance(settings, LanguageSettings) or not heads:
        return [settings]
    found: list[Settings] = [dataclasses.replace(settings, head=head) for head in heads if head in LOSSES[loss].heads]
    if not found:
        raise no_head(loss, heads)
    return found


def train_runs(
    runs: Sequence[Run],
    out: Path,
    console: Console,
    quiet: bool,
    tensorboard: bool = False,
    workers: Workers | None = None,
) -> Finished:
    """Train every run that is not finished yet; one that diverges is recorded as such, and the others continue."""
    several_heads = len({getattr(run.settings, "head", None) for run in runs}) > 1
    with make_display(console, len(runs), quiet, several_heads) as display:
        results = train_all(runs, out, display, tensorboard, workers)
    return [(run, results[run]) for run in runs]


def stored(runs: Sequence[Run], out: Path) -> Finished:
    """The runs among ``runs`` that are finished, without training any."""
    found = [(run, RunFolder(out, run).result()) for run in runs]
    return [(run, result) for run, result in found if result is not None]


def show_comparison(
    name: str, title: str, finished: Finished, table: paper.PaperTable | None, out: Path, console: Console
) -> None:
    """Print the tables, and write them (Markdown) and the learning curves to ``out/NAME``."""
    from spherical_loss.experiments.report.curves import draw_curves  # matplotlib takes a while to import
    from spherical_loss.experiments.report.time_curves import draw_time_curves

    draw = draw_time_curves if any(isinstance(run.settings, LanguageSettings) for run, _ in finished) else draw_curves
    results = by_label(finished)
    tables = [result_table(title, results, table)]
    if table is not None and (claims := relevant(table, results)):
        others = {name: elsewhere(name, finished, out) for name in {c.elsewhere for c in claims} if name is not None}
        tables.append(claim_table(f"The claims of table {table.number} on these runs", claims, results, others))
    for found in tables:
        show(fitted(found, console), console)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    histories = [(run, RunFolder(out, run).history()) for run, _ in finished]
    with locked(folder / "lock"):
        write_atomically(folder / "table.md", "\n".join(f"{markdown(found)}\n" for found in tables).encode())
        draw(folder / "curves.png", title, histories)
    if told := versions_text([(run, RunFolder(out, run).other_versions()) for run, _ in finished], out):
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    console.print(f"tables: {folder / 'table.md'}\nlearning curves: {folder / 'curves.png'}", highlight=False, soft_wrap=True)


def versions_text(runs: Sequence[tuple[Run, str]], out: Path) -> str:
    """Which runs were made with other versions; also for those who see no progress.

    >>> run = Run("digits", "taylor", 0, Settings(lr=0.1))
    >>> versions_text([(run, "torch 2.12.0 instead of 2.13.0"), (run, "")], Path("runs"))
    '1 of 2 runs was made with other versions (torch 2.12.0 instead of 2.13.0); to repeat it, choose another --out than runs'
    """
    others = [versions for _, versions in runs if versions]
    if not others:
        return ""
    was, it = ("was", "it") if len(others) == 1 else ("were", "them")
    different = "; ".join(dict.fromkeys(others))
    return (
        f"{len(others)} of {len(runs)} runs {was} made with other versions ({different}); to repeat {it}, choose another --out "
        f"than {out}"
    )


def relevant(table: paper.PaperTable, results: Results) -> list[paper.Claim]:
    """The claims about losses that were run."""
    losses = {loss_of(label) for label in results}
    return [claim for claim in table.claims if claim.better in losses and (claim.worse in losses or claim.elsewhere)]


def elsewhere(name: str, finished: Finished, out: Path) -> Results:
    """The stored runs of another table that differ from these in that table's settings alone."""
    other = paper.TABLES[name]
    runs = [dataclasses.replace(run, settings=dataclasses.replace(run.settings, **other.settings)) for run, _ in finished]
    return by_label(stored(runs, out))
