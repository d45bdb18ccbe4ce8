"""The command line: ``spherical-loss COMMAND ...``. Options are the fields of the dataclasses here and of the settings.

Exit codes: 0, all went well; 1, something stopped the command (the message says what); 2, the command was not understood;
130, interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tyro
from rich.console import Console

from spherical_loss.experiments.data.folder import data_folder
from spherical_loss.experiments.errors import UsageError, UserError, choose
from spherical_loss.experiments.files.failures import explain
from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.results.paper import TABLES, table_of
from spherical_loss.experiments.running import compare as comparison
from spherical_loss.experiments.running.workers import open_workers, with_threads
from spherical_loss.experiments.training.distributed import joined, on_first, rank, ranks
from spherical_loss.experiments.training.settings import Settings
from spherical_loss.experiments.training.tasks import TASKS
from spherical_loss.experiments.tuning.tuned import TUNED

T = TypeVar("T")
FILE_WIDTH = 400  # columns, where the output is a file or a pipe: room for every table


@dataclass(frozen=True)
class Compare:
    """Train losses on a task and compare them. Finished runs are kept: the same command continues where it stopped."""

    settings: Settings
    losses: tuple[str, ...]
    """Which losses, of: mse, softmax, abs, spherical, taylor, z, bound, bound-fixed."""
    runs: int
    """Runs per loss, each with its own split and initial weights."""
    seed: int = 0
    """Seed of the first run; the others follow."""
    out: Path = Path("runs")
    """Where runs, tables and pictures go."""
    workers: int | None = None
    """Runs at a time, each in a process of its own, with --threads 1 unless said otherwise; by default one, in this process."""
    cluster: str | None = None
    """Train on the workers of this Dask scheduler, such as tcp://host:8786; --out must be a folder that all of them share."""
    quiet: bool = False
    """No progress, only the tables."""
    tensorboard: bool = False
    """Write TensorBoard event files too."""


def compare(arguments: Sequence[str], console: Console) -> None:
    """Compare losses on a task (default: digits)."""
    name, rest = first(arguments, "task", {name: task.summary for name, task in TASKS.items()}, "compare", default="digits")
    task = TASKS[name]
    options = parse(Compare(task.settings, task.losses, task.runs), rest, f"compare {name}")
    execute(options, name, name, task.summary, console)


def reproduce(arguments: Sequence[str], console: Console) -> None:
    """Make a table of the paper with its settings."""
    names = {name: f"table {table.number}: {table.title}" for name, table in TABLES.items()}
    name, rest = first(arguments, "table", names, "reproduce")
    table = TABLES[name]
    settings = dataclasses.replace(TASKS[table.task].settings, **table.settings)
    options = parse(Compare(settings, table.losses, table.runs), rest, f"reproduce {name}")
    execute(options, table.task, f"reproduce-{name}", f"Table {table.number}: {table.title}", console)


def execute(options: Compare, task: str, name: str, title: str, console: Console) -> None:
    if not options.losses:
        raise UsageError(f"--losses needs one loss at least, of: {', '.join(LOSSES)}")
    for loss in options.losses:
        choose("loss", loss, LOSSES)
    check_counts(options.seed, runs=options.runs)
    losses, settings = list(dict.fromkeys(options.losses)), with_threads(options.settings, options.workers, options.cluster)
    runs = comparison.plan(task, losses, range(options.seed, options.seed + options.runs), settings, options.quiet)
    runs = [dataclasses.replace(run, ranks=ranks()) for run in runs]
    with open_workers(options.workers, options.cluster) as workers:
        finished = comparison.execute(runs, options.out, console, options.quiet, options.tensorboard, workers)
    table = table_of(task, runs[0].settings)  # not ``settings``, which may leave the layers open
    on_first(lambda: comparison.report(name, title, finished, table, options.out, console))


def check_counts(seed: int, **counts: int) -> None:
    """Raise a :class:`UsageError` for a seed, or a number of things to do, that makes no sense."""
    if not 0 <= seed < 2**40:  # of which the seeds of all epochs fit into torch's 64 bits
        raise UsageError(f"--seed is {seed}, but must be at least 0 and below {2**40}")
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"--{name} is {count}, but must be at least 1")


