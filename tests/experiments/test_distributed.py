"""Training under torchrun, with real processes: the losses of one process on the same batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spherical_loss.experiments import distributed

# Two ranks on batches of 33 (17 and 16 rows); 1077 examples leave a last batch of 21 rows, and of one row with 269.
PROGRAM = """
import dataclasses, sys
import torch
from torch import nn
from spherical_loss import GramHead
from spherical_loss.experiments import cli, models
from spherical_loss.experiments.tasks import TASKS, digits_network

class GramNetwork(models.Network):
    def __init__(self, network):
        super().__init__(network.trunk, network.output)
        self.head = GramHead.from_linear(network.output)
        self.output = None  # the head has its weights now

    def forward(self, x):
        return self.head.logits(self.trunk(x))

    def objective(self, x, target, loss):
        return loss(self.head(self.trunk(x), target))

def gram_network(settings, train, loss):
    return GramNetwork(digits_network(settings, train, loss))

if sys.argv[1] == "gram":
    TASKS["digits"] = dataclasses.replace(TASKS["digits"], network=gram_network)
raise SystemExit(cli.main(sys.argv[2:]))
"""


def compare(folder: Path, head: str, processes: int, *options: str) -> tuple[list[dict], subprocess.CompletedProcess[str]]:
    """The epochs of one run, and what the command printed."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    run = [sys.executable, str(program)]
    if processes > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        run = [*torchrun, str(program)]
    arguments = ["compare", "digits", "--losses", "taylor", "--runs", "1", "--epochs", "3", "--lr", "0.05", *options]
    out = folder / f"{head}-{processes}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*run, head, *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    (path,) = out.glob("digits/taylor-*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()], done


@pytest.mark.parametrize(("head", "batch"), [("dense", "33"), ("gram", "269")])
def test_same_losses_as_one_process(tmp_path: Path, head: str, batch: str) -> None:
    alone, _ = compare(tmp_path, head, 1, "--batch-size", batch)
    together, done = compare(tmp_path, head, 2, "--batch-size", batch)
    assert done.returncode == 0, done.stderr
    assert len(alone) == len(together) == 3
    for one, two in zip(alone, together, strict=True):
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
        assert two["valid"]["loss"] == pytest.approx(one["valid"]["loss"], rel=1e-4)
        assert two["train_loss"] != one["train_loss"]  # it did go another way
    assert done.stdout.count("taylor, seed 0: test error") == 1  # one process prints
    (config,) = (tmp_path / f"{head}-2").glob("digits/taylor-*/config.json")
    assert json.loads(config.read_text())["ranks"] == 2


def test_batch_normalization_is_told_about(tmp_path: Path) -> None:
    records, done = compare(tmp_path, "dense", 2, "--activation", "exp")
    assert done.returncode == 0, done.stderr
    assert len(records) == 3
    assert "batch normalization sees each process's part of the batch, 1/2" in done.stdout


@pytest.mark.parametrize("arguments", [("tune", "digits"), ("compare", "digits", "--workers", "2")])
def test_what_does_not_run_under_torchrun(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "spherical_loss", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert done.stderr.count("under torchrun the processes train one run together") == 1


@pytest.mark.parametrize(("N", "R"), [(7, 1), (7, 2), (1, 2), (5, 4), (3, 4)])
def test_parts_make_the_batch(monkeypatch: pytest.MonkeyPatch, N: int, R: int) -> None:
    monkeypatch.setattr(distributed, "ranks", lambda: R)
    values, mean, rows = torch.arange(1.0, N + 1), 0.0, []
    for r in range(R):
        monkeypatch.setattr(distributed, "rank", lambda r=r: r)
        part = distributed.part_of(N)
        mean += float(values[part.rows].mean()) * part.share / R  # what DistributedDataParallel does
        rows += values[part.rows].tolist() if part.n else []
    assert rows == values.tolist()
    assert mean == pytest.approx(float(values.mean()))


def test_without_the_extra_there_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError('No module named tyro', name='tyro')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "spherical_loss", "compare"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == "spherical-loss: tyro is missing; pip install 'spherical-loss[experiments]'\n"
