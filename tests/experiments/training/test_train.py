"""The training loop: schedule, stopping, reproducibility, divergence."""

from __future__ import annotations

import collections
import dataclasses
import errno
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from spherical_loss.experiments.models.loss_names import LOSSES, make_loss
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.load import Load, alone
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run, Settings, resolved
from spherical_loss.experiments.training.tasks import TASKS, open_values
from spherical_loss.experiments.training.train import DivergedError, Progress, after_epoch, train


def make_run(task: str = "digits", loss: str = "taylor", seed: int = 0, **changes) -> Run:
    settings = dataclasses.replace(TASKS[task].settings, **{"epochs": 2, "threads": 1, **changes})
    return Run(task, loss, seed, resolved(settings, loss, open_values(task, loss, settings)))


def numbers(root: Path, run: Run) -> tuple:
    """All that a run measured, without the times."""
    folder = RunFolder(root, run)
    history = [{k: v for k, v in record.items() if "seconds" not in k} for record in folder.history()]
    result = {k: v for k, v in folder.result().items() if "seconds" not in k and k != "alone"}
    return history, result, (folder.path / "best.safetensors").read_bytes()


def test_same_seed_same_numbers(tmp_path: Path) -> None:
    run = make_run()
    for root in ("a", "b"):
        train(run, tmp_path / root, Display())
    assert numbers(tmp_path / "a", run) == numbers(tmp_path / "b", run)
    other = make_run(seed=1)
    train(other, tmp_path / "a", Display())
    assert numbers(tmp_path / "a", other) != numbers(tmp_path / "a", run)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_digits(tmp_path: Path, loss: str) -> None:
    result = train(make_run(loss=loss, epochs=10), tmp_path, Display())
    assert result["status"] == "finished"
    assert result["test"]["error"] < 0.12


@pytest.mark.parametrize(("activation", "error"), [("softmax", 0.7), ("exp", 0.15)])  # chance is 0.9
def test_activations_learn_digits(tmp_path: Path, activation: str, error: float) -> None:
    result = train(make_run(loss="softmax", epochs=15, activation=activation, lr=0.1), tmp_path, Display())
    assert result["test"]["error"] < error


@pytest.mark.parametrize(("task", "width"), [("mnist", 4), ("cifar10", 2), ("cifar100", 2)])
def test_image_tasks_run_on_official_files(tmp_path: Path, small_data: Callable[[str], Path], task: str, width: int) -> None:
    small_data(task)
    run = make_run(task, width=width, batch_size=20)
    result = train(run, tmp_path, Display())
    assert result["status"] == "finished"
    assert result["epochs"] == 2
    first, second = RunFolder(tmp_path, run).history()
    assert first["train_loss"] != second["train_loss"]


def test_small_mnist_is_learned(tmp_path: Path, small_data: Callable[[str], Path]) -> None:
    small_data("mnist")
    result = train(make_run("mnist", width=4, batch_size=20, epochs=6, lr=0.02), tmp_path, Display())
    assert result["test"]["error"] < 0.2


def test_the_folder_tells_all(tmp_path: Path) -> None:
    run = make_run(loss="spherical", epochs=3)
    result = train(run, tmp_path, Display())
    folder = RunFolder(tmp_path, run)
    config = json.loads((folder.path / "config.json").read_text())
    assert (config["task"], config["loss"], config["seed"]) == ("digits", "spherical", 0)
    assert config["settings"]["lr"] == run.settings.lr
    assert config["settings"]["eps"] == run.settings.eps
    assert json.loads((folder.path / "environment.json").read_text())["versions"]["torch"] == torch.__version__
    assert [record["epoch"] for record in folder.history()] == [1, 2, 3]
    assert folder.result() == result
    assert not (folder.path / "checkpoint.pt").exists()


def test_the_best_weights_are_the_reported_ones(tmp_path: Path) -> None:
    run = make_run(epochs=8)
    result = train(run, tmp_path, Display())
    folder = RunFolder(tmp_path, run)
    recipe = RECIPES["digits"]
    loss = make_loss(run.loss, run.loss_options)
    train_set, valid, test = recipe.load(run.settings, run.seed)
    network = recipe.network(run.settings, train_set, loss)
    network.load_state_dict(safetensors.torch.load_file(folder.path / "best.safetensors"))
    assert recipe.evaluate(network, loss, test) == result["test"]
    assert recipe.evaluate(network, loss, valid) == result["valid"]
    assert result["valid"]["loss"] == min(record["valid"]["loss"] for record in folder.history())


def scripted(values: list[float], settings: Settings) -> tuple[Progress, list[float]]:
    """The schedule that these validations lead to: its final state, and the learning rate of each epoch."""
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=settings.lr)
    progress, rates = Progress(), []
    for epoch, value in enumerate(values):
        if progress.finished(settings):
            break
        rates.append(optimizer.param_groups[0]["lr"])
        record = {"epoch": epoch + 1, "valid": {"error": value, "loss": 1.0, "nll": None}}
        after_epoch(progress, record, network, optimizer, settings)
    return progress, rates


def test_the_rate_is_halved_after_five_epochs_without_improvement() -> None:
    settings = Settings(lr=1.0, patience=100, epochs=100)
    progress, rates = scripted([0.5, *[0.6] * 5, 0.6, 0.6, 0.4, *[0.4] * 11], settings)
    assert rates == [1.0] * 6 + [0.5] * 8 + [0.25] * 5 + [0.125]
    assert progress.best_epoch == 9