@dataclass(frozen=True)
class Tune:
    """Search the learning rate, and a loss's own options, on the validation set; the same command continues the study."""

    settings: Settings
    loss: str = "taylor"
    """Which loss, of: mse, softmax, abs, spherical, taylor, z, bound, bound-fixed."""
    trials: int = 20
    """Trials that the study has in the end."""
    reduction: int = 3
    """Successive halving: of the trials that reach 1, 3, 9, ... epochs, the best third continues; 1: all do."""
    runs: int = 3
    """Runs per trial, of which the mean counts."""
    seed: int = 0
    """Seed of the trials' runs and of the search."""
    out: Path = Path("runs")
    """Where the trials' runs and the study go."""
    storage: str | None = None
    """The study's database, such as postgresql://host/name; by default an SQLite file in OUT/TASK."""
    store: Path = TUNED
    """Where the best values go; compare and reproduce read the default file."""
    workers: int | None = None
    """Runs at a time, each in a process of its own, with --threads 1 unless said otherwise; by default one, in this process."""
    cluster: str | None = None
    """Train on the workers of this Dask scheduler, such as tcp://host:8786; --out must be a folder that all of them share."""
    quiet: bool = False
    """No progress."""


def tune(arguments: Sequence[str], console: Console) -> None:
    """Search a loss's learning rate and options on a task."""
    from spherical_loss.experiments.tuning.tune import tune as search  # Optuna takes a second to import

    name, rest = first(arguments, "task", {name: task.summary for name, task in TASKS.items()}, "tune")
    options = parse(Tune(TASKS[name].settings), rest, f"tune {name}")
    options = dataclasses.replace(options, settings=with_threads(options.settings, options.workers, options.cluster))
    choose("loss", options.loss, LOSSES)
    check_counts(options.seed, trials=options.trials, runs=options.runs, reduction=options.reduction)
    with open_workers(options.workers, options.cluster) as workers:
        values = search(name, options, console, workers)
    text = ", ".join(f"{key} = {value:g}" for key, value in values.items())
    console.print(f"{options.loss} on {name}: {text} -> {options.store}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Get:
    """Fetch a data set from its official mirrors into $SPHERICAL_LOSS_DATA; what is there already is not fetched again."""

    quiet: bool = False
    """No progress."""


def data(arguments: Sequence[str], console: Console) -> None:
    """Fetch a data set: spherical-loss data get mnist."""
    from spherical_loss.experiments.data import download

    _, rest = first(arguments, "action", {"get": "fetch a data set"}, "data")
    names = {name: f"{len(parts)} file(s)" for name, parts in download.DATASETS.items()}
    name, rest = first(rest, "dataset", names, "data get")
    options = parse(Get(), rest, f"data get {name}")
    say = (lambda text: None) if options.quiet else lambda text: console.print(text, highlight=False, soft_wrap=True)
    download.get(name, data_folder(), progress=not options.quiet, say=say)


@dataclass(frozen=True)
class Collect:
    """Add the finished runs and tuning studies of an --out folder to the store of results; what is there already stays."""

    results: Path = Path("results")
    """The store."""
    trials: bool = False
    """Add the runs of tuning trials, too, as runs of their own."""


def collect(arguments: Sequence[str], console: Console) -> None:
    """Add finished runs to the results: spherical-loss collect runs."""
    from spherical_loss.experiments.results.collect import collect as add  # Optuna takes a second to import

    options, folders = parse_rest(Collect(), arguments, "collect RUNS ...")
    if not folders:
        raise UsageError("spherical-loss collect needs the --out folder of finished runs, for example: collect runs")
    for folder in folders:
        add(Path(folder), options.results, options.trials, partial(console.print, highlight=False, soft_wrap=True))


@dataclass(frozen=True)
class Report:
    """Turn the store of results into one HTML page that needs nothing else."""

    results: Path = Path("results")
    """The store."""
    out: Path | None = None
    """The page; by default report.html in the store."""
    readme: Path | None = None
    """Write the summary between the marks <!-- results --> and <!-- end results --> of this Markdown file, too."""


def report(arguments: Sequence[str], console: Console) -> None:
    """Turn the results into an HTML page."""
    from spherical_loss.experiments.report.write_report import write_report  # matplotlib takes a while to import

    options = parse(Report(), arguments, "report")
    page = options.out or options.results / "report.html"
    write_report(options.results, page, options.readme)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[[Sequence[str], Console], None]] = {
    "compare": compare,
    "reproduce": reproduce,
    "tune": tune,
    "data": data,
    "collect": collect,
    "report": report,
}


