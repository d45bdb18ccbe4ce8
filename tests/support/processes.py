"""Processes for tests in which processes are killed or train together.

They fork off one that has imported torch and the experiments, and start in milliseconds instead of seconds. It is not the
process of the tests, whose threads a fork would not survive.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess

import psutil
import torch.multiprocessing

METHOD = "forkserver"
context = multiprocessing.get_context(METHOD)
context.set_forkserver_preload(
    ["pytest", "torch.distributed", "torch.nn.parallel", "spherical_loss.experiments.training.train"]
)


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """``function(*arguments)``, of a module, in a process with the environment that this one has now."""
    process = context.Process(target=_call, args=(dict(os.environ), function, arguments))
    process.start()
    return process


def exit_code(process: BaseProcess, timeout: float = 120) -> int:
    """Wait for the end: 0, 1 after an exception, or minus the signal that killed it."""
    process.join(timeout)
    assert process.exitcode is not None, f"{process} has not ended after {timeout} s"
    return process.exitcode


def running(process: psutil.Process) -> bool:
    """Whether it has not ended yet; one that nobody has waited for is a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def run_ranks(function: Callable[..., object], ranks: int, *arguments: object) -> None:
    """``function(rank, ranks, *arguments)`` in a process for each rank; an exception in one of them is raised here."""
    torch.multiprocessing.start_processes(function, (ranks, *arguments), ranks, start_method=METHOD)


def _call(environment: Mapping[str, str], function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)
