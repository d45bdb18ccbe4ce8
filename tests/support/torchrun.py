"""A program on two processes under ``torchrun``, for the tests in which processes die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(
    program: Path | str, *arguments: str, options: tuple[str, ...] = ("--standalone", "--nproc-per-node", "2")
) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(program), *arguments]


def start(command: list[str]) -> subprocess.Popen[str]:
    """With stdout and stderr together, and a thread for each process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def run(command: list[str]) -> tuple[int, str]:
    """The exit code and all that was printed."""
    process = start(command)
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes, too
        process.communicate()
        raise
    return process.returncode, output
