"""A checkpoint that is damaged, or of another run, is named and renamed: the run starts again, and ends like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train
from spherical_loss.files import load, save
from tests.experiments.training.test_train import make_run, numbers
from tests.support.damage import Executed, flip_bit

RUN = make_run(epochs=3)


class Watch(Display):
    began = -1

    def started(self, run: Run, epoch: int) -> None:
        self.began = epoch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    root = tmp_path_factory.mktemp("reference")
    train(RUN, root, Display())
    return numbers(root, RUN)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """After two of three epochs."""
    assert train(RUN, tmp_path, Display(), until=2)["status"] == "paused"
    return RunFolder(tmp_path, RUN).path / "checkpoint.pt"


def continued(checkpoint: Path) -> tuple[int, tuple]:
    """The epoch from which it resumed, and its numbers."""
    watch, root = Watch(), checkpoint.parents[2]
    train(RUN, root, watch)
    return watch.began, numbers(root, RUN)


def test_a_whole_one_is_gone_on_from(checkpoint: Path, undisturbed: tuple) -> None:
    assert continued(checkpoint) == (2, undisturbed)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_a_flipped_bit(checkpoint: Path, undisturbed: tuple, part: float, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(checkpoint, at=int(part * (checkpoint.stat().st_size - 1)), bit=3)
    assert continued(checkpoint) == (0, undisturbed)
    assert f"{checkpoint} is damaged" in capsys.readouterr().err
    assert checkpoint.with_name("damaged-checkpoint.pt").exists()


def without_momentum(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"][0]["momentum_buffer"]
    state["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a missing key": lambda state: state.pop("stale"),
    "another missing key": lambda state: state.pop("network"),
    "no history": lambda state: state.pop("history"),
    "an extra key": lambda state: state.update(extra=1),
    "another shape": lambda state: state["network"].update({next(iter(state["network"])): torch.zeros(3)}),
    "other best weights": lambda state: state["best_weights"].popitem(),
    "another optimizer": without_momentum,
    "another history": lambda state: state["history"].pop(),
    "no random state": lambda state: state.update(random_state=1.5),
    "a history of other values": lambda state: state["history"][0].update(lr=None),
    "a history that is none": lambda state: state.update(history=3),
    "a best epoch that never was": lambda state: state.update(best_epoch=99),
    "a best value that is none": lambda state: state.update(best="x"),
    "a rate that is none": lambda state: state["optimizer"]["param_groups"][0].update(lr="x"),
    "no rate": lambda state: state["optimizer"]["param_groups"][0].pop("lr"),
    "a moment that is none": lambda state: state["optimizer"]["state"][0].update(momentum_buffer={}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_that_does_not_fit(checkpoint: Path, undisturbed: tuple, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    state = load(checkpoint)
    CHANGES[change](state)
    save(state, checkpoint)
    assert continued(checkpoint) == (0, undisturbed)
    assert f"{checkpoint} " in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100])
def test_one_that_is_none(checkpoint: Path, undisturbed: tuple, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.write_bytes(content)
    assert continued(checkpoint) == (0, undisturbed)
    assert f"{checkpoint} is damaged" in capsys.readouterr().err


def test_nothing_in_it_is_executed(
    checkpoint: Path, undisturbed: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attacker computes the right checksum."""
    state = load(checkpoint)
    save({**state, "start": Executed(tmp_path / "executed")}, checkpoint)
    assert continued(checkpoint) == (0, undisturbed)
    assert not (tmp_path / "executed").exists()
    assert "was not written by this library" in capsys.readouterr().err
