"""Quality for time: the language model on the IMDB reviews at its full vocabulary, every contender for the same time.

The runs are stored with the other results, for ``spherical-loss report``.
Needs the data of the task ``imdb``; without them this part is left out, and says so.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.timing import RESULTS, interleaved, show
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.models.loss_names import make_loss
from spherical_loss.experiments.report.time_curves import draw_time_curves, time_curve
from spherical_loss.experiments.results.collect import collect
from spherical_loss.experiments.running import compare
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import LanguageSettings, Run
from spherical_loss.experiments.training.tasks import TASKS

CONTENDERS = [  # loss and head
    ("softmax", "dense"),
    ("softmax", "sampled"),
    ("softmax", "adaptive"),
    ("taylor", "factored"),
    ("spherical", "factored"),
    ("z", "factored"),
]
SIZE: dict[str, Any] = {"vocabulary": "full", "layers": 1, "width": 300, "embedding": 100}
SECONDS = 60.0  # of training
PIECES = 4  # validations on the way


def planned(loss: str, head: str, words: int | None) -> Run:
    changes: dict[str, Any] = {"head": head, "words": words, "epochs": PIECES, **SIZE}
    settings = dataclasses.replace(TASKS["imdb"].settings, **changes)
    return compare.plan("imdb", [loss], [0], settings)[0]


def seconds_per_step(run: Run) -> float:
    """The median of some training steps from the start."""
    recipe, settings = RECIPES[run.task], run.settings
    assert isinstance(settings, LanguageSettings)
    train, _, _ = recipe.load(settings, run.seed)
    loss = make_loss(run.loss, run.loss_options)
    network = recipe.network(settings, train, loss)
    optimizer = recipe.optimizer(network, settings)
    batches = iter(train.order(0, torch.Generator()).split(settings.batch_size))

    def step() -> None:
        optimizer.zero_grad()
        network.objective(*train.batch(next(batches)), loss).backward()
        optimizer.step()

    return interleaved({"step": step}, repeats=8, warmup=4)["step"].spread.median


def run(results: Path = RESULTS, seconds: float = SECONDS) -> list[dict[str, Any]]:
    try:
        paces = {pair: seconds_per_step(planned(*pair, words=None)) for pair in CONTENDERS}
    except UserError as error:
        print(f"\nQuality for time: left out; {error}")
        return []
    rows, table, histories = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for (loss, head), pace in paces.items():
            each = planned(loss, head, words=int(seconds / pace) * TASKS["imdb"].settings.batch_size)
            compare.train_runs([each], Path(folder), Console(), quiet=True)
            history = RunFolder(Path(folder), each).history()
            histories.append((each, history))
            for metric in ("perplexity", "top10"):
                times, values = time_curve(history, metric)
                rows.append({"loss": loss, "head": head, "metric": metric, "seconds": times, "values": values, "step": pace})
            last = history[-1]["valid"]
            perplexity = "" if last["perplexity"] is None else f"{last['perplexity']:,.0f}"
            words = f"{getattr(each.settings, 'words', 0):,}"
            table.append([f"{loss}, {head}", f"{1e3 * pace:.1f} ms", words, perplexity, f"{last['top10']:.1%}"])
        collect(Path(folder), results, trials=False, say=print)
    title = f"Quality for time: imdb, 115,517 words and two marks, {seconds:g} s of training each"
    show(title, ["", "step", "words seen", "validation perplexity", "top-10 error"], table)
    draw_time_curves(results / "quality_time.svg", title, histories)
    print(f"  picture: {results / 'quality_time.svg'}")
    return rows
