"""The store of results: what was measured, as data in the repository.

    RESULTS/runs/TASK.jsonl       a line per finished or diverged run
    RESULTS/tuning/TASK.jsonl     a line per tuning study, with all its trials

A line of a run has its configuration (:meth:`Run.as_dict`), its name, the environment, the result, the history by columns, and
the sizes of the data. Numbers have six digits; there are no weights. Lines are sorted, so that a new run is one new line.
``spherical-loss collect RUNS`` adds what is new in an ``--out`` folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.files.locks import locked
from spherical_loss.experiments.training.records import (
    check,
    check_all,
    check_config,
    check_environment,
    check_history,
    check_result,
    check_study,
    is_name,
    is_text,
    of_language,
)
from spherical_loss.experiments.training.run_folder import read_history, read_json, read_result
from spherical_loss.experiments.training.settings import label_of

DIGITS = 6
Line = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class StoredRun:
    """A run of the store. Settings are a plain dictionary, so that runs of older and newer versions can be read."""

    name: str
    task: str
    loss: str
    seed: int
    settings: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    history: list[dict[str, Any]]
    """A record per epoch, as the run folder has it."""
    data: dict[str, int]
    """Numbers of examples (for a text, words) to train, validate and test, and of classes D; older runs may lack it."""

    @property
    def label(self) -> str:
        return label_of(self.loss, *self.settings.get("head", ["dense"]))

    @property
    def finished(self) -> bool:
        return self.result["status"] == "finished"

    @property
    def alone(self) -> bool:
        """Whether it had the machine to itself, so that its times mean something."""
        return bool(self.result.get("alone"))

    @property
    def D(self) -> int | None:
        """For a language model, the size of the vocabulary, if known."""
        vocabulary = self.settings.get("vocabulary")
        return vocabulary if isinstance(vocabulary, int) else self.data.get("D")


@dataclass(frozen=True)
class Study:
    """A tuning study: every trial is its number, its values, and ``value``, the mean validation; None if it diverged. A trial
    that was pruned has ``pruned``, the number of its epochs."""

    name: str
    task: str
    loss: str
    monitor: str
    """The metric that ``value`` is."""
    settings: dict[str, Any]
    """The settings that all runs of the trials have in common; empty if the runs were deleted."""
    trials: list[dict[str, Any]]

    @property
    def best(self) -> dict[str, Any] | None:
        whole = (t for t in self.trials if t["value"] is not None and "pruned" not in t)
        return min(whole, key=lambda t: (t["value"], t["number"]), default=None)


def read_runs(results: Path) -> list[StoredRun]:
    """All runs of the store, sorted by task, loss and seed."""
    return read_all(results / "runs", run_of)


def read_studies(results: Path) -> list[Study]:
    return read_all(results / "tuning", study_of)


def read_missing(results: Path) -> dict[str, str]:
    """The reason why a task has no runs, by task: missing.json, which is written by hand."""
    path = results / "missing.json"
    try:
        missing = json.loads(path.read_bytes()) if path.exists() else {}
        check_all(missing, "it", is_text)
        return missing
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is damaged ({error}); it must have the form {{"task": "why it was not run"}}') from error


def read_all(folder: Path, made_of: Callable[[Line], T]) -> list[T]:
    """The content of the lines of all files of a folder."""
    return [made for path in sorted(folder.glob("*.jsonl")) for _, made in read_lines(path, made_of)]


def read_lines(path: Path, made_of: Callable[[Line], T]) -> list[tuple[Line, T]]:
    """The lines of a file of the store, and the objects made from them."""
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, is damaged ({error}); remove it, or restore the file from git") from error
        try:
            lines.append((line, made_of(line)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}, line {number}, was not written by 'spherical-loss collect' ({reason})") from error
    return lines


def study_of(line: Line) -> Study:
    check_study(line)
    return Study(**line)


def run_of(line: dict[str, Any]) -> StoredRun:
    check(line, "it", name=is_name)
    config, history, sizes = line["run"], records(line["history"]), line.get("data", {})
    check_config(config)
    check_environment(line["environment"])
    check_result({**line["result"], "data": sizes}, of_language(config["settings"]))
    check_history(history, of_language(config["settings"]))
    return StoredRun(
        line["name"],
        config["task"],
        config["loss"],
        config["seed"],
        config["settings"],
        line["environment"],
        line["result"],
        history,
        sizes,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a run folder, OUT/TASK/RUN."""

    def check_place(config: Any) -> None:
        check_config(config)
        if config["task"] != folder.parent.name:
            raise ValueError(f"its task is {config['task']}, but it is in the folder {folder.parent.name}")

    return read_json(folder / "config.json", check_place)


