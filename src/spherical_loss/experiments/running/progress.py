"""Live progress: a rich display on a terminal, plain lines elsewhere, nothing with ``--quiet``."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.settings import Run


def outcome(label: str, run: Run, result: dict[str, Any]) -> str:
    """A line about a finished run."""
    if result["status"] == "diverged":
        return f"{label}: diverged in epoch {result['epoch']} at learning rate {run.settings.lr:.3g}"
    if result["status"] == "paused":
        return f"{label}: pruned after epoch {result['epochs']}, valid {error_text(result['valid'])}"
    return (
        f"{label}: test {error_text(result['test'])}, best of {result['epochs']} epochs: {result['best_epoch']}, "
        f"{result['seconds_per_epoch']:.3g} s per epoch"
    )


def stored_text(versions: str) -> str:
    """
    >>> stored_text(""), stored_text("torch 2.12.0 instead of 2.13.0")
    ('stored', 'stored, with torch 2.12.0 instead of 2.13.0')
    """
    return f"stored, with {versions}" if versions else "stored"


def epoch_text(record: dict[str, Any]) -> str:
    valid = record["valid"]
    return f"train loss {record['train_loss']:.4g}, valid loss {valid['loss']:.4g}, {error_text(valid)}"


def error_text(metrics: dict[str, Any]) -> str:
    """The error rate, or the metrics of a language model.

    >>> error_text({"error": 0.125}), error_text({"error": 0.8, "top10": 0.5, "perplexity": 126.7})
    ('error 12.50%', 'perplexity 126.7, top-10 error 50.00%')
    """
    if "top10" not in metrics:
        return f"error {metrics['error']:.2%}"
    perplexity = "" if metrics["perplexity"] is None else f"perplexity {metrics['perplexity']:.4g}, "
    return f"{perplexity}top-10 error {metrics['top10']:.2%}"


class PlainDisplay(Display):
    """Lines without colours or cursor movements: one per finished run, and from time to time one for a long run."""

    def __init__(self, console: Console, runs: int, every: float = 10.0) -> None:
        self.console, self.runs, self.every = console, runs, every
        self.done, self.printed = 0, time.monotonic()

    def line(self, text: str) -> None:
        self.console.print(f"[{self.done}/{self.runs}] {text}", markup=False, highlight=False, soft_wrap=True)
        self.printed = time.monotonic()

    def kept(self, run: Run, result: dict[str, Any], versions: str = "") -> None:
        self.done += 1
        self.line(f"{outcome(self.label(run), run, result)} ({stored_text(versions)})")

    def started(self, run: Run, epoch: int) -> None:
        if epoch:
            self.line(f"{self.label(run)}: resumes after epoch {epoch}")

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        if time.monotonic() - self.printed >= self.every:
            left = (run.settings.epochs - record["epoch"]) * record["seconds"]
            text = f"{self.label(run)}: epoch {record['epoch']}/{run.settings.epochs}, {epoch_text(record)}"
            self.line(f"{text}; this run: at most {duration(left)} left")

    def finished(self, run: Run, result: dict[str, Any]) -> None:
        self.done += 1
        self.line(outcome(self.label(run), run, result))

    def note(self, run: Run, text: str) -> None:
        self.line(f"{self.label(run)}: {text}")


def duration(seconds: float) -> str:
    """
    >>> duration(7), duration(200), duration(20_000)
    ('7 s', '3 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class LiveDisplay(Display):
    """Bars: one for all runs, with the time left, and one for each active run, with its losses and error.

    The time left counts every run at its full number of epochs; early stopping makes it an upper limit.
    """

    def __init__(self, console: Console, runs: int) -> None:
        bar = [BarColumn(bar_width=24)] if console.width >= 120 else []  # left out on a narrow terminal
        self.rich = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            *bar,
            TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
            TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
            console=console,
            expand=True,
        )
        self.all = self.rich.add_task("all runs", total=runs, text=f"0/{runs}")
        self.bars: dict[Run, TaskID] = {}  # for the active runs, like the following:
        self.parts: dict[Run, float] = {}
        self.runs, self.done = runs, 0
        self.text: dict[Run, str] = {}

    def __enter__(self) -> Display:
        self.rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.rich.stop()

    def kept(self, run: Run, result: dict[str, Any], versions: str = "") -> None:
        self.finished(run, result, f" ({stored_text(versions)})")

    def started(self, run: Run, epoch: int) -> None:
        text = self.text[run] = f"resumes after epoch {epoch}" if epoch else ""
        label = self.label(run)
        if run in self.bars:  # its process died
            self.rich.remove_task(self.bars[run])
        self.bars[run] = self.rich.add_task(label, total=run.settings.epochs, completed=epoch, text=text)

    def step(self, run: Run, epoch: int, step: int, steps: int, loss: float) -> None:
        self.at(run, epoch + step / steps, f"epoch {epoch + 1}, loss {loss:.4g}; {self.text[run]}")

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        self.text[run] = epoch_text(record)
        self.at(run, record["epoch"], f"epoch {record['epoch']}; {self.text[run]}")

    def at(self, run: Run, epochs: float, text: str) -> None:
        """Move the bar of ``run``, and the bar of all."""
        self.rich.update(self.bars[run], completed=epochs, text=text)
        self.parts[run] = epochs / run.settings.epochs
        self.rich.update(self.all, completed=self.done + sum(self.parts.values()))

    def finished(self, run: Run, result: dict[str, Any], how: str = "") -> None:
        self.done += 1
        self.parts.pop(run, None)
        if run in self.bars:
            self.rich.remove_task(self.bars.pop(run))
        self.rich.update(self.all, completed=self.done + sum(self.parts.values()), text=f"{self.done}/{self.runs}")
        self.rich.console.print(outcome(self.label(run), run, result) + how, markup=False, highlight=False)

    def note(self, run: Run, text: str) -> None:
        self.rich.console.print(f"{self.label(run)}: {text}", markup=False, highlight=False)


def make_display(console: Console, runs: int, quiet: bool, several_heads: bool = False) -> Display:
    if quiet:
        return Display()
    display = LiveDisplay(console, runs) if console.is_terminal else PlainDisplay(console, runs)
    display.several_heads = several_heads
    return display