def first(
    arguments: Sequence[str], kind: str, names: dict[str, str], command: str, default: str | None = None
) -> tuple[str, Sequence[str]]:
    """The name that a command starts with, and the rest; help and errors list all the names."""
    usage = "\n".join(f"  {name:<22}{text}" for name, text in names.items())
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: spherical-loss {command} {kind.upper()} [options]\n\n{kind}s:\n{usage}\n")
        print(f"options: spherical-loss {command} {kind.upper()} --help")
        raise SystemExit(0)
    if default is not None and (not arguments or arguments[0].startswith("-")):
        return default, arguments
    if not arguments:
        raise UsageError(f"spherical-loss {command} needs a {kind}; the valid ones are: {', '.join(names)}")
    return choose(kind, arguments[0], names), arguments[1:]


def parse(default: T, arguments: Sequence[str], command: str) -> T:
    """``default`` with the options of the command line; tyro prints help and errors of values."""
    parsed, rest = parse_rest(default, arguments, command)
    if rest:
        choose("option", rest[0], valid_options(default))
    return parsed


def parse_rest(default: T, arguments: Sequence[str], command: str) -> tuple[T, list[str]]:
    """The same, and the arguments that are no options."""
    parsed, unknown = tyro.cli(
        type(default),
        default=default,
        args=list(arguments),
        prog=f"spherical-loss {command}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands),
        return_unknown_args=True,
    )
    for argument in unknown:
        if argument.startswith("-"):
            choose("option", argument, valid_options(default))
    return parsed, unknown


def valid_options(instance: Any) -> list[str]:
    return [*sorted(f"--{name.replace('_', '-')}" for name in option_names(instance)), "--help"]


def option_names(instance: Any) -> list[str]:
    names = []
    for f in dataclasses.fields(instance):
        value = getattr(instance, f.name)
        names += option_names(value) if dataclasses.is_dataclass(value) else [f.name]
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors that a user can mend are one message, not a traceback."""
    with joined():
        code = run(sys.argv[1:] if arguments is None else arguments)
        if code != 0 and ranks() > 1:
            raise SystemExit(code)  # at once: the others may be waiting for this one, and it must not wait for them
        return code


def run(arguments: Sequence[str]) -> int:
    silent = rank() > 0
    console, errors = Console(quiet=silent), Console(stderr=True, quiet=silent)
    if silent or not console.is_terminal:
        console = Console(width=FILE_WIDTH, quiet=silent, force_terminal=False)
    try:
        summaries = {name: (command.__doc__ or "").strip() for name, command in COMMANDS.items()}
        if not arguments or arguments[0] in ("-h", "--help"):
            listed = "\n".join(f"  {name:<12}{text}" for name, text in summaries.items())
            print(f"usage: spherical-loss COMMAND ...\n\ncommands:\n{listed}\n\noptions: spherical-loss COMMAND --help")
            return 0
        command = choose("command", arguments[0], COMMANDS)
        if ranks() > 1 and (command not in ("compare", "reproduce") or {"--workers", "--cluster"} & set(arguments)):
            raise UsageError("under torchrun the processes train one run together: compare and reproduce, without --workers")
        COMMANDS[command](arguments[1:], console)
    except UserError as error:
        errors.print(f"spherical-loss: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter still writes in the end
        return 1
    except OSError as error:  # of this process alone, maybe
        text = f"rank {rank()}: {explain(error)}" if ranks() > 1 else explain(error)
        errors.quiet = False
        errors.print(f"spherical-loss: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        errors.print("stopped; the same command continues where it was", highlight=False)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
