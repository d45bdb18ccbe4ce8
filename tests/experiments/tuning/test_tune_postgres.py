"""One study in PostgreSQL, two processes that search, one of them killed half-way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from spherical_loss.experiments import cli
from spherical_loss.experiments.options import Tune
from spherical_loss.experiments.training import train
from spherical_loss.experiments.training.tasks import TASKS
from spherical_loss.experiments.tuning import tune
from tests.experiments.tuning.postgres import postgres_server
from tests.support.processes import exit_code, start


def search_and_wait(inside: Path, gate: Path, arguments: list[str]) -> None:
    """Searches as the command line does. In its second trial the process writes a file and waits for another one."""
    tune.HEARTBEAT = 1
    train_epoch, calls = train.train_epoch, []

    def train_epoch_or_wait(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            inside.touch()
            while not gate.exists():
                time.sleep(0.01)
        return train_epoch(*arguments)

    train.train_epoch = train_epoch_or_wait
    raise SystemExit(cli.main(arguments))


def open_study(folder: Path, address: str) -> optuna.Study:
    settings = dataclasses.replace(TASKS["digits"].settings, epochs=1, batch_size=200)
    return tune.open_study("taylor", Tune(task="digits", settings=settings, runs=1, out=folder / "runs", storage=address))


def searching(folder: Path, name: str, address: str, trials: int = 6) -> BaseProcess:
    arguments = [
        "tune",
        "digits",
        "--loss",
        "taylor",
        "--trials",
        str(trials),
        "--runs",
        "1",
        "--epochs",
        "1",
        "--batch-size",
        "200",
    ]
    files = ["--storage", address, "--out", str(folder / "runs"), "--quiet"]
    inside, gate = folder / f"{name}-inside", folder / f"{name}-gate"
    return start(search_and_wait, inside, gate, [*arguments, *files])


def test_two_processes_share_a_study_and_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "HEARTBEAT", 1)
    with postgres_server() as address:
        processes = {name: searching(tmp_path, name, address) for name in ("killed", "survivor")}
        began = time.monotonic()
        while not all((tmp_path / f"{name}-inside").exists() for name in processes):
            assert all(process.is_alive() for process in processes.values())
            assert time.monotonic() - began < 120
            time.sleep(0.05)
        study = open_study(tmp_path, address)
        states = [trial.state for trial in study.trials]
        assert (states.count(TrialState.COMPLETE), states.count(TrialState.RUNNING)) == (2, 2)
        running = [trial.params for trial in study.trials if trial.state == TrialState.RUNNING]
        processes["killed"].kill()
        assert exit_code(processes["killed"]) == -signal.SIGKILL
        time.sleep(3)  # two heartbeats and a little: its trial counts as dead
        (tmp_path / "survivor-gate").touch()
        assert exit_code(processes["survivor"]) == 0
        finished = study.get_trials(states=(TrialState.COMPLETE,))

        stored = json.loads((tmp_path / "runs" / "tuned.json").read_text())["digits"]["taylor"]
        last = searching(tmp_path, "last", address, trials=9)
        while not (tmp_path / "last-inside").exists():
            assert last.is_alive()
            time.sleep(0.05)
        last.kill()
        assert exit_code(last) == -signal.SIGKILL
        assert TrialState.RUNNING in [trial.state for trial in study.trials]
        (tmp_path / "nothing-left-to-do-gate").touch()
        assert exit_code(searching(tmp_path, "nothing-left-to-do", address)) == 0
        assert TrialState.RUNNING not in [trial.state for trial in study.trials]
        study._storage.remove_session()
        study._storage._backend.engine.dispose()
    rates = [trial.params["lr"] for trial in finished]
    assert len(running) == 2
    assert all(params["lr"] in rates for params in running)  # the killed one was taken up again
    assert len(rates) == len(set(rates)) == 6
    assert len(list((tmp_path / "runs/digits").glob("taylor-*/result.json"))) == 7  # one more was made before the last kill
    best = min(finished, key=lambda trial: trial.value)
    assert stored["values"] == {"lr": tune.three_digits(best.params["lr"])}
    assert stored["found"]["trials"] == 6


def test_no_server_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"postgresql://tester@/postgres?host={tmp_path}"
    assert cli.main(["tune", "digits", "--storage", address, "--out", str(tmp_path), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "cannot be used" in error
    assert "Traceback" not in error


def test_a_server_that_dies_is_a_message_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "HEARTBEAT", 1)
    with postgres_server() as address:
        folder = Path(address.partition("host=")[2])

        def kill_the_server(*arguments: object) -> float:
            os.kill(int((folder / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
            time.sleep(3)  # heartbeats fail, too
            return 1.0

        monkeypatch.setattr(train, "train_epoch", kill_the_server)
        storage = address.replace("tester@", "tester:hush%40hush@")
        options = ["--storage", storage, "--out", str(tmp_path), "--epochs", "1", "--runs", "1"]
        assert cli.main(["tune", "digits", *options]) == 1
    said = "".join(capfd.readouterr())
    assert "tester:***@" in said
    assert "cannot be used" in said
    assert "Traceback" not in said
    assert "hush" not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]


@pytest.mark.parametrize("rest", ["host:port/x", "host:99999999/x", "host:-1/x", "[/x", "/x", "pass@host/x", ""])
def test_a_broken_address_is_a_message_without_the_password(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], rest: str
) -> None:
    address = f"postgresql://me:hush@hush/hush@{rest}"
    assert cli.main(["tune", "digits", "--storage", address, "--out", str(tmp_path), "--quiet"]) == 1
    said = "".join(capfd.readouterr())
    assert "cannot be used" in said
    assert "Traceback" not in said
    assert "hush" not in said
