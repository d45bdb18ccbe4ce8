"""The sharded example under torchrun, with a rank that is really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from spherical_loss import FactoredHead
from spherical_loss.heads.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "sharded_training.py"
CLASSES, STEPS = 500, 400


def launch(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [str(SCRIPT), "--folder", str(folder), "--classes", str(CLASSES), "--steps", str(STEPS), "--every", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *options], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def weights(folder: Path) -> torch.Tensor:
    head = FactoredHead(64, CLASSES, init="zero")
    load_checkpoint(head, folder / f"step-{STEPS}")
    return head.weight


def test_a_killed_rank_costs_only_the_last_steps(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    process = launch(undisturbed)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    process = launch(killed)
    deadline = time.monotonic() + 200
    while not (killed / "step-40").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(int((killed / "rank-1.pid").read_text()), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0, output  # and it did not wait for the dead rank
    assert not (killed / f"step-{STEPS}").exists()

    process = launch(killed)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "going on from step-" in output
    torch.testing.assert_close(weights(killed), weights(undisturbed), rtol=1e-4, atol=1e-5)
