"""Several runs at once, with real processes: the same results, whichever process is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import LocalCluster  # and its defaults, of which a test changes one

from spherical_loss.experiments import cli
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.running import workers
from spherical_loss.experiments.running.train_all import train_all
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run, with_threads
from spherical_loss.experiments.training.train import train
from tests.experiments.training.test_train import make_run, numbers
from tests.support.processes import context, running


def until(condition: Callable[[], object], what: str) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 120, what
        time.sleep(0.01)


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Workers that start at once, for tests that are not about their start."""
    context.get_start_method()  # the server that they are forked off has imported torch
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield


class Told(Display):
    """Remembers what it is told; ``heard``, if given, is a folder that has a file for every run of which it heard an epoch."""

    def __init__(self, heard: Path | None = None) -> None:
        self.heard = heard
        self.notes: list[tuple[Run, str]] = []
        self.done: list[Run] = []
        self.epochs: dict[Run, list[int]] = {}

    def epoch(self, run: Run, record: dict) -> None:
        self.epochs.setdefault(run, []).append(record["epoch"])
        if self.heard is not None:
            (self.heard / run.name).touch()

    def finished(self, run: Run, result: dict) -> None:
        self.done.append(run)

    def kept(self, run: Run, result: dict, versions: str = "") -> None:
        self.done.append(run)

    def note(self, run: Run, text: str) -> None:
        self.notes.append((run, text))


def pids(two: workers.Workers) -> set[int]:
    return set(two.client.run(os.getpid).values())


def die_in_epoch(k: int, heard: Path) -> int:
    """This process, whose number is returned, kills itself when it has trained the k-th epoch of a run and its parent has
    heard of the run: a run that ends between two looks of the parent would not be missed."""
    log = RunFolder.log

    def log_or_die(folder: RunFolder, record: dict) -> None:
        log(folder, record)
        if record["epoch"] == k:
            until((heard / folder.path.name).exists, "the parent has heard of the run")
            os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.log = log_or_die  # type: ignore[method-assign]
    return os.getpid()


def test_a_killed_worker_loses_only_its_run_and_the_numbers_are_the_same(tmp_path: Path) -> None:
    runs = [make_run(seed=seed, epochs=60, patience=60) for seed in (0, 1, 2)]
    heard = tmp_path / "heard"
    heard.mkdir()
    told = Told(heard)
    with workers.Workers(2) as two:
        before = pids(two)
        mortal = min(two.client.nthreads())
        (killed,) = two.client.run(die_in_epoch, 4, heard, workers=[mortal]).values()
        results = train_all(runs, tmp_path / "two", told, False, two)
        until(lambda: len(pids(two)) == 2, "there is a new worker")
        assert pids(two) & before == before - {killed}  # the other process is the same as before
    assert set(results) == set(told.done) == set(runs)
    ((lost, text),) = told.notes
    assert lost in runs[:2]
    assert "worker died" in text
    assert all(told.epochs[run] for run in runs)
    for run in runs:
        train(run, tmp_path / "alone", Display())
        assert numbers(tmp_path / "two", run) == numbers(tmp_path / "alone", run)
        assert RunFolder(tmp_path / "two", run).result() == results[run]


@pytest.mark.usefixtures("forked_workers")
def test_runs_pause_on_workers_and_continue(tmp_path: Path) -> None:
    runs, told = [make_run(seed=seed, epochs=3) for seed in (0, 1)], Told()
    with workers.Workers(2) as two:
        paused = train_all(runs, tmp_path, told, False, two, until=1)
        assert {(result["status"], result["epochs"]) for result in paused.values()} == {("paused", 1)}
        assert told.done == []
        results = train_all(runs, tmp_path, told, False, two)
    assert {result["status"] for result in results.values()} == {"finished"}
    assert set(told.done) == set(runs)
    for run in runs:
        train(run, tmp_path / "alone", Display())
        assert numbers(tmp_path, run) == numbers(tmp_path / "alone", run)


