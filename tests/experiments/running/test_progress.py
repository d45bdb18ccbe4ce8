"""What the user sees while it trains."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from spherical_loss.experiments.running.progress import LiveDisplay, PlainDisplay, make_display
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.settings import Run, Settings

RUN = Run("mnist", "taylor", 3, Settings(lr=0.1, epochs=20))
RECORD = {"epoch": 4, "train_loss": 0.5, "valid": {"loss": 0.25, "error": 0.0125}, "seconds": 10.0}
RESULT = {"status": "finished", "best_epoch": 5, "epochs": 9, "seconds_per_epoch": 1.5, "test": {"error": 0.0321}}


def told(terminal: bool, quiet: bool = False, every: float = 0.0, width: int = 150) -> tuple[Display, str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    display = make_display(console, 2, quiet)
    if isinstance(display, PlainDisplay):
        display.every = every
    with display:
        display.kept(RUN, RESULT)
        display.started(RUN, 3)
        display.step(RUN, 3, 50, 250, 0.75)
        display.epoch(RUN, RECORD)
        display.step(RUN, 4, 50, 250, 0.5)
        if isinstance(display, LiveDisplay):
            display.rich.refresh()
        display.finished(RUN, RESULT)
    return display, console.file.getvalue()


def test_plain_lines() -> None:
    display, text = told(terminal=False)
    assert isinstance(display, PlainDisplay)
    assert "\x1b" not in text
    assert text.splitlines() == [
        "[1/2] taylor, seed 3: test error 3.21%, best of 9 epochs: 5, 1.5 s per epoch (stored)",
        "[1/2] taylor, seed 3: resumes after epoch 3",
        "[1/2] taylor, seed 3: epoch 4/20, train loss 0.5, valid loss 0.25, error 1.25%; this run: at most 3 min left",
        "[2/2] taylor, seed 3: test error 3.21%, best of 9 epochs: 5, 1.5 s per epoch",
    ]


def test_a_trial_that_is_given_up_counts_as_done() -> None:
    console = Console(file=io.StringIO(), width=150)
    with make_display(console, 2, False) as display:
        display.finished(RUN, {"status": "paused", "epochs": 3, "valid": {"error": 0.5}})
    assert console.file.getvalue() == "[1/2] taylor, seed 3: pruned after epoch 3, valid error 50.00%\n"


def test_plain_lines_are_few() -> None:
    _, text = told(terminal=False, every=3600.0)
    assert "epoch 4/20" not in text
    assert len(text.splitlines()) == 3


def test_live_display() -> None:
    display, text = told(terminal=True)
    assert isinstance(display, LiveDisplay)
    assert "test error 3.21%" in text
    assert "error 1.25%" in text
    assert "loss 0.5" in text
    assert "2/2" in text


@pytest.mark.parametrize("width", [60, 80, 100, 150])
def test_times_are_whole_on_any_terminal(width: int) -> None:
    _, text = told(terminal=True, width=width)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"taylor, seed 3 .*epoch 5, .* 0:00:0\d 0:00:0\d$", text, re.MULTILINE)
    assert ("\u2501" in text) == (width >= 120)  # the bar


def test_quiet() -> None:
    assert told(terminal=True, quiet=True)[1] == ""
    assert told(terminal=False, quiet=True)[1] == ""


def test_diverged() -> None:
    console = Console(file=io.StringIO(), width=150)
    with PlainDisplay(console, 1) as display:
        display.finished(RUN, {"status": "diverged", "epoch": 2, "reason": "nan"})
    assert console.file.getvalue() == "[1/1] taylor, seed 3: diverged in epoch 2 at learning rate 0.1\n"
