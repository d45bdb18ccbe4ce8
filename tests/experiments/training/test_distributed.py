"""Training under torchrun, with real processes: the losses of one process on the same batches, also when processes die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from spherical_loss.experiments.training import distributed
from tests.support.torchrun import torchrun

# Two ranks on batches of 33 (17 and 16 rows); 1077 examples leave a last batch of 21 rows, and of one row with 269.
PROGRAM = """
import dataclasses, sys
import torch
from torch import nn
from spherical_loss import GramHead
from spherical_loss.__main__ import main
from spherical_loss.experiments.models import image_networks as models
from spherical_loss.experiments.training.recipes import RECIPES, digits_network

class GramNetwork(models.Classifier):
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

if sys.argv.pop(1) == "gram":
    RECIPES["digits"] = dataclasses.replace(RECIPES["digits"], network=gram_network)
raise SystemExit(main())
"""


# Four starts of two processes, with a checkpoint after every epoch. In the first, rank 1 is killed in the middle of epoch 2;
# in the second, rank 1 alone cannot read the data; in the third, rank 0 is killed while it writes the checkpoint of epoch 2.
DYING = """
import dataclasses, functools, os, signal, sys
from spherical_loss.__main__ import main
from spherical_loss.experiments.running import train_all as execute
from spherical_loss.experiments.training import train
from spherical_loss.experiments.training.recipes import RECIPES

start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
moment = {(0, 1): "step", (1, 1): "load", (2, 0): "save"}.get((start, rank))
execute.train = functools.partial(train.train, checkpoint_seconds=0)
train_epoch, part_of, fsync, load = train.train_epoch, train.part_of, os.fsync, RECIPES["digits"].load
epoch, steps = 0, 0

def told_train_epoch(*arguments):
    global epoch
    epoch = arguments[5] + 1
    if rank == 0:
        print("training epoch", epoch, flush=True)
    return train_epoch(*arguments)

def part_of_or_die(N):
    global steps
    steps += epoch == 2
    if moment == "step" and steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return part_of(N)

def fsync_or_die(descriptor):
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    if moment == "save" and epoch == 2 and name.endswith("checkpoint.pt.partial"):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

def load_or_fail(settings, seed):
    if moment == "load":
        raise PermissionError(13, "Permission denied", "digits.csv")
    return load(settings, seed)

train.train_epoch, train.part_of, os.fsync = told_train_epoch, part_of_or_die, fsync_or_die
RECIPES["digits"] = dataclasses.replace(RECIPES["digits"], load=load_or_fail)
sys.argv.pop(1)
raise SystemExit(main())
"""


def compare(
    folder: Path, head: str, processes: int, *options: str, text: str = PROGRAM, restarts: int = 0
) -> tuple[list[dict], subprocess.CompletedProcess[str]]:
    """The epochs of one run, and what the command printed."""
    program = folder / "program.py"
    program.write_text(text)
    run = [sys.executable, str(program)]
    if processes > 1:
        launcher = ("--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts))
        run = torchrun(program, options=launcher)
    arguments = ["compare", "digits", "--losses", "taylor", "--runs", "1", "--epochs", "3", "--lr", "0.05", *options]
    out = folder / f"{head}-{processes}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*run, head, *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    (path,) = out.glob("digits/taylor-*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()], done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[dict], subprocess.CompletedProcess[str]]]:
    """``compare`` in a folder of its own, each run once."""
    return cache(partial(compare, tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize(("head", "batch"), [("dense", "33"), ("gram", "269")])
def test_same_losses_as_one_process(undisturbed: Callable[..., tuple], head: str, batch: str) -> None:
    alone, _ = undisturbed(head, 1, "--batch-size", batch)
    together, done = undisturbed(head, 2, "--batch-size", batch)
    assert done.returncode == 0, done.stderr
    assert len(alone) == len(together) == 3
    for one, two in zip(alone, together, strict=True):
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
        assert two["valid"]["loss"] == pytest.approx(one["valid"]["loss"], rel=1e-4)
        assert two["train_loss"] != one["train_loss"]  # it did go another way
    assert done.stdout.count("taylor, seed 0: test error") == 1  # one process prints
    (out,) = [word for word in done.args if word.endswith(f"{head}-2")]
    (config,) = Path(out).glob("digits/taylor-*/config.json")
    assert json.loads(config.read_text())["ranks"] == 2


def test_torchrun_goes_on_from_the_checkpoint_when_processes_die(undisturbed: Callable[..., tuple], tmp_path: Path) -> None:
    expected, _ = undisturbed("dense", 2, "--batch-size", "33")
    found, done = compare(tmp_path, "dense", 2, "--batch-size", "33", text=DYING, restarts=3)
    assert done.returncode == 0, done.stderr
    epochs = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("training epoch")]
    assert epochs == [1, 2, 2, 2, 3]  # the first start; the third; the fourth
    assert "spherical-loss: rank 1: no permission for digits.csv" in done.stderr
    assert done.stderr.count("failed (exitcode: -9)") == 2
    for one, two in zip(expected, found, strict=True):
        assert all(two[key] == one[key] for key in one if "seconds" not in key)


def test_the_interpreter_is_not_taken_down_under_the_threads_of_the_group(tmp_path: Path) -> None:
    """gloo's threads may abort a process then (SIGABRT); here, taking it down aborts it for certain."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\nif 'RANK' in os.environ: atexit.register(os.abort)\n")
    arguments = ["compare", "digits", "--losses", "taylor", "--runs", "1", "--epochs", "1", "--out", str(tmp_path / "out")]
    command = torchrun("-m", "spherical_loss", *arguments, options=("--standalone", "--nproc-per-node", "2"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "taylor, seed 0: test error" in done.stdout


def test_batch_normalization_is_told_about(tmp_path: Path) -> None:
    records, done = compare(tmp_path, "dense", 2, "--activation", "exp")
    assert done.returncode == 0, done.stderr
    assert len(records) == 3
    assert "batch normalization sees each process's part of the batch, 1/2" in done.stdout


@pytest.mark.parametrize("arguments", [("tune", "digits"), ("compare", "digits", "--workers", "2")])
def test_what_does_not_run_under_torchrun(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command = torchrun("-m", "spherical_loss", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
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
