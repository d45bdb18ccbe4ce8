"""The search for learning rates: finds, stores, continues."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from optuna.trial import FixedTrial, TrialState

from spherical_loss.experiments import cli
from spherical_loss.experiments.options import Tune
from spherical_loss.experiments.running import compare
from spherical_loss.experiments.training import tasks, train
from spherical_loss.experiments.training.settings import LanguageSettings, Settings
from spherical_loss.experiments.training.tasks import TASKS, open_values
from spherical_loss.experiments.tuning import tune, tuned
from spherical_loss.experiments.tuning.ship import ship
from tests.support.processes import exit_code, start

SMALL = ("--epochs", "1", "--batch-size", "200", "--runs", "1", "--quiet")


def tune_digits(folder: Path, loss: str, trials: int, *options: str) -> int:
    arguments = ["tune", "digits", "--loss", loss, "--trials", str(trials), "--out", str(folder / "runs")]
    return cli.main([*arguments, *SMALL, *options])


def study(folder: Path, loss: str):
    settings = dataclasses.replace(TASKS["digits"].settings, epochs=1, batch_size=200)
    return tune.open_study(loss, Tune(task="digits", settings=settings, runs=1, out=folder / "runs"))


def test_the_best_trial_is_stored(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "spherical", 6) == 0
    stored = json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]["spherical"]
    trials = study(tmp_path, "spherical").get_trials(states=(TrialState.COMPLETE,))
    best = min(trials, key=lambda trial: trial.value)
    assert stored["values"] == {key: tune.three_digits(value) for key, value in best.params.items()}
    assert set(stored["values"]) == {"lr", "eps"}
    found = {"monitor": "loss", "best": best.value, "trials": 6, "runs": 1, "epochs": 1}
    assert stored["found"] == {**found, "reduction": 3, "settings": {"batch_size": 200}}
    # the first is the known rate, and no run was made twice
    assert len(list((tmp_path / "runs/digits").glob("spherical-*/result.json"))) == 6


def test_a_trial_may_be_several_runs(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "softmax", 2, "--runs", "3") == 0
    found = json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]["softmax"]
    best = {}
    for path in (tmp_path / "runs/digits").glob("softmax-*/result.json"):
        lr = json.loads((path.parent / "config.json").read_text())["settings"]["lr"]
        best.setdefault(lr, []).append(json.loads(path.read_text())["valid"]["loss"])
    assert {len(values) for values in best.values()} == {3}
    means = {lr: sum(values) / 3 for lr, values in best.items()}
    assert found["found"]["best"] == pytest.approx(min(means.values()))
    assert found["values"]["lr"] == min(means, key=means.get)


def test_bad_trials_are_given_up_early(tmp_path: Path) -> None:
    """Every decision is made again here, from the values that were reported, in the order of the trials."""
    assert tune_digits(tmp_path, "softmax", 9, "--epochs", "4") == 0
    settings = dataclasses.replace(TASKS["digits"].settings, epochs=4, batch_size=200)
    trials = tune.open_study("softmax", Tune(task="digits", settings=settings, runs=1, out=tmp_path / "runs")).get_trials()
    trials = [trial for trial in trials if trial.state.is_finished()]
    assert len(trials) == 9
    reached: dict[int, list[float]] = {1: [], 3: []}
    for trial in trials:
        expected = TrialState.COMPLETE
        for epochs, values in reached.items():
            value = trial.intermediate_values[epochs]
            values.append(value)
            if value > sorted(values)[max(0, len(values) // 3 - 1)]:  # not among the best third, or not the best of two
                expected = TrialState.PRUNED
                assert set(trial.intermediate_values) == {k for k in reached if k <= epochs}
                break
        assert trial.state == expected
    pruned = sum(trial.state == TrialState.PRUNED for trial in trials)
    assert 0 < pruned < 9
    results = list((tmp_path / "runs/digits").glob("softmax-*/result.json"))
    assert len(results) == 9 - pruned  # the others have a checkpoint, and could continue
    best = min(json.loads(path.read_text())["valid"]["loss"] for path in results)
    assert json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]["softmax"]["found"]["best"] == best


def test_without_reduction_every_trial_is_trained_to_the_end(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "softmax", 4, "--epochs", "2", "--reduction", "1") == 0
    histories = list((tmp_path / "runs/digits").glob("softmax-*/metrics.jsonl"))
    assert [len(path.read_text().splitlines()) for path in histories] == [2] * 4


def test_the_same_command_continues(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "taylor", 3) == 0
    first = [trial.params for trial in study(tmp_path, "taylor").trials if trial.state == TrialState.COMPLETE]
    assert tune_digits(tmp_path, "taylor", 3) == 0
    assert tune_digits(tmp_path, "taylor", 7) == 0
    trials = [trial.params for trial in study(tmp_path, "taylor").trials if trial.state == TrialState.COMPLETE]
    assert len(trials) == 7
    assert trials[:3] == first
    assert len({trial["lr"] for trial in trials}) == 7  # a sampler that starts over would repeat itself


def test_the_search_starts_from_a_given_rate(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "taylor", 1, "--lr", "0.05") == 0
    assert json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]["taylor"]["values"] == {"lr": 0.05}


def test_the_z_loss_is_judged_by_its_error(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "z", 3) == 0
    stored = json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]["z"]
    assert set(stored["values"]) == {"lr", "a", "b"}
    errors = [json.loads(p.read_text())["valid"]["error"] for p in (tmp_path / "runs/digits").glob("z-*/result.json")]
    assert stored["found"]["best"] == min(errors)


def test_diverging_trials_are_infinitely_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "digits", dataclasses.replace(TASKS["digits"], lr_range=(1e-3, 1e6)))
    monkeypatch.setattr(tune, "open_values", lambda task, loss, settings: {"lr": 1e5})
    assert tune_digits(tmp_path, "mse", 2) == 1  # both diverge
    assert not (tmp_path / "runs/tuned.json").exists()
    assert all(trial.value == math.inf for trial in study(tmp_path, "mse").get_trials(states=(TrialState.COMPLETE,)))
    monkeypatch.setattr(tune, "open_values", lambda task, loss, settings: {"lr": 1e-2})
    assert tune_digits(tmp_path, "mse", 12) == 0
    assert json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]["mse"]["values"]["lr"] < 1


def test_compare_uses_the_values_of_its_folder_before_those_that_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SHIPPED", tmp_path / "shipped.json")
    settings, found = TASKS["digits"].settings, tmp_path / "runs" / "tuned.json"

    def planned(**changes: float) -> tuple[float, float]:
        (run,) = compare.plan("digits", ["spherical"], [0], dataclasses.replace(settings, **changes), tuned=found)
        return run.settings.lr, run.settings.eps

    assert planned() == (TASKS["digits"].lr, 0.01)
    tuned.store_tuned("digits", "spherical", {"values": {"lr": 0.2, "eps": 0.3}, "found": {}}, tmp_path / "shipped.json")
    assert planned() == (0.2, 0.3)
    found.parent.mkdir()
    tuned.store_tuned("digits", "spherical", {"values": {"lr": 0.123}, "found": {}}, found)
    assert planned() == (0.123, 0.3)
    assert planned(lr=0.5) == (0.5, 0.3)


def test_a_search_writes_nothing_into_the_package(tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tuned.SHIPPED.parent.rglob("*") if "__pycache__" not in path.parts}
    assert tune_digits(tmp_path, "taylor", 1) == 0
    after = {path: path.stat().st_mtime_ns for path in tuned.SHIPPED.parent.rglob("*") if "__pycache__" not in path.parts}
    assert after == before
    assert set(json.loads((tmp_path / "runs/tuned.json").read_text())["digits"]) == {"taylor"}


def test_a_maintainer_ships_what_was_found(tmp_path: Path) -> None:
    shipped, found = tmp_path / "shipped.json", tmp_path / "tuned.json"
    for loss in ("mse", "taylor"):
        tuned.store_tuned("digits", loss, {"values": {"lr": 1.0}, "found": {}}, shipped)
    tuned.store_tuned("digits", "taylor", {"values": {"lr": 2.0}, "found": {"trials": 3}}, found)
    assert ship(found, shipped) == 1
    assert json.loads(shipped.read_text())["digits"] == {
        "mse": {"values": {"lr": 1.0}, "found": {}},
        "taylor": {"values": {"lr": 2.0}, "found": {"trials": 3}},
    }


def test_without_a_loss_all_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--epochs", "1", "--batch-size", "500", "--trials", "1", "--runs", "1", "--quiet"]
    assert cli.main(["tune", "digits", *small, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"all of digits are searched, one after the other: {', '.join(TASKS['digits'].losses)}" in out
    assert set(json.loads((tmp_path / "tuned.json").read_text())["digits"]) == set(TASKS["digits"].losses)


def test_values_are_for_networks_of_the_kind_that_was_searched(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"

    def found(**settings: object) -> dict[str, float]:
        return tuned.tuned_values("text", "taylor", LanguageSettings(**settings), path)

    tuned.store_tuned("text", "taylor", {"values": {"lr": 1.0}, "found": {"settings": {"activation": "exp"}}}, path)
    assert found(layers=2) == {}
    assert found(layers=2, activation="exp") == {"lr": 1.0}
    tuned.store_tuned("text", "taylor", {"values": {"lr": 1.0}, "found": {"settings": {"layers": 2}}}, path)
    assert found(layers=1) == found() == {"lr": 1.0}
    assert found(layers=0) == {}
    tuned.store_tuned("text", "taylor", {"values": {"lr": 1.0, "layers": 0}, "found": {}}, path)
    assert found(layers=0)["lr"] == 1.0
    assert found(layers=1) == {}


def test_storing_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    tuned.store_tuned("mnist", "taylor", {"values": {"lr": 1.0}, "found": {}}, path)
    tuned.store_tuned("digits", "taylor", {"values": {"lr": 2.0}, "found": {}}, path)
    tuned.store_tuned("mnist", "mse", {"values": {"lr": 3.0}, "found": {}}, path)
    found = {
        (task, loss): tuned.tuned_values(task, loss, Settings(), path)["lr"]
        for task, loss in [("mnist", "taylor"), ("mnist", "mse")]
    }
    assert found == {("mnist", "taylor"): 1.0, ("mnist", "mse"): 3.0}


def test_the_repository_has_values_for_the_papers_mnist_losses() -> None:
    for task, losses in {"digits": TASKS["digits"].losses, "mnist": TASKS["mnist"].losses}.items():
        for loss in losses:
            low, high = TASKS[task].lr_range
            assert low <= tuned.tuned_values(task, loss, Settings(), tuned.SHIPPED)["lr"] <= high
    assert tuned.tuned_values("mnist", "spherical", Settings(), tuned.SHIPPED)["eps"] > 0


def test_a_bad_database_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.db").write_text("this is not a database, whatever its name says" * 100)
    assert tune_digits(tmp_path, "taylor", 1, "--storage", f"sqlite:///{tmp_path}/text.db") == 1
    assert "text.db, cannot be used" in capsys.readouterr().err
    assert tune_digits(tmp_path, "taylor", 1, "--storage", "nonsense") == 1
    assert "nonsense, cannot be used" in capsys.readouterr().err


def search_without_end(arguments: list[str]) -> None:
    tune.HEARTBEAT = 1
    train.train_epoch = lambda *_: time.sleep(600)
    cli.main(arguments)


def test_a_killed_trial_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["tune", "digits", "--loss", "taylor", "--trials", "2", "--out", str(tmp_path / "runs")]
    process = start(search_without_end, [*arguments, *SMALL])
    began = time.monotonic()
    while not list((tmp_path / "runs/digits").glob("taylor-*/metrics.jsonl")):  # the first trial is under way
        assert process.is_alive()
        assert time.monotonic() - began < 120
        time.sleep(0.05)
    process.kill()
    assert exit_code(process) == -signal.SIGKILL
    monkeypatch.setattr(tune, "HEARTBEAT", 1)
    (running,) = [trial for trial in study(tmp_path, "taylor").trials if trial.state == TrialState.RUNNING]
    time.sleep(3)  # two heartbeats and a little
    assert tune_digits(tmp_path, "taylor", 5) == 0
    finished = study(tmp_path, "taylor").get_trials(states=(TrialState.COMPLETE,))
    assert running.params in [trial.params for trial in finished]
    assert len(finished) == 5


def test_what_is_given_is_not_searched() -> None:
    task = TASKS["ptb"]
    trial = FixedTrial({"lr": 0.5, "width": 500, "output_rate": 12.345})
    found = tune.suggested(trial, task, "taylor", dataclasses.replace(task.settings, layers=2))
    assert (found.lr, found.layers, found.width, found.output_rate) == (0.5, 2, 500, 12.3)


def test_the_search_of_a_language_model_starts_from_what_is_known(tmp_path: Path) -> None:
    given = dataclasses.replace(TASKS["ptb"].settings, width=300, output_rate=12.0)
    options = Tune(task="ptb", settings=given, out=tmp_path)
    known = open_values("ptb", "spherical", options.settings)
    queued = [trial.system_attrs["fixed_params"] for trial in tune.open_study("spherical", options).trials]
    assert queued[0] == {key: known[key] for key in ("lr", "eps", "layers")}  # the others are given
    assert [trial["lr"] / known["lr"] for trial in queued] == pytest.approx([1, 3, 1 / 3, 10])
    assert {trial["layers"] for trial in queued} == {known["layers"]}


def tune_with_little_space(folder: Path, size: int) -> None:
    """No file can grow beyond ``size``: a write there fails, as on a full disk."""
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    raise SystemExit(tune_digits(folder, "taylor", 40))


def test_a_full_disk_is_a_message(tmp_path: Path) -> None:
    assert tune_digits(tmp_path, "taylor", 1) == 0
    (database,) = tmp_path.rglob("tune.db")
    for size in (database.stat().st_size // 2, database.stat().st_size):  # at once, and after some trials
        assert exit_code(start(tune_with_little_space, tmp_path, size)) == 1
        said = (tmp_path / "said").read_text()
        assert "the study's database, the SQLite file, cannot be used" in said
        assert "Traceback" not in said
    assert len(list(tmp_path.rglob("result.json"))) > 1  # which are kept
