"""The store takes what is new, once, in order, and gives back what the runs wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from spherical_loss.experiments.cli import main
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.results.collect import collect
from spherical_loss.experiments.results.store import Study, add_runs, add_studies, columns, read_runs, read_studies, records
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import ImageSettings, LanguageSettings, Run
from spherical_loss.experiments.training.train import train
from tests.experiments.results.stores import diverged_line, image_line, study

VALID = {"loss": 0.2, "nll": None, "error": 0.123456789}
RECORD = {"epoch": 1, "lr": 0.1, "train_loss": 1 / 3, "valid": VALID, "seconds": 1.5, "train_seconds": 1.0}
SECONDS = {"seconds_per_epoch": 1.5, "seconds_to_best": 1.5}


def finished_folder(out: Path, run: Run, error: float = 0.123456789, epochs: int = 2, **metrics: float) -> Path:
    """What training leaves behind."""
    folder = RunFolder(out, run)
    folder.create()
    valid = {"loss": 0.2, "nll": None, "error": error, **metrics}
    for epoch in range(epochs):
        folder.log({**RECORD, "epoch": epoch + 1, "valid": valid})
    result = {"status": "finished", "best_epoch": 1, "epochs": epochs, **SECONDS, "valid": valid}
    folder.finish({**result, "test": {**valid, "error": error / 2}}, None)
    return folder.path


def run(loss: str = "taylor", seed: int = 0, lr: float = 0.1, **settings: int) -> Run:
    return Run("mnist", loss, seed, ImageSettings(lr=lr, **settings))


def collected(out: Path, results: Path, trials: bool = False) -> list[str]:
    said: list[str] = []
    collect(out, results, trials, said.append)
    return said


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    finished_folder(tmp_path / "out", run(seed=3))
    collected(tmp_path / "out", tmp_path / "results")
    (found,) = read_runs(tmp_path / "results")
    assert (found.name, found.task, found.loss, found.seed, found.label) == (run(seed=3).name, "mnist", "taylor", 3, "taylor")
    assert found.settings == run().as_dict()["settings"]
    assert found.environment["versions"]["torch"]
    assert found.result["test"]["error"] == 0.0617284  # six digits
    assert found.history[1] == {
        **RECORD,
        "epoch": 2,
        "train_loss": 0.333333,
        "valid": {"loss": 0.2, "nll": None, "error": 0.123457},
    }
    assert found.finished


def test_heads_are_part_of_the_label(tmp_path: Path) -> None:
    gram = Run("text", "taylor", 0, LanguageSettings(lr=1.0, head="gram"))
    finished_folder(tmp_path / "out", gram, perplexity=9.0, top10=0.5)
    collected(tmp_path / "out", tmp_path / "results")
    assert read_runs(tmp_path / "results")[0].label == "taylor/gram"


def test_adding_again_changes_nothing_and_order_does_not_matter(tmp_path: Path) -> None:
    for seed in (10, 2, 0):
        finished_folder(tmp_path / "out", run(seed=seed))
    finished_folder(tmp_path / "out", run("softmax"))
    assert "4 new of 4 runs" in collected(tmp_path / "out", tmp_path / "a")[0]
    path = tmp_path / "a" / "runs" / "mnist.jsonl"
    once = path.read_bytes()
    assert "0 new of 4 runs" in collected(tmp_path / "out", tmp_path / "a")[0]
    assert path.read_bytes() == once
    lines = once.decode().splitlines()
    assert [json.loads(line)["name"].rpartition("-")[0] for line in lines] == [
        "softmax-seed0",
        "taylor-seed0",
        "taylor-seed2",
        "taylor-seed10",
    ]
    for line in reversed(lines):
        add_runs(tmp_path / "b", [json.loads(line)])
    assert (tmp_path / "b" / "runs" / "mnist.jsonl").read_bytes() == once
    assert not list((tmp_path / "a").rglob("*.partial"))


def test_a_stored_run_is_not_replaced(tmp_path: Path) -> None:
    first, again = image_line("taylor", 0, 0.01), image_line("taylor", 0, 0.02)
    assert first["name"] == again["name"]
    assert add_runs(tmp_path, [first]) == 1
    assert add_runs(tmp_path, [again]) == 0
    assert read_runs(tmp_path)[0].result["test"]["error"] == 0.01


def test_runs_that_are_not_finished_stay_out_and_diverged_ones_do_not(tmp_path: Path) -> None:
    RunFolder(tmp_path / "out", run(seed=1)).create()
    diverged = RunFolder(tmp_path / "out", run(seed=2))
    diverged.create()
    diverged.finish({"status": "diverged", "epoch": 1, "reason": "nan"}, None)
    collected(tmp_path / "out", tmp_path / "results")
    (found,) = read_runs(tmp_path / "results")
    assert (found.seed, found.finished, found.history) == (2, False, [])


def test_history_by_columns_and_back() -> None:
    history = [RECORD, {**RECORD, "epoch": 2}]
    assert columns(history)["valid"]["error"] == [0.123456789] * 2
    assert records(columns(history)) == history
    assert records(columns([])) == []


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    add_runs(tmp_path, [image_line("taylor", 0, 0.01), diverged_line("taylor", 1)])
    path = tmp_path / "runs" / "mnist.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=r"mnist\.jsonl, line 2, is damaged"):
        read_runs(tmp_path)


CONFIG, RESULT = "config.json", "result.json"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (RESULT, lambda x: x.clear(), "has no 'status'"),
        (RESULT, lambda x: x["test"].clear(), "'test' has no 'loss'"),
        (RESULT, lambda x: x["valid"].update(error="<script>"), "'error' of 'valid' is '<script>'"),
        (RESULT, lambda x: x["valid"].update(error=math.nan), "'error' of 'valid' is nan"),
        (RESULT, lambda x: x.update(data={"D": -1}), "'D' of 'data' is -1"),
        (CONFIG, lambda x: x.update(task="../../escaped"), "'task' of it is '../../escaped'"),
        (CONFIG, lambda x: x.update(task="cifar10"), "its task is cifar10, but it is in the folder mnist"),
        (CONFIG, lambda x: x.update(loss=["taylor"]), r"'loss' of it is \['taylor'\]"),
        (CONFIG, lambda x: x["settings"].update(lr={}), "'lr' of 'settings' is {}"),
        (CONFIG, lambda x: x.pop("settings"), "'settings' is None"),
        ("environment.json", lambda x: x.pop("versions"), "'versions' is None"),
    ],
)
def test_collect_checks_what_it_reads(tmp_path: Path, name: str, change: Callable[[Any], object], said: str) -> None:
    folder = finished_folder(tmp_path / "out", run())
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    before = sorted(tmp_path.parent.rglob("*"))
    with pytest.raises(UserError, match=rf"{name} is damaged \(.*{said}.*delete {folder}"):
        collected(tmp_path / "out", tmp_path / "results")
    assert sorted(tmp_path.parent.rglob("*")) == before  # nothing was written, here or elsewhere


@pytest.mark.parametrize("content", [b"[]", b"1", b"\xff\xfe", b"", b"[" * 100_000, b'{"status": "finished"}\n\0'])
def test_any_content_of_a_file_is_a_message(tmp_path: Path, content: bytes) -> None:
    folder = finished_folder(tmp_path / "out", run())
    for path in (folder / name for name in (RESULT, CONFIG, "environment.json", "metrics.jsonl")):
        before = path.read_bytes()
        path.write_bytes(content + b"\n")
        with pytest.raises(UserError, match=f"{path} is damaged"):
            collected(tmp_path / "out", tmp_path / "results")
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["a\\b", "../a", "a/b", "", "<b>", 1, None])
def test_a_name_that_is_none_of_ours(tmp_path: Path, name: Any) -> None:
    add_runs(tmp_path, [image_line("taylor", 0, 0.01)])
    path = tmp_path / "runs" / "mnist.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": name}) + "\n")
    with pytest.raises(UserError, match=r"mnist\.jsonl, line 1, was not written by .*'name' of it is"):
        read_runs(tmp_path)
    with pytest.raises(UserError, match=r"mnist\.jsonl, line 1, was not written by"):
        add_runs(tmp_path, [image_line("taylor", 1, 0.01)])


def study_of(folder: Path, name: str, trials: dict[float, float]) -> None:
    """A database as ``tune`` leaves it: validations by learning rate."""
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    made = optuna.create_study(storage=f"sqlite:///{folder / 'tune.db'}", study_name=name)
    rates = {"lr": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True)}
    for lr, value in trials.items():
        made.add_trial(optuna.trial.create_trial(params={"lr": lr}, distributions=rates, value=value))


def test_a_database_that_is_none_of_ours_is_named(tmp_path: Path) -> None:
    finished_folder(tmp_path / "garbage", run(), error=0.25)
    (tmp_path / "garbage" / "mnist" / "tune.db").write_bytes(b"garbage" * 500)
    study_of(tmp_path / "no task" / "nonsense", "nonsense-taylor-0123456789", {0.1: 0.25})
    study_of(tmp_path / "no name" / "mnist", "mnist-<b>-0123456789", {0.1: 0.25})
    for out, why in (("garbage", "not a database"), ("no task", "no task 'nonsense'"), ("no name", "<b>")):
        with pytest.raises(UserError, match=rf"tune.db is no database of 'spherical-loss tune' \(.*{why}"):
            collected(tmp_path / out, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_studies_are_read_from_the_database_and_their_runs_stay_out(tmp_path: Path) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    study_of(out / "mnist", "mnist-bound-fixed-0123456789", {0.01: 0.3})
    study_of(out / "mnist", "mnist-taylor-0123456789", {0.1: 0.25, 0.2: math.inf})
    finished_folder(out, run(lr=0.1, epochs=1), error=0.25)
    diverged = RunFolder(out, run(lr=0.2, epochs=1))
    diverged.create()
    diverged.finish({"status": "diverged", "epoch": 1, "reason": "nan"}, None)
    longer = finished_folder(out, run(lr=0.1, epochs=9), error=0.05)  # the same rate, but no trial
    said = collected(out, results)
    assert "1 new of 1 runs, 2 new of 2 studies" in said[0]
    assert "2 runs are trials" in said[1]
    assert [found.name for found in read_runs(results)] == [longer.name]
    fixed, taylor = read_studies(results)
    assert (fixed.task, fixed.loss, fixed.monitor, fixed.settings) == ("mnist", "bound-fixed", "error", {})  # its runs are gone
    assert taylor.loss == "taylor"
    assert taylor.settings["epochs"] == 1
    assert "lr" not in taylor.settings
    assert [(trial["values"], trial["value"]) for trial in taylor.trials] == [({"lr": 0.1}, 0.25), ({"lr": 0.2}, None)]
    assert taylor.best == taylor.trials[0]
    collected(out, results, trials=True)
    assert len(read_runs(results)) == 3


def test_a_trial_that_was_given_up_says_when_and_is_never_the_best(tmp_path: Path) -> None:
    study_of(tmp_path / "out/mnist", "mnist-taylor-0123456789", {0.1: 0.25})
    made = optuna.load_study(study_name="mnist-taylor-0123456789", storage=f"sqlite:///{tmp_path / 'out/mnist/tune.db'}")
    rates = {"lr": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True)}
    values = {1: 0.3, 3: 0.2}
    pruned = optuna.trial.TrialState.PRUNED
    made.add_trial(
        optuna.trial.create_trial(params={"lr": 0.2}, distributions=rates, intermediate_values=values, value=0.2, state=pruned)
    )
    collected(tmp_path / "out", tmp_path / "results")
    (found,) = read_studies(tmp_path / "results")
    assert found.trials[1] == {"number": 1, "values": {"lr": 0.2}, "value": 0.2, "pruned": 3}
    assert found.best == found.trials[0]


def test_a_study_that_went_on_replaces_the_shorter_one(tmp_path: Path) -> None:
    short, long = study("mnist", "taylor", {0.1: 0.2}), study("mnist", "taylor", {0.1: 0.2, 0.3: None})
    for each, added in ((short, 1), (long, 1), (short, 0), (long, 0)):
        assert add_studies(tmp_path, [each]) == added
    assert read_studies(tmp_path) == [long]
    assert Study("x", "mnist", "taylor", "error", {}, [{"number": 0, "values": {"lr": 1.0}, "value": None}]).best is None


def test_a_run_says_how_large_its_data_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", str(tmp_path))
    text, out, results = tmp_path / "corpus.txt", tmp_path / "out", tmp_path / "results"
    text.write_text("a b c d e\n" * 300)
    settings = LanguageSettings(file=str(text), vocabulary=5, lr=0.1, layers=0, output_rate=1.0, epochs=1, momentum=0.0)
    train(Run("text", "taylor", 0, RECIPES["text"].prepare(settings, True)), out, Display())
    text.unlink()  # what collect does not need
    collected(out, results)
    (found,) = read_runs(results)
    assert found.data == {"train": 1440, "valid": 180, "test": 180, "D": 5}
    assert "data" not in found.result


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_folder(tmp_path / "out", run())
    results = str(tmp_path / "results")
    assert main(["collect", str(tmp_path / "out"), "--results", results]) == 0
    assert "1 new of 1 runs" in capsys.readouterr().out
    assert main(["collect", "--results", results]) == 2
    assert "needs the --out folder" in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "nowhere"), "--results", results]) == 1
    assert "has no finished runs" in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "out"), "--trails"]) == 2
    assert "perhaps --trials?" in capsys.readouterr().err
