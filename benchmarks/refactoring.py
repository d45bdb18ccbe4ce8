"""How often the factored head brings all its rows up to date, and the share of the time that this takes."""

from __future__ import annotations

import itertools
import time

import torch

from benchmarks.steps import WORD_MODEL, FactoredStep, Row

# A hard case: the same sixteen batches again and again at a high rate, so that the head memorizes them. With targets that do
# not repeat, the condition number of U grows far more slowly at any rate.
STRESS, REPEATED = 1_000.0, 16


def run(quick: bool = False) -> list[Row]:
    """Nothing if ``quick``: from one refactoring to the next there are thousands of steps."""
    if quick:
        return []
    torch.manual_seed(0)
    step = FactoredStep(*WORD_MODEL, lr=STRESS)
    step.batches = itertools.cycle(list(itertools.islice(step.batches, REPEATED)))
    return [refactoring(step)]


def refactoring(step: FactoredStep, most: int = 20_000) -> Row:
    """The share of the time that refactoring takes, measured from one to the next with all the frames in between.

    The next one happens when it is due, or is forced after ``most`` steps.
    """
    head = step.head
    seconds: list[float] = []
    frames = 0
    while len(seconds) < most and len(head.U.past) >= frames:
        frames = len(head.U.past)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    by_itself = len(head.U.past) < frames
    if not by_itself:
        start = time.perf_counter()
        head.refactor()
        seconds.append(time.perf_counter() - start)
    duration, steps, share = seconds[-1], len(seconds), seconds[-1] / sum(seconds)
    how = "by itself" if by_itself else "not due yet"
    lr = step.optimizer.param_groups[0]["lr"]
    print(f"  refactoring took {duration:.2g} s after {steps:,} steps ({how}) at lr={lr:g}: {share:.2%}")
    return {"duration": duration, "steps": steps, "share": share, "by_itself": by_itself, "lr": lr}
