"""Killed runs have the same result, bit for bit, as uninterrupted ones: with real processes and SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train
from tests.experiments.training.test_train import make_run, numbers
from tests.support.processes import exit_code, start


def the_run() -> Run:
    """Eight epochs in which the learning rate is halved and momentum, best weights and order of examples all matter."""
    return make_run(loss="softmax", epochs=8, monitor="error", halve_after=1, lr=0.3)


def train_and_die(root: Path, k: int) -> None:
    """Trains the run of the test, with a checkpoint after every epoch; k = 0 does not die.

    The process kills itself in its k-th write: half of the content is on the disk, under the temporary name. With a negative k
    it dies right after the rename of the (-k)-th.
    """
    calls = {"fsync": 0, "replace": 0}
    fsync, replace = os.fsync, os.replace

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fsync_or_die(descriptor: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            calls["fsync"] += 1
            if calls["fsync"] == k:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                die()
        fsync(descriptor)

    def replace_and_die(source: str, target: str) -> None:
        replace(source, target)
        calls["replace"] += 1
        if calls["replace"] == -k:
            die()

    os.fsync, os.replace = fsync_or_die, replace_and_die
    train(the_run(), root, Display(), checkpoint_seconds=0)


def trained(root: Path, k: int) -> int:
    """The exit code of a process that trains and dies."""
    return exit_code(start(train_and_die, root, k))


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    root = tmp_path_factory.mktemp("reference")
    train(the_run(), root, Display())
    history = RunFolder(root, the_run()).history()
    assert len({record["lr"] for record in history}) > 1
    return numbers(root, the_run())


def test_killed_at_every_kind_of_write(tmp_path: Path, never_killed: tuple) -> None:
    # A process that starts writes config, environment and metrics, then a checkpoint per epoch but the last; one that resumes
    # has the first two already. So these die in: config, metrics, checkpoint 4, after checkpoint 5, in the weights.
    for k in (1, 3, 5, -3, 4):
        assert trained(tmp_path, k) == -signal.SIGKILL
        assert RunFolder(tmp_path, the_run()).result() is None
    assert trained(tmp_path, 0) == 0
    assert numbers(tmp_path, the_run()) == never_killed


def test_killed_between_the_weights_and_the_result(tmp_path: Path, never_killed: tuple) -> None:
    root = tmp_path
    # config, environment, metrics, 7 checkpoints, weights, result: the 12th write is the result.
    assert trained(root, 12) == -signal.SIGKILL
    folder = RunFolder(root, the_run())
    assert (folder.path / "best.safetensors").exists()
    assert folder.result() is None
    assert trained(root, 0) == 0
    assert numbers(root, the_run()) == never_killed


def test_killed_at_random_moments(tmp_path: Path, never_killed: tuple) -> None:
    chance = random.Random(0)
    folder = RunFolder(tmp_path, the_run())
    kills = 0
    while kills < 3 and folder.result() is None:
        process = start(train_and_die, tmp_path, 0)
        metrics, before = folder.path / "metrics.jsonl", time.monotonic()
        known = metrics.stat().st_mtime_ns if metrics.exists() else 0
        while process.is_alive() and not (metrics.exists() and metrics.stat().st_mtime_ns > known):
            assert time.monotonic() - before < 120
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.03))  # it trains now: an epoch takes some 0.05 s
        with suppress(ProcessLookupError):  # it may have finished
            os.kill(process.pid, signal.SIGKILL)
        kills += exit_code(process) == -signal.SIGKILL
    assert kills >= 1
    assert trained(tmp_path, 0) == 0
    assert numbers(tmp_path, the_run()) == never_killed


def test_going_on_does_not_start_over(tmp_path: Path) -> None:
    assert trained(tmp_path, 6) == -signal.SIGKILL  # in the third checkpoint
    assert len(RunFolder(tmp_path, the_run()).history()) == 3

    class Watch(Display):
        began = -1

        def started(self, run: Run, epoch: int) -> None:
            self.began = epoch

    watch = Watch()
    train(the_run(), tmp_path, watch)
    assert watch.began == 2
