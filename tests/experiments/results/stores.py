"""Small stores of results, made up: every number follows from the arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from spherical_loss.experiments.results.store import StoredRun, Study, add_runs, add_studies, run_of
from spherical_loss.experiments.training.settings import ImageSettings, LanguageSettings, Run

ENVIRONMENT = {
    "python": "3.11.7",
    "versions": {"spherical-loss": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    "machine": "x86_64",
    "cpu_capability": "AVX2",
    "threads": 1,
}


def image_line(
    loss: str, seed: int, error: float, *, task: str = "mnist", epochs: int = 3, lr: float = 0.01, **settings: Any
) -> dict[str, Any]:
    """A run whose validation error falls to ``error`` in the last epoch."""
    run = Run(task, loss, seed, ImageSettings(lr=lr, epochs=epochs, **{"width": 30, **settings}))
    curve = [error * (epochs - k) for k in range(epochs)]
    return line_of(run, [metrics(error=e) for e in curve], metrics(error=error))


def text_line(
    loss: str,
    seed: int,
    perplexity: float | None,
    *,
    task: str = "ptb",
    seconds: float = 10.0,
    D: int = 10_000,
    **settings: Any,
) -> dict[str, Any]:
    """A run of two epochs, whose perplexity falls to ``perplexity`` (None: a loss without one) from 1.5 times that."""
    defaults = {"lr": 0.3, "layers": 2, "width": 809, "batch_size": 250, "momentum": 0.0, "monitor": "nll", "halve_after": 1}
    defaults |= {"epochs": 20, "patience": 5, "output_rate": 3.0}
    run = Run(task, loss, seed, LanguageSettings(**{**defaults, **settings}))
    curve = [None, None] if perplexity is None else [1.5 * perplexity, perplexity]
    valid = [metrics(error=0.7, perplexity=p, top10=0.4 + 0.1 / k) for k, p in enumerate(curve, 1)]
    line = line_of(run, valid, metrics(error=0.7, perplexity=perplexity, top10=0.45), seconds)
    line["result"]["start"] = metrics(error=0.9, perplexity=700.0, top10=0.8)
    return {**line, "data": {"train": 929_589, "valid": 73_760, "test": 82_430, "D": D}}


def metrics(error: float, perplexity: float | None = None, top10: float | None = None) -> dict[str, float | None]:
    found: dict[str, float | None] = {"loss": 10 * error, "nll": 10 * error, "error": error}
    return found if top10 is None else {**found, "perplexity": perplexity, "top10": top10}


def line_of(run: Run, valid: list[dict[str, Any]], test: dict[str, Any], seconds: float = 1.0) -> dict[str, Any]:
    n = len(valid)
    history = {
        "epoch": list(range(1, n + 1)),
        "lr": [run.settings.lr] * n,
        "train_loss": [1.0] * n,
        "valid": {key: [record[key] for record in valid] for key in valid[0]},
        "train_seconds": [seconds] * n,
        "seconds": [seconds + 1] * n,
    }
    result = {
        "status": "finished",
        "best_epoch": n,
        "epochs": n,
        "seconds_per_epoch": seconds + 1,
        "seconds_to_best": n * (seconds + 1),
        "alone": True,
        "valid": valid[-1],
        "test": test,
    }
    return {"name": run.name, "run": as_json(run), "environment": ENVIRONMENT, "result": result, "history": history}


def diverged_line(loss: str, seed: int, *, task: str = "mnist", **settings: Any) -> dict[str, Any]:
    run = Run(task, loss, seed, ImageSettings(lr=3.0, epochs=3, width=30, **settings))
    result = {"status": "diverged", "epoch": 1, "reason": "the training loss is nan at step 7 of epoch 1"}
    return {"name": run.name, "run": as_json(run), "environment": ENVIRONMENT, "result": result, "history": {}}


def as_json(run: Run) -> dict[str, Any]:
    return json.loads(json.dumps(run.as_dict()))


def study(task: str, loss: str, values: dict[float, float | None]) -> Study:
    """``values`` are the validations by learning rate."""
    trials = [{"number": i, "values": {"lr": lr}, "value": value} for i, (lr, value) in enumerate(values.items())]
    return Study(f"{task}-{loss}-0123456789", task, loss, "error", {"epochs": 1}, trials)


def with_pruned(study: Study) -> Study:
    """The study and one more trial, which was pruned."""
    trials = [*study.trials, {"number": len(study.trials), "values": {"lr": 0.3}, "value": 0.05, "pruned": 3}]
    return dataclasses.replace(study, trials=trials)


def full_store(folder: Path) -> Path:
    """Something for every section of the report."""
    lines = [
        image_line(loss, seed, e + 1e-5 * seed * (k - 2) + 1e-4 * seed)
        for k, (loss, e) in enumerate(FIRST.items())
        for seed in range(3)
    ]
    lines += [
        image_line(loss, seed, 0.8 * FIRST[loss] + 1e-4 * seed, split="official")
        for loss in ("softmax", "taylor")
        for seed in range(3)
    ]
    lines += [diverged_line("mse", 7), image_line("taylor", 0, 0.02, epochs=2), image_line("taylor", 0, 0.03, lr=0.5)]
    lines += [
        image_line(loss, 0, e, task="cifar10", width=16, weight_decay=2e-3) for loss, e in (("softmax", 0.2), ("taylor", 0.19))
    ]
    lines += [image_line(loss, seed, 0.05, task="digits", width=64) for loss in ("softmax", "z") for seed in range(2)]
    lines += [text_line("softmax", 0, 127.0), text_line("taylor", 0, 150.0, head="gram"), text_line("z", 0, None)]
    for layers in (0, 1, 2):
        common = {"task": "one-billion-word", "layers": layers, "width": 500, "online": True, "epochs": 10, "patience": 10}
        lines += [text_line(loss, 0, 100.0 - 10 * layers, **common) for loss in ("softmax", "taylor")]
    for D in (100, 1000, 10_000, 100_000):
        for loss, factor in (("softmax", 1.0), ("taylor", 1 + D**0.3 / 40), ("spherical", 1 + D**0.3 / 30)):
            lines += [
                text_line(loss, s, factor * D**0.5 * (1 + 0.01 * s), task="imdb", vocabulary=D, words=10**6, D=D)
                for s in (0, 1)
            ]
    for loss, seconds in (("taylor", 10.0), ("z", 9.0), ("sampled", 12.0), ("adaptive", 30.0)):
        head = "factored" if loss in ("taylor", "z") else "dense"
        value = None if loss == "z" else 200 + seconds
        lines.append(text_line(loss, 0, value, task="imdb", vocabulary="full", seconds=seconds, head=head, D=115_517))
    for loss, end in (("softmax", 150.0), ("bound", 900.0), ("bound-fixed", 1200.0)):
        lines += [text_line(loss, seed, end + 10 * seed, task="bounds") for seed in (0, 1)]
    add_runs(folder, lines)
    add_studies(
        folder,
        [
            with_pruned(study("mnist", "softmax", {0.001: 0.04, 0.01: 0.02, 1.0: None})),
            study("mnist", "taylor", {0.01: 0.03, 0.03: 0.01}),
        ],
    )
    (folder / "missing.json").write_text('{"cifar100": "data not available"}')
    (folder / "notes.md").write_text("# MNIST\n\nOur error is *lower*.\n\n| what | why |\n|---|---|\n| pooling | stride |\n")
    return folder


FIRST = {"mse": 0.012, "softmax": 0.010, "abs": 0.0101, "spherical": 0.0103, "taylor": 0.008}


def runs_of(*lines: dict[str, Any]) -> list[StoredRun]:
    return [run_of(line) for line in lines]


def errors(loss: str, *values: float, **settings: Any) -> list[dict[str, Any]]:
    return [image_line(loss, seed, value, **settings) for seed, value in enumerate(values)]
