"""Training under torchrun, with real processes: the losses of one process on the same batches, also when processes die."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch

from spherical_loss import GramHead, Loss
from spherical_loss.__main__ import main
from spherical_loss.experiments.models.image_networks import Classifier
from spherical_loss.experiments.training import distributed, train
from spherical_loss.experiments.training.recipes import RECIPES, digits_network
from tests.support.processes import exit_code, start
from tests.support.torchrun import run_as_torchrun, torchrun

COMPARE = ("compare", "digits", "--losses", "taylor", "--runs", "1", "--epochs", "3", "--lr", "0.05")


class GramNetwork(Classifier):
    def __init__(self, network: Classifier) -> None:
        super().__init__(network.trunk, network.output)
        self.head = GramHead.from_linear(network.output)
        self.output = None  # the head has its weights now

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.logits(self.trunk(x))

    def objective(self, x: torch.Tensor, target: torch.Tensor, loss: Loss) -> torch.Tensor:
        return loss(self.head(self.trunk(x), target))


def gram_network(*arguments: object) -> GramNetwork:
    return GramNetwork(digits_network(*arguments))


def command(head: str, arguments: Sequence[str]) -> None:
    """The command line, in a process of its own."""
    if head == "gram":
        RECIPES["digits"] = dataclasses.replace(RECIPES["digits"], network=gram_network)
    sys.argv[1:] = arguments
    raise SystemExit(main())


# Four starts of two processes, with a checkpoint after every epoch. In the first, rank 1 is killed in the middle of epoch 2;
# in the second, rank 1 alone cannot read the data; in the third, rank 0 is killed while it writes the checkpoint of epoch 2.
DYING = """
import dataclasses, functools, os, signal, sys
from spherical_loss.__main__ import main
from spherical_loss.experiments.running import train_all
from spherical_loss.experiments.training import train
from spherical_loss.experiments.training.recipes import RECIPES

start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
moment = {(0, 1): "step", (1, 1): "load", (2, 0): "save"}.get((start, rank))
train_all.train = functools.partial(train.train, checkpoint_seconds=0)
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
raise SystemExit(main())
"""


def epochs(out: Path) -> list[dict]:
    (path,) = out.glob("digits/taylor-*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[dict], Path, str]]:
    """The epochs of a run on two ranks where nothing happens, its folder, and what was printed; each run once."""

    @cache
    def run(head: str, *options: str) -> tuple[list[dict], Path, str]:
        folder = tmp_path_factory.mktemp(head)
        ended = run_as_torchrun(folder, 2, command, head, [*COMPARE, *options, "--out", str(folder)])
        assert [rank.code for rank in ended] == [0, 0], ended
        return epochs(folder), folder, "".join(rank.output for rank in ended)

    return run


# Two ranks on batches of 33 (17 and 16 rows); 1077 examples leave a last batch of 21 rows, and of one row with 269.
@pytest.mark.parametrize(("head", "batch"), [("dense", "33"), ("gram", "269")])
def test_same_losses_as_one_process(undisturbed: Callable[..., tuple], tmp_path: Path, head: str, batch: str) -> None:
    assert exit_code(start(command, head, [*COMPARE, "--batch-size", batch, "--out", str(tmp_path)])) == 0
    alone = epochs(tmp_path)
    together, folder, printed = undisturbed(head, "--batch-size", batch)
    assert len(alone) == len(together) == 3
    for one, two in zip(alone, together, strict=True):
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
        assert two["valid"]["loss"] == pytest.approx(one["valid"]["loss"], rel=1e-4)
        assert two["train_loss"] != one["train_loss"]  # so the split did make a difference
    assert printed.count("taylor, seed 0: test error") == 1  # one process prints
    (config,) = folder.glob("digits/taylor-*/config.json")
    assert json.loads(config.read_text())["ranks"] == 2


def test_torchrun_goes_on_from_the_checkpoint_when_processes_die(undisturbed: Callable[..., tuple], tmp_path: Path) -> None:
    expected, _, _ = undisturbed("dense", "--batch-size", "33")
    program = tmp_path / "program.py"
    program.write_text(DYING)
    launcher = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    run = torchrun(program, *COMPARE, "--batch-size", "33", "--out", str(tmp_path), options=launcher)
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    began = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("training epoch")]
    assert began == [1, 2, 2, 2, 3]  # the first start; the third; the fourth
    assert "spherical-loss: rank 1: no permission for digits.csv" in done.stderr
    # torchrun names the process it first finds dead: the one that was killed, or the other one, which has lost it.
    assert done.stderr.count("failed (exitcode: ") == 3
    assert "failed (exitcode: -9)" in done.stderr
    for one, two in zip(expected, epochs(tmp_path), strict=True):
        assert all(two[key] == one[key] for key in one if "seconds" not in key)


def test_the_interpreter_is_not_taken_down_under_the_threads_of_the_group(tmp_path: Path) -> None:
    """gloo's threads may abort a process at its shutdown (SIGABRT); here it always aborts."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\nif 'RANK' in os.environ: atexit.register(os.abort)\n")
    arguments = ["compare", "digits", "--losses", "taylor", "--runs", "1", "--epochs", "1", "--out", str(tmp_path / "out")]
    command = torchrun("-m", "spherical_loss", *arguments, options=("--standalone", "--nproc-per-node", "2"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "taylor, seed 0: test error" in done.stdout


def test_batch_normalization_is_told_about(undisturbed: Callable[..., tuple]) -> None:
    records, _, printed = undisturbed("dense", "--activation", "exp")
    assert len(records) == 3
    assert "batch normalization sees each process's part of the batch, 1/2" in printed


@pytest.mark.parametrize("arguments", [("tune", "digits"), ("compare", "digits", "--workers", "2")])
def test_what_does_not_run_under_torchrun(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ended = run_as_torchrun(tmp_path, 2, command, "dense", arguments)
    assert all(rank.code != 0 for rank in ended)
    errors = "".join(rank.errors for rank in ended)
    assert errors.count("under torchrun the processes train one run together") == 1


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


def test_without_the_extra_there_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "spherical_loss.experiments.cli", raising=False)
    with pytest.raises(SystemExit, match=r"^spherical-loss: tyro is missing; pip install 'spherical-loss\[experiments\]'$"):
        main()


def stopped(arguments: Sequence[str]) -> None:
    """The command line; in the second epoch rank 1 falls silent: it neither dies nor answers."""
    distributed.PATIENCE = timedelta(seconds=3)
    train_epoch = train.train_epoch

    def train_epoch_or_stop(*arguments: object) -> object:
        if arguments[5] == 1 and os.environ["RANK"] == "1":
            time.sleep(8)
            os._exit(0)
        return train_epoch(*arguments)

    train.train_epoch = train_epoch_or_stop
    command("dense", arguments)


def test_a_rank_that_falls_silent_is_a_message(tmp_path: Path) -> None:
    first, _ = run_as_torchrun(tmp_path, 2, stopped, [*COMPARE, "--out", str(tmp_path)])
    assert first.code == 1, first
    assert "rank 0 of 2 has lost the others" in first.errors
    assert "0:00:03" in first.errors
    assert "Traceback" not in first.errors
