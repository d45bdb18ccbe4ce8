"""Programs under ``torchrun``: the real one, if processes die, and otherwise with the environment it sets, which is faster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tests.support import processes


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


class Ended(NamedTuple):
    code: int
    output: str
    errors: str


def run_as_torchrun(folder: Path, ranks: int, function: Callable[..., object], *arguments: object) -> list[Ended]:
    """``function(*arguments)`` on every rank, with the environment and the store that ``torchrun`` gives."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "tests"}
    started = []
    for rank in range(ranks):
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": True}
        started.append(processes.start(_rank, folder / f"rank-{rank}", environment, function, arguments))
    codes = [processes.exit_code(process, timeout=300) for process in started]
    texts = [[(folder / f"rank-{rank}-{name}").read_text() for name in ("output", "errors")] for rank in range(ranks)]
    return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def _rank(file: Path, environment: dict[str, object], function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    for descriptor, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(f"{file}-{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    function(*arguments)