def kill_yourself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("forked_workers")
def test_a_run_that_kills_its_workers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "DEATHS", 2)
    with workers.Workers(1) as one:
        future = one.executor.submit(kill_yourself)
        with pytest.raises(UserError, match=r"several workers of this machine died.*memory"):
            one.result(future)


@pytest.mark.usefixtures("forked_workers")
def test_workers_can_be_closed_while_dask_starts_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its assertion must not hide why the workers are closed."""
    close = LocalCluster.close

    def close_and_fail(cluster: LocalCluster, *arguments: Any, **options: Any) -> None:
        close(cluster, *arguments, **options)
        raise AssertionError("can only join a started process")

    monkeypatch.setattr(LocalCluster, "close", close_and_fail)
    with pytest.raises(UserError, match="why"), workers.Workers(1):
        raise UserError("why")


def test_workers_die_with_their_parent_and_the_same_command_continues(tmp_path: Path) -> None:
    arguments = ["compare", "digits", "--losses", "taylor", "--runs", "2", "--epochs", "200", "--patience", "200"]
    command = [sys.executable, "-m", "spherical_loss.experiments.cli", *arguments, "--out", str(tmp_path), "--workers", "2"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until(lambda: len(list(tmp_path.glob("digits/*/metrics.jsonl"))) == 2, "both runs are under way")
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not any(running(child) for child in children), "the workers stop")
    assert not list(tmp_path.glob("digits/*/result.json"))
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "[2/2] taylor" in output
    assert len(list(tmp_path.glob("digits/*/result.json"))) == 2


@pytest.mark.usefixtures("forked_workers")
def test_the_command_line_with_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--losses", "softmax", "taylor", "--runs", "2", "--epochs", "2"]
    assert cli.main(["compare", "digits", *small, "--out", str(tmp_path / "workers"), "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert "[4/4]" in out
    assert cli.main(["compare", "digits", *small, "--out", str(tmp_path / "here")]) == 0
    assert cli.main(["compare", "digits", *small, "--out", str(tmp_path / "here"), "--workers", "1"]) == 0
    assert capsys.readouterr().out.count("(stored)") == 4  # digits trains with one thread in any case: the same runs
    for path in sorted(tmp_path.glob("here/digits/*/best.safetensors")):
        assert path.read_bytes() == (tmp_path / "workers" / path.relative_to(tmp_path / "here")).read_bytes()


@pytest.mark.usefixtures("forked_workers")
def test_a_search_with_workers_finds_the_same(tmp_path: Path) -> None:
    small = ["--loss", "softmax", "--trials", "3", "--runs", "2", "--epochs", "4", "--quiet"]  # some are pruned
    for name, more in [("here", []), ("workers", ["--workers", "2"])]:
        files = ["--out", str(tmp_path / name)]
        assert cli.main(["tune", "digits", *small, *files, *more]) == 0
    assert json.loads((tmp_path / "here/tuned.json").read_text()) == json.loads((tmp_path / "workers/tuned.json").read_text())


def test_errors_of_workers_are_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", str(tmp_path / "nowhere"))
    assert cli.main(["compare", "mnist", "--runs", "2", "--out", str(tmp_path), "--workers", "2"]) == 1
    assert "spherical-loss data get mnist" in capsys.readouterr().err
    assert cli.main(["compare", "digits", "--out", str(tmp_path), "--workers", "0"]) == 2
    assert "--workers is 0" in capsys.readouterr().err


def test_threads_do_not_depend_on_the_number_of_workers() -> None:
    settings = dataclasses.replace(make_run().settings, threads=None)
    assert with_threads(settings, None, None).threads is None
    assert [with_threads(settings, n, None).threads for n in (1, 2, 64)] == [1, 1, 1]
    assert with_threads(settings, None, "tcp://host:8786").threads == 1
    assert with_threads(dataclasses.replace(settings, threads=3), 2, None).threads == 3