def test_early_stopping() -> None:
    settings = Settings(lr=1.0, patience=7, epochs=100)
    progress, rates = scripted([0.5, 0.3, *[0.4] * 50], settings)
    assert progress.best_epoch == 2
    assert len(rates) == 2 + 7
    progress, rates = scripted([0.5] * 50, Settings(lr=1.0, patience=70, epochs=12))
    assert len(rates) == 12


def test_monitors() -> None:
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    valid = {"error": 0.5, "loss": 0.25, "nll": None}
    for monitor, expected in {"error": 0.5, "loss": 0.25, "nll": 0.25}.items():  # without nll, the loss
        progress = Progress()
        after_epoch(progress, {"epoch": 1, "valid": valid}, network, optimizer, Settings(monitor=monitor))
        assert progress.best == expected


def test_metrics_that_are_not_finite_are_divergence() -> None:
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    record = {"epoch": 3, "valid": {"error": 0.5, "loss": float("nan"), "nll": None}}
    with pytest.raises(DivergedError, match="after epoch 3"):
        after_epoch(Progress(), record, network, optimizer, Settings())


def test_a_diverging_run_is_recorded(tmp_path: Path) -> None:
    run = make_run(loss="mse", lr=1e6)
    result = train(run, tmp_path, Display())
    assert result["status"] == "diverged"
    assert result["epoch"] == 1
    assert RunFolder(tmp_path, run).result() == result
    assert not (RunFolder(tmp_path, run).path / "best.safetensors").exists()


def test_a_finished_run_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    result = train(run, tmp_path, Display())

    def never(*args: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("spherical_loss.experiments.training.train.train_epoch", never)
    assert train(run, tmp_path, Display()) == result
    with pytest.raises(AssertionError, match="trained again"):
        train(make_run(batch_size=49), tmp_path, Display())


def test_settings_that_a_loss_does_not_have_do_not_make_another_run() -> None:
    assert make_run(loss="taylor", eps=0.5).name == make_run(loss="taylor").name
    assert make_run(loss="spherical", eps=0.5).name != make_run(loss="spherical").name


def test_tensorboard_on_a_full_disk_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*taylor-seed0-.*/tensorboard'"):
        train(make_run(), tmp_path, Display(), tensorboard=True)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(epochs=3)
    train(run, tmp_path, Display(), tensorboard=True)
    folder = RunFolder(tmp_path, run)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("valid/loss")]
    expected = [(record["epoch"], pytest.approx(record["valid"]["loss"])) for record in folder.history()]
    assert scalars == expected
    shutil.rmtree(folder.path / "tensorboard")
    train(run, tmp_path, Display(), tensorboard=True)  # a run that was finished without
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("valid/loss")] == expected


def test_the_squared_error_is_a_mean_over_classes_everywhere(tmp_path: Path) -> None:
    run = make_run(loss="mse", epochs=2)
    train(run, tmp_path, Display())
    for record in RunFolder(tmp_path, run).history():
        assert 0.3 < record["train_loss"] / record["valid"]["loss"] < 3


def test_a_cosine_lowers_the_rate_every_epoch(tmp_path: Path) -> None:
    run = make_run(epochs=4, decay="cosine", patience=4, halve_after=1, lr=0.1)
    train(run, tmp_path, Display())
    rates = [record["lr"] for record in RunFolder(tmp_path, run).history()]
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


def test_a_run_pauses_and_continues(tmp_path: Path) -> None:
    run = make_run(epochs=3)
    paused = train(run, tmp_path / "paused", Display(), until=2)
    folder = RunFolder(tmp_path / "paused", run)
    assert (paused["status"], paused["epochs"], folder.result()) == ("paused", 2, None)
    assert paused["valid"]["loss"] == min(record["valid"]["loss"] for record in folder.history())
    assert train(run, tmp_path / "paused", Display(), until=2) == paused  # nothing more to do
    assert train(run, tmp_path / "paused", Display(), until=5)["status"] == "finished"
    train(run, tmp_path / "whole", Display())
    assert numbers(tmp_path / "paused", run) == numbers(tmp_path / "whole", run)


def test_a_run_records_the_processor_time_of_others(tmp_path: Path) -> None:
    run = make_run()
    result = train(run, tmp_path, Display())
    history = RunFolder(tmp_path, run).history()
    assert all(record["own_cpu_seconds"] > 0 for record in history)
    assert all(record["other_cpu_seconds"] >= 0 for record in history)
    assert result["alone"] == alone(history)


def test_processor_time_is_split_in_own_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(own: float, **times: float) -> None:
        monkeypatch.setattr(time, "process_time", lambda: own)
        monkeypatch.setattr(psutil, "cpu_times", lambda: collections.namedtuple("times", times)(**times))

    at(1.0, user=10.0, nice=1.0, system=2.0, idle=50.0, iowait=3.0, steal=0.0, guest=5.0)
    load = Load()
    at(4.0, user=12.0, nice=3.0, system=3.0, idle=70.0, iowait=9.0, steal=0.5, guest=6.0)
    assert load.seconds() == {"own_cpu_seconds": 3.0, "other_cpu_seconds": 2.5}


@pytest.mark.parametrize(("own", "others"), [(5.0, 0.0), (10.0, 1.5)])
def test_a_run_that_was_stopped_or_disturbed_was_not_alone(own: float, others: float) -> None:
    record = {"seconds": 10.0, "own_cpu_seconds": own, "other_cpu_seconds": others}
    assert not alone([record])
    assert not alone([{"seconds": 10.0}])  # from an older version, which did not measure it
