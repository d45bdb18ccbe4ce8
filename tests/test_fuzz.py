"""The first seeds of each random attack, and that the attacks would find what they look for; more: ``python -m tests.fuzz``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spherical_loss import SphericalLoss
from spherical_loss.files import DamagedFileError
from spherical_loss.heads import checkpoint
from spherical_loss.heads.factored import head, step
from spherical_loss.heads.factored.accumulator import Accumulator
from tests.fuzz import damage, grid, losses, training


def test_losses_on_random_outputs() -> None:
    for seed in range(300):
        losses.compare(seed)


def test_random_sequences_of_training() -> None:
    ended = [training.train(seed) for seed in range(60)]
    assert sum(":" not in text for text in ended) > 30  # ran to the end


@pytest.mark.parametrize("D", [1, 2, 3, 5, 30, 300])
def test_the_grid_of_rates(D: int) -> None:
    """A seed for which dense float32 SGD is lost at large rates; the whole grid: ``python -m tests.fuzz.grid``."""
    ended = {lr: {grid.run(loss, D, lr, seed=4) for loss in grid.LOSSES} for lr in (0.3, 3.0, 100.0, 1_000.0)}
    assert ended[0.3] == ended[3.0] == {"exact"}  # an ordinary rate is no chaos


def test_damaged_files() -> None:
    said = [damage.damage(seed) for seed in range(60)]
    assert {text.split(":")[0] for text in said} == {f"damage_{kind}" for kind in ("store", "folder", "head", "cache")}


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SphericalLoss.forward
    monkeypatch.setattr(SphericalLoss, "forward", lambda *arguments: forward(*arguments) * (1 + 1e-8))
    with pytest.raises(AssertionError, match=r"the value is 1\.0e-08 off"):
        test_losses_on_random_outputs()


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of Q is 5% too large."""
    monkeypatch.setattr(head, "FEW_CLASSES", 0)
    subtract = Accumulator.subtract_

    def wrong(self: Accumulator, half: torch.Tensor, alpha: float = 1.0, scale: float = 1.0) -> None:
        subtract(self, half, 1.05 * alpha, scale)

    monkeypatch.setattr(Accumulator, "subtract_", wrong)
    with pytest.raises(AssertionError, match="off after"):
        test_random_sequences_of_training()


def test_chaos_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate at which not even dense SGD in float64 could be followed: an exception, and without it a wrong number."""
    assert grid.run("taylor", D=2, lr=100.0, seed=4) == "raised lost"
    monkeypatch.setattr(step, "have_parted", lambda *weights: None)
    with pytest.raises(AssertionError, match="off after"):
        grid.run("taylor", D=2, lr=100.0, seed=4)


def test_a_missing_checksum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, sha256: str, mmap: bool) -> Any:
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:
            raise DamagedFileError(str(path)) from error

    monkeypatch.setattr(checkpoint, "load", load)
    with pytest.raises(AssertionError, match="is not what was written, but was read"):
        test_damaged_files()
