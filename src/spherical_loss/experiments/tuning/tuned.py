"""The tuned values: data that ``spherical-loss tune`` writes, and ``compare`` and ``reproduce`` read.

``tuned.json`` holds, for each task and loss, the values and how they were found:

    {"digits": {"taylor": {"values": {"lr": 0.05},
                           "found": {"monitor": "loss", "best": 0.08, "trials": 20, "epochs": 40, "settings": {}}}}}

``settings`` are those of the search that were not the task's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.atomic import write_json
from spherical_loss.experiments.files.locks import locked
from spherical_loss.experiments.training.settings import Settings

TUNED = Path(__file__).with_name("tuned.json")


def read_tuned(path: Path | None = None) -> dict[str, Any]:
    path = path or TUNED
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and make it again with 'spherical-loss tune'") from error


def tuned_values(task: str, loss: str, settings: Settings, path: Path | None = None) -> dict[str, float]:
    """The tuned values of ``loss`` on ``task``; none if it was never tuned, or for a network of another kind.

    Widths and numbers of layers are of one kind, and no hidden layer at all is of another, as are other activations.

    >>> tuned_values("no such task", "taylor", Settings())
    {}
    """
    entry = read_tuned(path).get(task, {}).get(loss)
    if entry is None:
        return {}
    searched = {**entry["found"].get("settings", {}), **entry["values"]}
    shallow = searched.get("layers") == 0, getattr(settings, "layers", None) == 0
    same_kind = searched.get("activation", "relu") == settings.activation and shallow[0] == shallow[1]
    return entry["values"] if same_kind else {}


def store_tuned(task: str, loss: str, values: dict[str, float], found: dict[str, Any], path: Path | None = None) -> None:
    """Put the values of one task and loss in the file, in the order of the alphabet; one process at a time."""
    path = path or TUNED
    try:
        with locked(path.with_name(path.name + ".lock")):
            tuned = read_tuned(path)
            tuned.setdefault(task, {})[loss] = {"values": values, "found": found}
            ordered = {name: dict(sorted(tuned[name].items())) for name in sorted(tuned)}
            write_json(path, ordered)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): give another file with --store; {loss} on {task} is best with "
            f"{values}, and the same command finds that again at once"
        ) from error
