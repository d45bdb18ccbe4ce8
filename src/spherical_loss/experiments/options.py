"""The options of the commands. The command line is generated from these dataclasses, and the commands take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import tyro

from spherical_loss.experiments.errors import UsageError, choose
from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.training.settings import HeadName, Settings, check

Fixed = Annotated[str, tyro.conf.Suppress]
"""Set by the name of a command; not an option."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The options of all commands that train."""

    task: Fixed
    settings: Settings
    seed: int = 0
    """Seed of the first run; the others have the next ones."""
    out: Path = Path("runs")
    """Where runs, tables, pictures and tuned values go."""
    workers: int | None = None
    """Runs at a time, each in its own process, with --threads 1 unless given; by default one, in this process."""
    cluster: str | None = None
    """Train on the workers of this Dask scheduler, such as tcp://host:8786; --out must be a folder that all of them share."""
    quiet: bool = False
    """No progress, only the results."""

    def check(self) -> None:
        """Raise a :class:`UsageError` for a value that makes no sense."""
        check(self.settings)
        if not 0 <= self.seed < 2**40:  # of which the seeds of all epochs fit into torch's 64 bits
            raise UsageError(f"--seed is {self.seed}, but must be at least 0 and below {2**40}")
        for name in ("runs", "trials", "reduction", "workers"):
            count = getattr(self, name, None)
            if count is not None and count < 1:
                raise UsageError(f"--{name} is {count}, but must be at least 1")
        if self.workers is not None and self.cluster is not None:
            raise UsageError("--workers are on this machine, and --cluster has its own: give one of them")


@dataclass(frozen=True, kw_only=True)
class Compare(Training):
    """Train losses on a task and compare them. Finished runs are kept: the same command continues where it stopped."""

    name: Fixed
    """The folder of the tables, in ``out``."""
    title: Fixed
    losses: tuple[str, ...]
    """Which losses, of: mse, softmax, abs, spherical, taylor, z, bound, bound-fixed."""
    runs: int
    """Runs per loss, each with its own split and initial weights."""
    tensorboard: bool = False
    """Write TensorBoard event files too."""

    def check(self) -> None:
        if not self.losses:
            raise UsageError(f"--losses needs at least one loss, of: {', '.join(LOSSES)}")
        for loss in self.losses:
            choose("loss", loss, LOSSES)
        super().check()


@dataclass(frozen=True, kw_only=True)
class CompareHeads(Compare):
    """The same for a language model, whose output layer may be one of several."""

    head: tuple[HeadName, ...] = ("dense",)
    """Output layers: dense computes the logits; gram and factored do not, and are exact, too, for the losses of the
    family; tiered is factored, with larger rates for more frequent words; adaptive-spherical has softmaxes over the 2,000
    most frequent words, and the loss over the others; sampled and adaptive are the usual alternatives for softmax.
    With several, each loss is trained with those that it works with."""

    def check(self) -> None:
        super().check()
        if not self.head:
            raise UsageError(f"--head needs at least one head, of: {', '.join(get_args(HeadName))}")


@dataclass(frozen=True, kw_only=True)
class Tune(Training):
    """Search the learning rate, and a loss's own options, on the validation set; the same command continues the study."""

    loss: str | None = None
    """Which loss, of: mse, softmax, abs, spherical, taylor, z, bound, bound-fixed; by default all that compare trains, one
    after the other."""
    trials: int = 20
    """Trials of the study in total."""
    reduction: int = 3
    """Successive halving: of the trials that reach 1, 3, 9, ... epochs, the best third continues; 1: all do."""
    runs: int = 3
    """Runs per trial, of which the mean counts."""
    storage: str | None = None
    """The study's database, such as postgresql://host/name; by default an SQLite file in OUT/TASK."""

    def check(self) -> None:
        if self.loss is not None:
            choose("loss", self.loss, LOSSES)
        super().check()


@dataclass(frozen=True, kw_only=True)
class TuneHead(Tune):
    """The same for a language model."""

    head: HeadName = "dense"
    """The output layer; see compare."""


@dataclass(frozen=True, kw_only=True)
class Get:
    """Fetch a data set from its official mirrors into $SPHERICAL_LOSS_DATA; what is there already is not fetched again."""

    dataset: Fixed
    quiet: bool = False
    """No progress."""

    def check(self) -> None:
        """Nothing can be wrong."""


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Add the finished runs and tuning studies of --out folders to the store of results; what is there already stays."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """The --out folders."""
    results: Path = Path("results")
    """The store."""
    trials: bool = False
    """Add the runs of tuning trials, too, as separate runs."""

    def check(self) -> None:
        if not self.folders:
            raise UsageError("spherical-loss collect needs the --out folder of finished runs, for example: collect runs")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Turn the store of results into one HTML page that needs nothing else."""

    results: Path = Path("results")
    """The store."""
    out: Path | None = None
    """The page; by default report.html in the store."""
    readme: Path | None = None
    """Write the summary between the marks <!-- results --> and <!-- end results --> of this Markdown file, too."""

    def check(self) -> None:
        """Nothing can be wrong."""


Options = Compare | Tune | Get | Collect | Report
