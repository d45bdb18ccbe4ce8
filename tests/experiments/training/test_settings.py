"""A run's identity: stored runs must be found again, whatever settings are added later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.tasks import TASKS

STORED = sorted((Path(__file__).parents[3] / "results" / "runs").glob("*.jsonl"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_runs_keep_their_names(path: Path) -> None:
    for line in map(json.loads, path.read_text().splitlines()):
        stored = line["run"]
        values = {key: value[0] if key == "head" else value for key, value in stored["settings"].items()}
        settings = type(TASKS[stored["task"]].settings)(**values)
        assert Run(stored["task"], stored["loss"], stored["seed"], settings, stored.get("ranks", 1)).name == line["name"]


def test_there_are_stored_runs() -> None:
    assert STORED
