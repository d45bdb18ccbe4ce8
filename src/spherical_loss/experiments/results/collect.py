"""``spherical-loss collect``: add finished runs and tuning studies of an ``--out`` folder to the store of results."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.results.store import Study, add_runs, add_studies, line_of, read_config, run_folders
from spherical_loss.experiments.training.records import check_study, of_language
from spherical_loss.experiments.training.run_folder import read_result
from spherical_loss.experiments.training.tasks import TASKS
from spherical_loss.experiments.tuning.tune import database_error, finished_trials, judged, judged_by, three_digits

Config = dict[str, Any]
Group = list[Path]


def collect(runs: Path, results: Path, trials: bool, say: Callable[[str], None]) -> None:
    """Add the runs and studies of ``runs`` to ``results``. Runs of trials are left out unless ``trials``."""
    configs = {folder: read_config(folder) for folder in run_folders(runs)}
    databases = sorted(runs.glob("*/tune.db"))
    if not configs and not databases:
        raise UserError(
            f"{runs} has no finished runs (TASK/RUN/result.json); give the --out folder of compare, reproduce or tune"
        )
    found = [pair for path in databases for pair in read_checked(path, configs)]
    left_out = set() if trials else {folder for _, folders in found for folder in folders}
    lines = [line_of(folder) for folder in configs if folder not in left_out]
    added, studies = add_runs(results, lines), add_studies(results, [study for study, _ in found])
    say(f"{runs}: {added} new of {len(lines)} runs, {studies} new of {len(found)} studies -> {results}")
    if left_out:
        say(
            f"{len(left_out)} runs are trials of these studies and are not added to {results / 'runs'}; --trials adds them, too"
        )


def read_checked(path: Path, configs: dict[Path, Config]) -> list[tuple[Study, Group]]:
    """:func:`read_database`, or a message that names the file."""
    try:
        if path.parent.name not in TASKS:
            raise ValueError(f"there is no task {path.parent.name!r}")
        found = read_database(path, configs)
        for study, _ in found:
            check_study(vars(study))
        return found
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else database_error(error)
        if reason is None:
            raise
        raise UserError(
            f"{path} is no database of 'spherical-loss tune' ({reason}); move it to collect the runs alone"
        ) from error


def read_database(path: Path, configs: dict[Path, Config]) -> list[tuple[Study, Group]]:
    """The studies of an SQLite file of ``spherical-loss tune``, and the folders of their trials' runs."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage, task = f"sqlite:///{path}", path.parent.name
    found = []
    for name in sorted(optuna.get_all_study_names(storage)):
        loss = name.removeprefix(f"{task}-").rpartition("-")[0]
        trials = [
            {
                "number": trial.number,
                "values": {key: three_digits(value) for key, value in trial.params.items()},
                "value": trial.value if trial.value is not None and math.isfinite(trial.value) else None,
                **({"pruned": trial.last_step} if trial.state == TrialState.PRUNED else {}),
            }
            for trial in finished_trials(optuna.load_study(study_name=name, storage=storage))
        ]
        if not trials:
            continue
        groups = alike({f: c for f, c in configs.items() if (c["task"], c["loss"]) == (task, loss)})
        folders = [f for trial in trials for group in groups if is_trial(trial, group, configs) for f in group]
        common = in_common([configs[folder]["settings"] for folder in folders])
        monitor = judged_by(loss, common.get("monitor", TASKS[task].settings.monitor))
        found.append((Study(name, task, loss, monitor, common, trials), folders))
    return found


def alike(configs: dict[Path, Config]) -> list[Group]:
    """Group the folders of runs that differ in the seed alone, in the order of the seeds."""
    groups: dict[str, Group] = {}
    for folder in sorted(configs, key=lambda folder: configs[folder]["seed"]):
        groups.setdefault(str(configs[folder]["settings"]), []).append(folder)
    return list(groups.values())


def is_trial(trial: dict[str, Any], group: Group, configs: dict[Path, Config]) -> bool:
    """Whether these are the trial's runs: they have its values and its mean validation. (Other runs may have its values, too,
    for example longer ones that were trained later.)"""
    settings, loss = configs[group[0]]["settings"], configs[group[0]]["loss"]
    if any(settings.get(key) != value for key, value in trial["values"].items()):
        return False
    results = [read_result(folder / "result.json", of_language(settings)) for folder in group]
    if any(result["status"] == "diverged" for result in results):
        return trial["value"] is None
    values = [judged(result, judged_by(loss, settings["monitor"])) for result in results]
    return trial["value"] is not None and math.isclose(math.fsum(values) / len(values), trial["value"], rel_tol=1e-9)


def in_common(all_settings: list[dict[str, Any]]) -> dict[str, Any]:
    """
    >>> in_common([{"lr": 0.1, "epochs": 2}, {"lr": 0.2, "epochs": 2}])
    {'epochs': 2}
    """
    first, *others = all_settings or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
