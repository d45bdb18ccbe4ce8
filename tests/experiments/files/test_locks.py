"""Two processes, one folder: one of them works, and a lock does not outlive its process."""

from __future__ import annotations

import json
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spherical_loss.experiments.files.locks import BusyError, locked
from spherical_loss.experiments.running.train_all import train_all
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train
from spherical_loss.experiments.tuning.tuned import store_tuned
from tests.experiments.training.test_train import make_run
from tests.support.processes import context, exit_code, start


def hold_lock(path: Path, talk: Connection) -> None:
    with locked(path):
        talk.send("locked")
        talk.recv()


class Holder:
    """A process that has the lock until it is killed or released."""

    def __init__(self, path: Path) -> None:
        self.talk, other = context.Pipe()
        self.process = start(hold_lock, path, other)
        assert self.talk.recv() == "locked"

    def kill(self) -> None:
        self.process.kill()
        assert exit_code(self.process) == -signal.SIGKILL

    def release(self) -> None:
        self.talk.send("release")
        assert exit_code(self.process) == 0


def train_and_say(run: Run, root: Path, said: Connection) -> None:
    class Say(Display):
        def started(self, run: Run, epoch: int) -> None:
            said.send("started")

        def kept(self, run: Run, result: dict, versions: str = "") -> None:
            said.send("kept")

    train(run, root, Say())


def store_thirty(path: Path, name: str) -> None:
    for i in range(30):
        store_tuned("digits", f"{name}-{i}", {"values": {"lr": float(i)}, "found": {}}, path)


def test_a_killed_process_gives_its_lock_back(tmp_path: Path) -> None:
    holder = Holder(tmp_path / "lock")
    with pytest.raises(BusyError), locked(tmp_path / "lock", wait=False):
        pass
    holder.kill()
    with locked(tmp_path / "lock", wait=False):
        pass


def test_a_process_waits_for_its_turn(tmp_path: Path) -> None:
    holder, told = Holder(tmp_path / "lock"), []

    def waiting() -> None:
        told.append("waiting")
        holder.release()

    with locked(tmp_path / "lock", waiting=waiting):
        assert told == ["waiting"]


def test_a_run_is_trained_by_one_process(tmp_path: Path) -> None:
    run = make_run(epochs=30, patience=30)
    pipes = [context.Pipe() for _ in range(2)]
    both = [start(train_and_say, run, tmp_path, theirs) for _, theirs in pipes]
    assert [exit_code(process) for process in both] == [0, 0]
    assert sorted(mine.recv() for mine, _ in pipes) == ["kept", "started"]
    assert not any(mine.poll() for mine, _ in pipes)


def test_runs_of_another_process_come_last(tmp_path: Path) -> None:
    first, second = make_run(epochs=1), make_run(epochs=1, seed=1)
    RunFolder(tmp_path, first).create()
    events, holder = [], Holder(RunFolder(tmp_path, first).path / "lock")
    with pytest.raises(BusyError):
        train(first, tmp_path, Display(), wait=False)

    class Say(Display):
        def note(self, run: Run, text: str) -> None:
            events.append((run.seed, text))
            if "waiting" in text:
                holder.release()

        def finished(self, run: Run, result: dict) -> None:
            events.append((run.seed, "finished"))

    results = train_all([first, second], tmp_path, Say(), False, None)
    assert set(results) == {first, second}
    back, waits = (
        f"another process is training it; {what}" for what in ("coming back to it at the end", "waiting for its result")
    )
    assert events == [(0, back), (1, "finished"), (0, waits), (0, "finished")]


def test_tuned_values_of_two_processes_are_all_kept(tmp_path: Path) -> None:
    both = [start(store_thirty, tmp_path / "tuned.json", name) for name in ("a", "b")]
    assert [exit_code(process) for process in both] == [0, 0]
    assert len(json.loads((tmp_path / "tuned.json").read_text())["digits"]) == 60
