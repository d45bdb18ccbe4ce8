"""A study: a search and three seeds for every contender; each finished training is stored, and never repeated.

Equal time without a quiet machine: the pace of every contender, the seconds of a training step on one thread, is measured side
by side with the others. A training of T seconds is then one of ``T / pace`` steps, whatever else the machine does meanwhile.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.quality.contenders import CONTENDERS
from benchmarks.quality.training import Session, Training, corpus, trained

REFERENCE = "sampled softmax"  # paces are ratios to its pace, so that contenders can be added on another day
SEEDS = (1, 2, 3)
TRIALS, DECADES = 4, 0.5  # of the search, which reaches so many decades to each side of the start
ROUNDS, TURN_SECONDS, WARMUP = 7, 0.5, 20  # of the measurement of paces


@dataclass(frozen=True)
class Budget:
    """How long a training and a trial of the search are, for every contender: in seconds of one thread, or in steps."""

    training: float
    trial: float
    unit: str


class Study:
    """The results for one vocabulary, in one file for all of them, written after every training."""

    def __init__(self, path: Path, vocabulary: str, budget: Budget, searched: str | None = None) -> None:
        self.path, self.vocabulary, self.budget = path, vocabulary, budget
        self.searched = searched or vocabulary
        """The vocabulary of the search."""
        empty = {"words": corpus(vocabulary).train.D, "budget": asdict(budget), "paces": {}, "trials": [], "runs": []}
        self.part: dict[str, Any] = self.stored().get(vocabulary, empty)
        if self.part["budget"] != asdict(budget):
            raise SystemExit(f"{path} has trainings of {vocabulary} with {self.part['budget']}, not {asdict(budget)}")

    def stored(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def save(self) -> None:
        self.path.write_text(json.dumps({**self.stored(), self.vocabulary: self.part}, indent=1) + "\n")

    def run(self, names: Sequence[str], workers: int) -> None:
        """Do what is missing of these contenders."""
        names = list(dict.fromkeys([REFERENCE, *names])) if self.budget.unit == "seconds" else list(names)
        self.measure_paces(names)
        if self.searched == self.vocabulary:
            self.train([training for name in names for training in self.trials(name)], "trials", workers)
        tuned = {name: best for name in names if (best := self.best(name)) is not None}
        steps = {name: self.steps(name, self.budget.training) for name in tuned}
        runs = [self.training(name, seed, steps[name], values) for seed in SEEDS for name, values in tuned.items()]
        self.train(runs, "runs", workers)

    # Rates ---------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> dict[str, float]:
        contender = CONTENDERS[name]
        return {"lr": contender.lr, "output_lr": contender.output_lr, **contender.options}

    def best(self, name: str) -> dict[str, float] | None:
        """The values with the lowest perplexity, or, without one, the lowest top-10 error; None if all diverged."""
        trials = self.part["trials"] if self.searched == self.vocabulary else self.stored()[self.searched]["trials"]
        found = [t for t in trials if t["contender"] == name and "end" in t]
        if not found:
            return None
        best = min(found, key=lambda t: t["end"]["perplexity"] or t["end"]["top10"])
        return {"lr": best["lr"], "output_lr": best["output_lr"], **best["options"]}

    def trials(self, name: str) -> list[Training]:
        """Points of a Sobol sequence around the start, on a log scale, the same for every contender; the first is the start."""
        center = self.start(name)
        points = torch.quasirandom.SobolEngine(len(center)).draw(1 + TRIALS)[1:]  # the first of all is a corner
        steps = self.steps(name, self.budget.trial)
        factors = (10 ** (DECADES * (2 * points - 1))).tolist()
        return [
            self.training(
                name, 0, steps, {key: start * factor for (key, start), factor in zip(center.items(), row, strict=True)}
            )
            for row in factors
        ]

    def training(self, name: str, seed: int, steps: int, values: dict[str, float]) -> Training:
        rounded = {key: float(f"{value:.3g}") for key, value in values.items()}
        return Training(self.vocabulary, name, seed, steps, rounded.pop("lr"), rounded.pop("output_lr"), rounded)

    # Paces ---------------------------------------------------------------------------------------------------------

    def steps(self, name: str, amount: float) -> int:
        return math.ceil(amount / self.part["paces"][name]) if self.budget.unit == "seconds" else int(amount)

    def measure_paces(self, names: Sequence[str]) -> None:
        """Seconds per step of those that have none yet, in the seconds of the reference's first measurement."""
        if self.budget.unit != "seconds":
            return
        stored = self.part["paces"]
        if missing := [name for name in names if name not in stored]:
            together = list(dict.fromkeys([REFERENCE, *missing]))
            found = measured_paces([self.training(name, 0, 10**6, self.start(name)) for name in together])
            scale = stored.get(REFERENCE, found[REFERENCE]) / found[REFERENCE]
            stored.update({name: found[name] * scale for name in missing})
            self.save()

    # Training ------------------------------------------------------------------------------------------------------

    def train(self, planned: list[Training], kind: str, workers: int) -> None:
        """Train what is not stored yet, ``workers`` at a time."""
        done = [Training(**{key: result[key] for key in Training.__dataclass_fields__}) for result in self.part[kind]]
        missing = [training for training in planned if training not in done]
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            jobs: list[Future[dict[str, Any]]] = [
                pool.submit(trained, training, in_search=kind == "trials") for training in missing
            ]
            for job in tqdm(as_completed(jobs), f"{self.vocabulary} words, {kind}", total=len(jobs)):
                self.part[kind].append(job.result())
                self.save()


def measured_paces(trainings: list[Training]) -> dict[str, float]:
    """Seconds per step on one thread, in turns; of the rounds, the median ratio to the first one."""
    torch.set_num_threads(1)
    sessions = {training.contender: Session(training) for training in trainings}
    turns = {name: max(1, min(50, round(TURN_SECONDS / seconds_of(session, WARMUP)))) for name, session in sessions.items()}
    rounds = [
        {name: seconds_of(session, turns[name]) for name, session in sessions.items()} for _ in tqdm(range(ROUNDS), "paces")
    ]
    first = trainings[0].contender
    seconds = statistics.median(times[first] for times in rounds)
    return {name: seconds * statistics.median(times[name] / times[first] for times in rounds) for name in sessions}


def seconds_of(session: Session, steps: int) -> float:
    """Seconds per step of the next steps: of the processor, which with one thread are those of a quiet machine."""
    began = time.process_time()
    for _ in range(steps):
        session.step()
    return (time.process_time() - began) / steps