def line_of(folder: Path) -> dict[str, Any]:
    """The line of a run folder that has a result."""
    config = read_config(folder)
    language = of_language(config["settings"])
    result = read_result(folder / "result.json", language)
    sizes = result.pop("data", None)
    line = {
        "name": folder.name,
        "run": config,
        "environment": read_json(folder / "environment.json", check_environment),
        "result": with_six_digits(result),
        "history": with_six_digits(columns(read_history(folder / "metrics.jsonl", language))),
    }
    return {**line, "data": sizes} if sizes else line


def with_six_digits(value: Any) -> Any:
    """Floats anywhere in ``value`` with six digits.

    >>> with_six_digits({"error": [0.041599999999999997, 3]})
    {'error': [0.0416, 3]}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: with_six_digits(x) for key, x in value.items()}
    return [with_six_digits(x) for x in value] if isinstance(value, list) else value


def columns(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of a history as columns, so that each name is stored once.

    >>> columns([{"epoch": 1, "valid": {"error": 0.5}}, {"epoch": 2, "valid": {"error": 0.4}}])
    {'epoch': [1, 2], 'valid': {'error': [0.5, 0.4]}}
    """
    if not history:
        return {}
    return {
        key: columns([record[key] for record in history]) if isinstance(first, dict) else [record[key] for record in history]
        for key, first in history[0].items()
    }


def records(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """
    >>> records({'epoch': [1, 2], 'valid': {'error': [0.5, 0.4]}})
    [{'epoch': 1, 'valid': {'error': 0.5}}, {'epoch': 2, 'valid': {'error': 0.4}}]
    """
    parts = {key: records(column) if isinstance(column, dict) else column for key, column in columns.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


def add_runs(results: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Add new runs to the store; returns how many. A run that is already there stays as it is."""
    return merge(
        results / "runs",
        ((line["run"]["task"], line["name"], line) for line in lines),
        key=lambda line: (line["run"]["loss"], line["run"]["seed"], line["name"]),
        newer=lambda old, new: False,
        made_of=run_of,
    )


def add_studies(results: Path, studies: Iterable[Study]) -> int:
    """Add studies that are new, or have more trials than before, to the store; returns how many."""
    return merge(
        results / "tuning",
        ((study.task, study.name, with_six_digits(vars(study))) for study in studies),
        key=lambda line: (line["loss"], line["name"]),
        newer=lambda old, new: len(new["trials"]) > len(old["trials"]),
        made_of=study_of,
    )


def merge(
    folder: Path,
    added: Iterable[tuple[str, str, Line]],
    key: Callable[[Line], Any],
    newer: Callable[[Line, Line], bool],
    made_of: Callable[[Line], object],
) -> int:
    """Add lines, given with their file and name, to the files in ``folder``; a file is replaced as a whole, or not at all."""
    by_file: dict[str, dict[str, Line]] = {}
    for file, name, line in added:
        by_file.setdefault(file, {})[name] = line
    count = 0
    for file, lines in sorted(by_file.items()):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file}.jsonl"
        with locked(path.with_name(path.name + ".lock")):
            there = {line["name"]: line for line, _ in read_lines(path, made_of)}
            new = {name: line for name, line in lines.items() if name not in there or newer(there[name], line)}
            if new:
                ordered = sorted({**there, **new}.values(), key=key)
                text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in ordered)
                write_atomically(path, text.encode())
        count += len(new)
    return count


def run_folders(runs: Path) -> Iterator[Path]:
    """The folders under ``runs`` of runs that are finished or have diverged."""
    yield from sorted(path.parent for path in runs.glob("*/*/result.json"))
