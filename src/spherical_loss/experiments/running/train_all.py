"""Make the runs of a plan: one after the other in this process, or several at once on workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.locks import BusyError
from spherical_loss.experiments.running.workers import Workers
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train

Results = dict[Run, dict[str, Any]]
POLL = 0.5  # seconds between checks of the active runs


def train_all(
    runs: Sequence[Run], out: Path, display: Display, tensorboard: bool, workers: Workers | None, until: int | None = None
) -> Results:
    """The result of every run; with ``until``, the state after that many epochs of the runs that need more. Runs that another
    process is training come last, so that two commands share the work."""
    results: Results = {}
    for last in (False, True):
        left = [run for run in runs if run not in results]
        if workers is None:
            train_here(left, out, display, tensorboard, last, until, results)
        else:
            train_on(workers, left, out, display, tensorboard, last, until, results)
    return results


def train_here(
    runs: Sequence[Run], out: Path, display: Display, tensorboard: bool, last: bool, until: int | None, results: Results
) -> None:
    for run in runs:
        try:
            results[run] = train(run, out, display, tensorboard=tensorboard, wait=last, until=until)
        except BusyError:
            display.note(run, "another process is training it; coming back to it at the end")


def train_on(
    workers: Workers,
    runs: Sequence[Run],
    out: Path,
    display: Display,
    tensorboard: bool,
    last: bool,
    until: int | None,
    results: Results,
) -> None:
    """Hand out the runs, and report what the workers write to the run folders."""
    pending: dict[Future[Any], Watch] = {}
    for run in runs:
        folder = RunFolder(out, run)
        if (result := folder.result()) is not None:
            results[run] = result
            display.kept(run, result, folder.other_versions())
        else:
            watch = Watch(run, out, display)
            pending[workers.submit(run, out, tensorboard, last, until)] = watch
    while pending:
        done, _ = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
        for future in done:
            watch = pending.pop(future)
            run, result = watch.run, workers.result(future)
            watch.look()  # a run that another worker took over may have ended since the last look
            if result is None:
                display.note(run, "another process is training it; coming back to it at the end")
                continue
            results[run] = result
            if result["status"] != "paused":
                check_shared(out, run)
                display.finished(run, result)
        for watch in pending.values():
            watch.look()


class Watch:
    """Tells a display what happens to a run, from the metrics in its folder. A worker that starts replaces the file."""

    def __init__(self, run: Run, out: Path, display: Display) -> None:
        self.run, self.display = run, display
        self.folder = RunFolder(out, run)
        self.file = self.written()
        self.epoch = -1
        """The last epoch that was reported; -1 until the run starts."""

    def written(self) -> int:
        path = self.folder.path / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else 0

    def look(self) -> None:
        if (file := self.written()) != self.file:
            self.file = file
            if self.epoch >= 0:
                self.display.note(self.run, "its worker died; another one resumes it")
            self.epoch = 0
            self.display.started(self.run, 0)
        history = self.folder.history() if self.epoch >= 0 else []
        if history and history[-1]["epoch"] != self.epoch:
            self.epoch = history[-1]["epoch"]
            self.display.epoch(self.run, history[-1])


def check_shared(out: Path, run: Run) -> None:
    """The results of a cluster's workers must arrive here: the next command finds only what is stored here."""
    if RunFolder(out, run).result() is None:
        raise UserError(
            f"a worker finished {run.name}, but {out.absolute()} here does not have it: with --cluster, --out must be a "
            "folder that all machines share, under the same name"
        )
