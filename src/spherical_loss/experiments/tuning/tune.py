"""``spherical-loss tune``: search the learning rate, and a loss's own options, on the validation set with Optuna.

Successive halving decides how long a trial lasts: it pauses after 1, 3, 9, ... epochs, and continues if its validation is among
the best third of all trials at that point. So most of the budget goes to rates that are good after many epochs; trials of one
epoch favour the largest rate that does not diverge yet. Reference: L. Li et al., A System for Massively Parallel Hyperparameter
Tuning, 2020 (ASHA).

The study is in a database (SQLite by default), so the same command continues it: finished trials are kept, and a trial
whose process was killed is queued again and resumes from its run's checkpoint. Several processes, on several machines, may
work on one study in PostgreSQL at the same time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState
from rich.console import Console
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.failures import silent_threads
from spherical_loss.experiments.files.locks import locked
from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.options import Tune, TuneHead
from spherical_loss.experiments.running.progress import make_display
from spherical_loss.experiments.running.train_all import Results, train_all
from spherical_loss.experiments.running.workers import Workers, open_workers
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.settings import (
    LanguageSettings,
    Run,
    Settings,
    as_recorded,
    check,
    check_loss,
    resolved,
    with_threads,
)
from spherical_loss.experiments.training.tasks import TASKS, Task, open_values
from spherical_loss.experiments.tuning.tuned import store_tuned, tuned_in

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
HEARTBEAT = 10  # seconds; a trial is taken for dead after two without a sign of life


def tune(options: Tune, console: Console) -> None:
    """``spherical-loss tune``: search for one loss, or for one after the other; the best values go to ``tuned.json`` in
    ``options.out``."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    settings = with_threads(options.settings, options.workers, options.cluster)
    if isinstance(options, TuneHead) and isinstance(settings, LanguageSettings):
        settings = dataclasses.replace(settings, head=options.head)
    losses = [options.loss] if options.loss is not None else all_losses(options.task, settings)
    if options.loss is None:
        say(f"no --loss is given: all of {options.task} are searched, one after the other: {', '.join(losses)}")
    path = tuned_in(options.out)
    with open_workers(options.workers, options.cluster) as workers:
        for loss in losses:
            entry = search(loss, dataclasses.replace(options, settings=settings), console, workers)
            store_tuned(options.task, loss, entry, path)
            text = ", ".join(f"{key} = {value:g}" for key, value in entry["values"].items())
            say(f"{loss} on {options.task}: {text} -> {path}")


def all_losses(task: str, settings: Settings) -> list[str]:
    """The losses that ``compare`` trains on the task, and that work with the head."""
    head = getattr(settings, "head", "dense")
    return [loss for loss in TASKS[task].losses if head in LOSSES[loss].heads]


