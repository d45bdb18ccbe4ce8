"""Runs on a Dask cluster of real processes, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import distributed
import pytest

from spherical_loss.experiments import cli
from spherical_loss.experiments.running.train_all import train_all
from spherical_loss.experiments.running.workers import Workers
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.train import train
from tests.experiments.running.test_workers import until
from tests.experiments.training.test_train import make_run, numbers


@contextmanager
def dask(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """``dask NAME ARGUMENTS`` with the scheduler's address in a file; stopped in the end."""
    command = [sys.executable, "-m", "dask", name, "--scheduler-file", str(folder / "scheduler.json"), "--no-dashboard"]
    with open(folder / f"{name}.log", "a") as log, subprocess.Popen([*command, *arguments], stderr=log, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def scheduler(folder: Path) -> str:
    until((folder / "scheduler.json").exists, "the scheduler is there")
    return json.loads((folder / "scheduler.json").read_text())["address"]


def test_a_killed_worker_of_a_cluster(tmp_path: Path) -> None:
    runs = [make_run(seed=seed, epochs=epochs, patience=epochs) for seed, epochs in enumerate((150, 150, 5))]
    worker, unfinished = ("--no-nanny", "--nthreads", "1"), []
    with (
        dask(tmp_path, "scheduler", "--host", "127.0.0.1", "--port", "0"),
        dask(tmp_path, "worker", *worker) as first,
        dask(tmp_path, "worker", *worker),
    ):

        def kill() -> None:
            until(lambda: all(len(RunFolder(tmp_path, run).history()) > 3 for run in runs[:2]), "both runs are under way")
            os.kill(first.pid, signal.SIGKILL)
            unfinished.extend(run for run in runs[:2] if RunFolder(tmp_path, run).result() is None)

        with distributed.Client(scheduler(tmp_path)) as client:  # else one may be done before the other one is there
            client.wait_for_workers(2, timeout=120)
        killer = threading.Thread(target=kill)
        killer.start()
        with Workers(None, scheduler(tmp_path)) as workers:
            results = train_all(runs, tmp_path, Display(), False, workers)
        killer.join()
        assert first.wait() == -signal.SIGKILL
        assert unfinished == runs[:2]  # so it was in the middle of one of them
    assert set(results) == set(runs)
    for run in runs:
        train(run, tmp_path / "alone", Display())
        assert numbers(tmp_path, run) == numbers(tmp_path / "alone", run)


def test_a_scheduler_that_dies_is_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, options = tmp_path / "runs", ["--losses", "taylor", "--runs", "1", "--epochs", "5000", "--patience", "5000", "--quiet"]
    with (
        dask(tmp_path, "scheduler", "--host", "127.0.0.1", "--port", "0") as process,
        dask(tmp_path, "worker", "--no-nanny", "--nthreads", "1"),
    ):

        def kill() -> None:
            until(lambda: list(out.glob("digits/*/metrics.jsonl")), "the run is under way")
            process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert cli.main(["compare", "digits", "--cluster", scheduler(tmp_path), "--out", str(out), *options]) == 1
        killer.join()
    said = "".join(capfd.readouterr())
    assert "the Dask scheduler at tcp://127.0.0.1:" in said
    assert "is gone" in said
    assert "Traceback" not in said


def test_a_worker_with_several_threads_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dask(tmp_path, "scheduler", "--host", "127.0.0.1", "--port", "0"), dask(tmp_path, "worker", "--nthreads", "3"):
        assert cli.main(["compare", "digits", "--cluster", scheduler(tmp_path), "--out", str(tmp_path / "runs")]) == 1
    assert "have [3] threads" in capsys.readouterr().err


def test_no_cluster_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["compare", "digits", "--out", str(tmp_path), "--cluster"]
    assert cli.main([*command, "nonsense://somewhere"]) == 1
    assert "no Dask scheduler with workers answers there" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "distributed", None)  # as if it were not installed
    assert cli.main([*command, "tcp://127.0.0.1:8786"]) == 1
    assert "pip install 'spherical-loss[experiments]'" in capsys.readouterr().err
