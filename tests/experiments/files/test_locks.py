"""Two processes, one folder: one of them works, and a lock does not outlive its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spherical_loss.experiments.files.locks import BusyError, locked
from spherical_loss.experiments.running.progress import Reporter
from spherical_loss.experiments.running.train_all import train_all
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train
from tests.experiments.training.test_train import make_run

HOLD = """
import sys, time
from pathlib import Path
from spherical_loss.experiments.files.locks import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""

TRAIN = """
import json, sys
from pathlib import Path
from spherical_loss.experiments.running.progress import Reporter
from spherical_loss.experiments.training.settings import ImageSettings, Run
from spherical_loss.experiments.training.train import train

class Say(Reporter):
    def started(self, run, epoch): print("started", flush=True)
    def kept(self, run, result): print("kept", flush=True)

run = json.loads(sys.argv[2])
train(Run(**{**run, "settings": ImageSettings(**run["settings"])}), Path(sys.argv[1]), Say())
"""

STORE = """
import sys
from pathlib import Path
from spherical_loss.experiments.tuning.tuned import store_tuned
for i in range(30):
    store_tuned("digits", f"{sys.argv[2]}-{i}", {"lr": float(i)}, {}, Path(sys.argv[1]))
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that has the lock until it is killed, or told a line."""
    holder = start(HOLD, str(path))
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_a_killed_process_gives_its_lock_back(tmp_path: Path) -> None:
    with hold(tmp_path / "lock") as holder:
        with pytest.raises(BusyError), locked(tmp_path / "lock", wait=False):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with locked(tmp_path / "lock", wait=False):
            pass


def test_a_process_waits_for_its_turn(tmp_path: Path) -> None:
    with hold(tmp_path / "lock") as holder:
        told = []

        def waiting() -> None:
            told.append("waiting")
            holder.communicate("go on\n")

        with locked(tmp_path / "lock", waiting=waiting):
            assert told == ["waiting"]
        assert holder.returncode == 0


def test_a_run_is_trained_by_one_process(tmp_path: Path) -> None:
    run = make_run(epochs=30, patience=30)
    both = [start(TRAIN, str(tmp_path), json.dumps(run.as_dict())) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert sorted(said) == ["kept\n", "started\n"]
    assert [process.returncode for process in both] == [0, 0]


def test_runs_of_another_process_come_last(tmp_path: Path) -> None:
    first, second = make_run(epochs=1), make_run(epochs=1, seed=1)
    RunFolder(tmp_path, first).create()
    events = []
    with hold(RunFolder(tmp_path, first).path / "lock") as holder:
        with pytest.raises(BusyError):
            train(first, tmp_path, Reporter(), wait=False)

        class Say(Reporter):
            def note(self, run: Run, text: str) -> None:
                events.append((run.seed, text))
                if "waiting" in text:
                    holder.communicate("go on\n")

            def finished(self, run: Run, result: dict) -> None:
                events.append((run.seed, "finished"))

        results = train_all([first, second], tmp_path, Say(), False, None)
    assert set(results) == {first, second}
    back, waits = (
        f"another process is training it; {what}" for what in ("coming back to it at the end", "waiting for its result")
    )
    assert events == [(0, back), (1, "finished"), (0, waits), (0, "finished")]


def test_tuned_values_of_two_processes_are_all_kept(tmp_path: Path) -> None:
    both = [start(STORE, str(tmp_path / "tuned.json"), name) for name in ("a", "b")]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    for process in both:
        process.communicate()
    assert len(json.loads((tmp_path / "tuned.json").read_text())["digits"]) == 60
