"""The tuned values of each task and loss, and how they were found.

``tuned.json`` beside this file is shipped; nothing but ``python -m spherical_loss.experiments.tuning.ship`` writes it.
``spherical-loss tune`` writes one in its ``--out`` folder, which ``compare`` and ``reproduce`` with that folder prefer:

    {"digits": {"taylor": {"values": {"lr": 0.05},
                           "found": {"monitor": "loss", "best": 0.08, "trials": 20, "epochs": 40, "settings": {}}}}}

``settings`` are those of the search that differ from the task's defaults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.training.settings import Settings

SHIPPED = Path(__file__).with_name("tuned.json")


def tuned_in(out: Path) -> Path:
    """The file in an ``--out`` folder to which ``tune`` writes its values."""
    return out / "tuned.json"


def read_tuned(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and create it again with 'spherical-loss tune'") from error


def tuned_values(task: str, loss: str, settings: Settings, path: Path) -> dict[str, float]:
    """The tuned values of ``loss`` on ``task``; empty if it was never tuned, or only for a network of another kind.

    Networks of all widths and numbers of layers are of one kind; those without a hidden layer, or with other activations, are
    of another.

    >>> tuned_values("no such task", "taylor", Settings(), SHIPPED)
    {}
    """
    entry = read_tuned(path).get(task, {}).get(loss)
    if entry is None:
        return {}
    searched = {**entry["found"].get("settings", {}), **entry["values"]}
    shallow = searched.get("layers") == 0, getattr(settings, "layers", None) == 0
    same_kind = searched.get("activation", "relu") == settings.activation and shallow[0] == shallow[1]
    return entry["values"] if same_kind else {}


def store_tuned(task: str, loss: str, entry: dict[str, Any], path: Path) -> None:
    """Store the values of one task and loss, and how they were found, in the file; one process at a time."""
    from spherical_loss.experiments.files.atomic import write_json  # imports torch, which the command line has not imported yet
    from spherical_loss.experiments.files.locks import locked

    with locked(path.with_name(path.name + ".lock")):
        tuned = read_tuned(path)
        tuned.setdefault(task, {})[loss] = entry
        write_json(path, {name: dict(sorted(tuned[name].items())) for name in sorted(tuned)})
