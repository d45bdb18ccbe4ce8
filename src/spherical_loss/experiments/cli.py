"""The command line: ``spherical-loss COMMAND ...``. It parses the options and passes them to the modules that do the work.

Exit codes: 0, all went well; 1, something stopped the command (the message says what); 2, the command was not understood, or a
value makes no sense; 130, interrupted. Until the command is understood, nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Union

import tyro
from rich.console import Console

import spherical_loss
from spherical_loss.experiments.errors import UsageError, UserError, choose
from spherical_loss.experiments.options import Collect, Compare, CompareHeads, Get, Options, Report, Tune, TuneHead
from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.table import output_console
from spherical_loss.experiments.training.settings import LanguageSettings, Settings
from spherical_loss.experiments.training.tasks import TASKS


@dataclass(frozen=True)
class Names:
    """The names that may occur at one place of the command line: for each a line of help, and what follows it, which is more
    names or the default options."""

    kind: str
    choices: dict[str, tuple[str, Options | Names]]


def comparison(task: str, settings: Settings, **values: Any) -> Compare:
    options = CompareHeads if isinstance(settings, LanguageSettings) else Compare
    return options(task=task, settings=settings, **values)


def compare_options(name: str) -> tuple[str, Compare]:
    task = TASKS[name]
    options = comparison(name, task.settings, name=name, title=task.summary, losses=task.losses, runs=task.runs)
    return task.summary, options


def reproduce_options(name: str) -> tuple[str, Compare]:
    table = TABLES[name]
    settings = dataclasses.replace(TASKS[table.task].settings, **table.settings)
    title, folder = f"Table {table.number}: {table.title}", f"reproduce-{name}"
    return title, comparison(table.task, settings, name=folder, title=title, losses=table.losses, runs=table.runs)


def tune_options(name: str) -> tuple[str, Tune]:
    task = TASKS[name]
    options = TuneHead if isinstance(task.settings, LanguageSettings) else Tune
    return task.summary, options(task=name, settings=task.settings)


DATASETS = {
    "mnist": "MNIST, 12 MB",
    "cifar10": "CIFAR-10, 170 MB",
    "cifar100": "CIFAR-100, 169 MB",
    "ptb": "Penn Treebank: says where it comes from, and where to put it",
    "one-billion-word": "One Billion Word: the same",
    "imdb": "IMDB reviews: the same",
    "simlex": "SimLex-999: the same",
}
COMMANDS = Names(
    "command",
    {
        "compare": ("Compare losses on a task (default: digits).", Names("task", {n: compare_options(n) for n in TASKS})),
        "reproduce": (
            "Make a table of the paper with its settings.",
            Names("table", {n: reproduce_options(n) for n in TABLES}),
        ),
        "tune": ("Search learning rates and options on a task.", Names("task", {n: tune_options(n) for n in TASKS})),
        "data": (
            "Fetch a data set: spherical-loss data get mnist.",
            Names(
                "action",
                {
                    "get": (
                        "Fetch a data set from its official mirrors; one that is there already is not fetched again.",
                        Names("dataset", {name: (text, Get(dataset=name)) for name, text in DATASETS.items()}),
                    )
                },
            ),
        ),
        "collect": ("Add finished runs to the results: spherical-loss collect runs.", Collect()),
        "report": ("Turn the results into an HTML page.", Report()),
    },
)


def subcommands(names: Names) -> Any:
    """The type that tyro parses: a union of subcommands."""
    found = []
    for name, (text, leads_to) in names.choices.items():
        if isinstance(leads_to, Names):
            found.append(Annotated[subcommands(leads_to), tyro.conf.subcommand(name, description=text)])
        else:
            found.append(Annotated[type(leads_to), tyro.conf.subcommand(name, default=leads_to, description=text)])
    if len(found) == 1:  # a union of one is none
        found.append(Annotated[None, tyro.conf.Suppress])
    return Union[tuple(found)]  # noqa: UP007


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command. tyro prints the help; an error is one line."""
    arguments = with_default_task(arguments)
    if not {"-h", "--help"} & set(arguments):
        check_names(arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(
                subcommands(COMMANDS),
                args=arguments,
                prog="spherical-loss",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code:
            raise UsageError(one_line(said.getvalue())) from None
        raise
    if unknown:
        choose("option", unknown[0], valid_options(options))
    return options


def with_default_task(arguments: Sequence[str]) -> list[str]:
    """
    >>> with_default_task(["compare", "--runs", "2"])
    ['compare', 'digits', '--runs', '2']
    >>> with_default_task([])
    ['--help']
    """
    if not arguments:
        return ["--help"]
    command, *rest = arguments
    if command == "compare" and (not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help"))):
        rest.insert(0, "digits")
    return [command, *rest]


def check_names(arguments: Sequence[str]) -> None:
    """Raise a :class:`UsageError` that lists the valid names, if one is missing or wrong."""
    names: Options | Names = COMMANDS
    for i in range(len(arguments) + 1):
        if not isinstance(names, Names):
            return
        if i == len(arguments) or arguments[i].startswith("-"):
            command = " ".join(["spherical-loss", *arguments[:i]])
            raise UsageError(f"{command} needs a {names.kind}; the valid ones are: {', '.join(names.choices)}")
        names = names.choices[choose(names.kind, arguments[i], names.choices)][1]


def one_line(box: str) -> str:
    """The error that tyro prints in a box, up to its first rule, without the help; in ASCII, the box has no sides.

    >>> print(one_line("╭─ Value error ─╮\\n│ Error parsing │\\n│ --a: no int   │\\n│ ───────────── │\\n│ the help │\\n╰───╯"))
    Error parsing --a: no int
    >>> print(one_line("Value error\\n-----------\\nError parsing\\n--a: no int\\n-----------\\nthe help"))
    Error parsing --a: no int
    """
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).strip().splitlines()]
    _, *inside = (line for line in lines if not line.startswith("╰"))  # the first one is the title
    parts: list[list[str]] = [[]]  # between the rules
    for line in inside:
        if re.fullmatch("[─-]+", line):
            parts.append([])
        elif line:
            parts[-1].append(line)
    return in_words(" ".join(next(part for part in parts if part)))


KINDS = {"INT": "a whole number", "FLOAT": "a number"}


def in_words(error: str) -> str:
    """A value of the wrong type, without the names of types; other errors as they are.

    >>> in_words("Error parsing --runs: invalid literal for int() with base 10: 'many'")
    "--runs is 'many', but must be a whole number"
    >>> in_words("Error parsing --vocabulary: no type matching INT|{full} could be instantiated from ['x']. Got errors: ...")
    "--vocabulary is 'x', but must be a whole number or full"
    """
    several = re.match(r"Error parsing (\S+): no type matching (\S+) could be instantiated from \[('.*?')\]", error)
    if several:
        kinds = [KINDS.get(kind, kind.strip("{}")) for kind in several[2].split("|") if kind != "{None}"]
        return f"{several[1]} is {several[3]}, but must be {' or '.join(kinds)}"
    one = re.match(r"Error parsing (\S+): (?:invalid literal for|could not convert string to) (int|float)[^']*('.*')", error)
    return f"{one[1]} is {one[3]}, but must be {KINDS[one[2].upper()]}" if one else error


def valid_options(instance: Any) -> list[str]:
    return [*sorted(f"--{name.replace('_', '-')}" for name in option_names(instance)), "--help"]


def option_names(instance: Any) -> list[str]:
    names = []
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            names += option_names(value)
        elif "Suppress" not in str(field.type) and "Fixed" not in str(field.type):
            names.append(field.name)
    return names


def do(options: Options, console: Console) -> None:
    """Imports what the command needs, and no more: torch, Optuna and matplotlib take seconds."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    if isinstance(options, Compare):
        from spherical_loss.experiments.running.compare import compare
        from spherical_loss.experiments.training.distributed import joined

        with joined():
            compare(options, console)
    elif isinstance(options, Tune):
        from spherical_loss.experiments.tuning.tune import tune

        tune(options, console)
    elif isinstance(options, Get):
        from spherical_loss.experiments.data.download import get
        from spherical_loss.experiments.data.folder import data_folder

        get(options.dataset, data_folder(), not options.quiet, (lambda text: None) if options.quiet else say)
    elif isinstance(options, Collect):
        from spherical_loss.experiments.results.collect import collect

        for folder in options.folders:
            collect(folder, options.results, options.trials, say)
    else:
        from spherical_loss.experiments.report.write_report import write_report

        page = options.out or options.results / "report.html"
        write_report(options.results, page, options.readme)
        say(f"report: {page}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors that a user can mend are one message, not a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    rank = int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None  # of several processes, under torchrun
    silent = bool(rank)
    console, errors = output_console(silent), Console(stderr=True, quiet=silent)
    tell = partial(errors.print, style="red", markup=False, highlight=False, soft_wrap=True)
    try:
        if list(arguments) == ["--version"]:
            console.print(f"spherical-loss {spherical_loss.__version__}", highlight=False)
            return 0
        options = parse(arguments)
        if rank is not None and (not isinstance(options, Compare) or options.workers or options.cluster):
            raise UsageError("under torchrun the processes train one run together: compare and reproduce, without --workers")
        options.check()
        do(options, console)
    except UserError as error:
        tell(f"spherical-loss: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter still writes in the end
        return 1
    except OSError as error:  # of this process alone, maybe
        from spherical_loss.experiments.files.failures import explain

        errors.quiet = False
        tell(f"spherical-loss: {'' if rank is None else f'rank {rank}: '}{explain(error)}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
