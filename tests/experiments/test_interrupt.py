"""Ctrl-C at any moment, as a terminal sends it, to all processes of the group: one line, exit code 130, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import spherical_loss
from tests.experiments.running.test_workers import until
from tests.support.processes import running

LINE = "stopped; the same command continues where it was\n"
LONG = ("--losses", "taylor", "--runs", "2", "--epochs", "100000", "--patience", "100000")
SEARCH = ("--loss", "taylor", "--trials", "9", "--runs", "2", "--epochs", "100000", "--patience", "100000", "--reduction", "1")

# Presses Ctrl-C when the module of the first argument is imported.
WHILE_IMPORTED = """
import os, signal, sys
from spherical_loss.__main__ import main

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

wanted = sys.argv.pop(1)
sys.meta_path.insert(0, Press())
raise SystemExit(main())
"""


def test_from_the_first_line_on() -> None:
    """Before the command line can catch Ctrl-C, nothing is imported that Python does not import for itself."""
    here = str(Path(spherical_loss.__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {here!r}); known = {{*sys.modules}}; import spherical_loss.__main__; "
    script += "print(*sorted({*sys.modules} - known))"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["spherical_loss", "spherical_loss.__main__"]


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("tyro", ("compare", "digits")),
        ("torch", ("compare", "digits")),
        ("torch.nn", ("compare", "digits")),
        ("optuna", ("tune", "digits")),
        ("distributed", ("compare", "digits", "--workers", "1")),
    ],
)
def test_while_it_starts(module: str, command: tuple[str, ...], tmp_path: Path) -> None:
    arguments = [module, *command, "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", WHILE_IMPORTED, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, LINE)


def pressed(out: Path, command: tuple[str, ...], moment: Callable[[subprocess.Popen[str]], bool]) -> None:
    """Starts the command in a group of its own, and sends the signal to all of it at this moment."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spherical_loss", *command, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: process.poll() is not None or moment(process), "the moment has come")
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (130, LINE)
        until(lambda: not any(running(child) for child in children), "the workers stop")
    finally:
        process.kill()


def under_way(out: Path, count: int) -> Callable[[subprocess.Popen[str]], bool]:
    return lambda process: sum(path.stat().st_size > 0 for path in out.glob("digits/*/metrics.jsonl")) >= count


def test_while_it_trains(tmp_path: Path) -> None:
    pressed(tmp_path, ("compare", "digits", *LONG), under_way(tmp_path, 1))


def test_while_workers_start(tmp_path: Path) -> None:
    def moment(process: subprocess.Popen[str]) -> bool:
        return len(psutil.Process(process.pid).children()) > 1  # a worker, and the tracker of multiprocessing

    pressed(tmp_path, ("compare", "digits", *LONG, "--workers", "2"), moment)


@pytest.mark.parametrize("command", [("compare", "digits", *LONG), ("tune", "digits", *SEARCH)], ids=lambda c: c[0])
def test_while_workers_train(command: tuple[str, ...], tmp_path: Path) -> None:
    pressed(tmp_path, (*command, "--workers", "2"), under_way(tmp_path, 2))