def search(loss: str, options: Tune, console: Console, workers: Workers | None) -> dict[str, Any]:
    """Search until the study has ``options.trials`` finished trials; the best values, and how they were found.

    A trial is ``options.runs`` runs with consecutive seeds from ``options.seed``, judged by the mean of their best validations
    (:func:`judged_by`) after each of the :func:`rungs`; a trial of which any run diverges counts as infinitely bad, since a
    single lucky seed favours the largest rate that does not quite diverge. The test set is not used.

    The ``workers`` make the runs of a trial at the same time, and, if there are more of them, several trials. A search with
    several trials at a time, here or in other processes, depends on the order in which they finish; the runs never do.
    """
    name, settings, runs = options.task, options.settings, options.runs
    task = TASKS[name]
    check(settings)
    check_loss(loss, settings)
    settings = RECIPES[name].prepare(settings, options.quiet)
    options = dataclasses.replace(options, settings=settings)  # with the checksum of a text: a study is about one
    criterion = judged_by(loss, settings.monitor)

    def objective(trial: optuna.Trial) -> float:
        filled = resolved(suggested(trial, task, loss, settings), loss, open_values(name, loss, settings))
        planned = [Run(name, loss, options.seed + i, filled) for i in range(runs)]
        value = math.inf
        for until in rungs(settings.epochs, options.reduction):
            results: Results = {}
            for together in [[run] for run in planned] if workers is None else [planned]:
                results |= train_all(together, options.out, display, False, workers, until)
                if any(result["status"] == "diverged" for result in results.values()):
                    return math.inf
            values = [judged(result, criterion) for result in results.values()]
            value = math.fsum(values) / runs  # the same in any order, unlike sum
            if all(result["status"] == "finished" for result in results.values()):
                break
            trial.report(value, until)
            if trial.should_prune():
                for run, result in results.items():
                    display.finished(run, result)
                raise optuna.TrialPruned
        return value

    with database_errors(options.storage):
        (options.out / name).mkdir(parents=True, exist_ok=True)
        with locked(options.out / name / "tune.lock"):  # else two that start at once would both make the tables
            study = open_study(loss, options)
        missing = options.trials - len(finished_trials(study))
        with make_display(console, max(0, missing) * runs, options.quiet) as display:
            enough = optuna.study.MaxTrialsCallback(options.trials, states=FINISHED)
            at_once = 1 if workers is None else max(1, workers.count // runs)
            while (missing := options.trials - len(finished_trials(study))) > 0:
                study.optimize(objective, n_trials=missing, n_jobs=min(at_once, missing), callbacks=[enough])
        let_go_of_dead_trials(study)
        best, trials = study.best_trial, len(finished_trials(study))
    if best.value is None or not math.isfinite(best.value):
        raise UserError(f"every trial of {loss} on {name} diverged; the range of the learning rate is {task.lr_range}")
    values = {key: three_digits(value) for key, value in best.params.items()}
    found = {"monitor": criterion, "best": best.value, "trials": trials, "runs": runs, "epochs": settings.epochs}
    found |= {"reduction": options.reduction, "settings": given(settings, task.settings)}
    return {"values": values, "found": found}


def rungs(epochs: int, reduction: int) -> list[int]:
    """The numbers of epochs after which trials are compared; the last is the end.

    >>> rungs(40, 3), rungs(40, 1)
    ([1, 3, 9, 27, 40], [40])
    """
    found = [1]
    while reduction > 1 and found[-1] * reduction < epochs:
        found.append(found[-1] * reduction)
    return [*found, epochs] if reduction > 1 and epochs > 1 else [epochs]


def judged(result: dict[str, Any], criterion: str) -> float:
    """The best validation of a run by ``criterion``; by the loss if it does not have that metric."""
    value = result["valid"][criterion]
    return result["valid"]["loss"] if value is None else value


def given(settings: Settings, default: Settings) -> dict[str, Any]:
    """The settings that differ from the task's defaults, without those that never affect a rate."""
    both = dataclasses.asdict(settings), dataclasses.asdict(default)
    incidental = {"epochs", "patience", "device", "threads", "corpus", "lr"}
    return {key: value for key, value in both[0].items() if value != both[1][key] and key not in incidental}


def judged_by(loss: str, monitor: str) -> str:
    """The metric that compares trials: the one that the runs monitor; for the Z-loss the error rate, since the value of
    the loss depends on the a and b that are searched."""
    return "error" if loss == "z" else monitor


@contextmanager
def database_errors(storage: str | None) -> Iterator[None]:
    """Turn errors of the database into a message; the runs themselves are kept in any case."""
    try:
        with silent_threads(SQLAlchemyError, optuna.exceptions.StorageInternalError):  # those of the heartbeats
            yield
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise UserError("--storage postgresql://... needs a driver: pip install 'spherical-loss[postgres]'") from error
    except Exception as error:
        reason = database_error(error)
        if reason is None:
            raise
        where = without_password(storage, storage) if storage else "the SQLite file"
        reason = without_password(reason, storage or "")
        raise UserError(f"the study's database, {where}, cannot be used: {reason}; see --storage") from None


def database_error(error: BaseException | None) -> str | None:
    """What the database says, if that is what led to the error: Optuna has errors of its own on top when a server is gone."""
    found = None
    while error is not None:
        if isinstance(error, (ImportError, SQLAlchemyError, optuna.exceptions.StorageInternalError)):
            found = str(error).splitlines()[0]
        error = error.__cause__ or error.__context__
    return found


def without_password(text: str, storage: str) -> str:
    """``text`` with stars for the password of ``storage``, and for any part of one that was cut at the wrong place.

    >>> without_password("no host b@c in postgresql://me:a%40b@c/x?password=kN4", "postgresql://me:a%40b@c/x?password=kN4")
    'no host b@c in postgresql://me:***@c/x?password=***'
    """
    secrets = re.findall(r"(?:://[^:/@]*:)(.*)@|password=([^&\s]*)", storage)
    found = {secret for pair in secrets for secret in pair if secret}
    found |= {unquote(secret) for secret in found}
    found |= {part for secret in found for part in re.split("[@:/]", secret) if len(part) > 2}
    for secret in sorted(found, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def let_go_of_dead_trials(study: optuna.Study) -> None:
    """Let trials whose process has died fail once they have missed two heartbeats; otherwise they would stay active."""
    deadline = time.monotonic() + 2 * HEARTBEAT + 2
    while study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)) and time.monotonic() < deadline:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats
            optuna.storages.fail_stale_trials(study)
        time.sleep(0.2)


def suggested(trial: optuna.Trial, task: Task, loss: str, settings: Settings) -> Settings:
    """``settings`` with the trial's values: learning rate, the loss's options, and :func:`searched` settings, such as
    layers and widths."""
    low, high = task.lr_range
    values: dict[str, Any] = {"lr": trial.suggest_float("lr", low, high, log=True)}
    for key, (a, b) in LOSSES[loss].search.items():
        values[key] = trial.suggest_float(key, a, b, log=True)
    for key, (first, last) in searched(task, settings).items():
        suggest: Any = trial.suggest_int if isinstance(first, int) else trial.suggest_float
        values[key] = suggest(key, first, last, log=True)
    # Rounded, so that the stored values are exactly those of the run that was measured.
    exact: dict[str, Any] = {key: three_digits(value) for key, value in values.items()}
    return dataclasses.replace(settings, **exact)


def searched(task: Task, settings: Settings) -> dict[str, tuple[int, int] | tuple[float, float]]:
    """The ranges in ``task.search`` of those settings that are None."""
    return {key: limits for key, limits in task.search.items() if getattr(settings, key) is None}


def three_digits(value: float) -> float:
    """Three digits, which is more than a search can resolve.

    >>> three_digits(0.0123456), three_digits(512)
    (0.0123, 512)
    """
    return value if isinstance(value, int) else float(f"{value:.3g}")


def finished_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials that were trained to the end, have diverged, or were pruned."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def open_study(loss: str, options: Tune) -> optuna.Study:
    """The study of these settings, new or from the database; its name has a hash of the settings, like a run's."""
    name, seed, storage = options.task, options.seed, options.storage
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a warning would print the traceback of what is raised anyway
    if storage is None:
        (options.out / name).mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{options.out / name / 'tune.db'}"
    storage = re.sub("^postgres(ql)?://", "postgresql+psycopg://", storage)  # the driver of our extra
    try:
        make_url(storage)
    except ValueError as error:  # a port that is not a number
        raise ArgumentError(str(error)) from error
    # Without those that are None, so that new settings do not rename old studies.
    settings = {key: value for key, value in as_recorded(options.settings).items() if value is not None}
    criterion = judged_by(loss, options.settings.monitor)
    text = json.dumps([seed, options.runs, options.reduction, criterion, settings], sort_keys=True)
    study_name = f"{name}-{loss}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats
        retry = RetryHeartbeatStaleTrialCallback()
        database = RDBStorage(storage, heartbeat_interval=HEARTBEAT, heartbeat_stale_trial_callback=retry)
        study = optuna.create_study(storage=database, study_name=study_name, load_if_exists=True)
    if options.reduction > 1:
        study.pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=options.reduction)
    else:
        study.pruner = optuna.pruners.NopPruner()
    # A sampler with the same seed as before would suggest the same first values again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.get_trials(deepcopy=False)), n_startup_trials=5)
    if not study.trials:  # start from the given or known values, and rates around them
        known = {**open_values(name, loss, options.settings), **settings}
        task = TASKS[name]
        low, high = task.lr_range
        others = [*LOSSES[loss].search, *(key for key in searched(task, options.settings) if key in known)]
        for factor in (1, 3, 1 / 3, 10):
            lr = min(max(factor * known["lr"], low), high)
            study.enqueue_trial({"lr": lr, **{key: known[key] for key in others}}, skip_if_exists=True)
    return study
