"""Several runs at once: in processes on this machine, or on the workers of a Dask cluster.

In both cases a thread here waits for each run, and the run itself is trained in another process:

- on this machine every worker is a pool of one process, so that a process that dies interrupts its own run only; a new
  process resumes the run from its checkpoint;
- on a cluster Dask does the same: a task whose worker dies goes to another one.

The number of workers does not affect the results: a run is trained with the threads of its settings, which are decided
before (:func:`~spherical_loss.experiments.training.settings.with_threads`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from spherical_loss.experiments.errors import UsageError, UserError
from spherical_loss.experiments.files.locks import BusyError
from spherical_loss.experiments.running.progress import Reporter
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train

DEATHS = 5  # of workers with the same run, before the command gives up

Call = Callable[..., Any]
"""``call(died, function, *arguments)``: the function's value, from another process; ``died()`` each time one is lost."""


def train_run(run: Run, out: Path, tensorboard: bool, wait: bool, until: int | None) -> dict[str, Any] | None:
    """What a worker does; None if another process is training the run and ``wait`` is false."""
    try:
        return train(run, out, Reporter(), tensorboard=tensorboard, wait=wait, until=until)
    except BusyError:
        return None


class Workers:
    """``count`` runs at a time, on this machine or on the cluster of the Dask scheduler at ``cluster``. A context manager."""

    def __init__(self, count: int | None, cluster: str | None = None) -> None:
        if count is not None and count < 1:
            raise UsageError(f"--workers is {count}, but must be at least 1")
        if cluster is None:
            local = LocalProcesses(count or 1)
            self.count, self.call, self.close = count or 1, local.call, local.close
        else:
            size, self.call, self.close = dask_cluster(cluster)
            self.count = count or size
        self.threads = ThreadPoolExecutor(self.count)

    def submit(
        self, run: Run, out: Path, tensorboard: bool, wait: bool, until: int | None, died: Callable[[], None]
    ) -> Future[Any]:
        """Start to train ``run`` as soon as a worker is free."""
        return self.threads.submit(self.call, died, train_run, run, out.absolute(), tensorboard, wait, until)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop everything; the next command resumes an unfinished run from its checkpoint."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.close()


def open_workers(count: int | None, cluster: str | None) -> AbstractContextManager[Workers | None]:
    """The workers of ``--workers`` or ``--cluster``; without either, None: runs are trained in this process."""
    return nullcontext() if count is None and cluster is None else Workers(count, cluster)


class LocalProcesses:
    """Processes that train one run at a time each, and are replaced when they die."""

    def __init__(self, count: int) -> None:
        self.pools = [new_pool() for _ in range(count)]
        self.free: SimpleQueue[int] = SimpleQueue()
        for i in range(count):
            self.free.put(i)
        self.closed = False

    def call(self, died: Callable[[], None], function: Callable[..., Any], *arguments: Any) -> Any:
        i = self.free.get()
        try:
            for _ in range(DEATHS):
                try:
                    return self.pools[i].submit(function, *arguments).result()
                except BrokenProcessPool:
                    if self.closed:
                        raise
                    self.pools[i] = new_pool()
                    died()
        finally:
            self.free.put(i)
        raise UserError(f"{DEATHS} workers in a row died with the same run; is there enough memory for all --workers?")

    def close(self) -> None:
        self.closed = True
        for pool in self.pools:
            for process in list((pool._processes or {}).values()):  # Python 3.14 has kill_workers for this
                process.kill()
            pool.shutdown(wait=True)


def new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=start_worker)


def start_worker() -> None:
    """Leave Ctrl-C to the parent, and die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def dask_cluster(address: str) -> tuple[int, Call, Callable[[], None]]:
    """How many workers the cluster has, how to call a function on one, and how to disconnect."""
    try:
        from distributed import Client, KilledWorker
        from distributed.comm.core import CommClosedError
    except ImportError as error:
        raise UserError("--cluster needs Dask: pip install 'spherical-loss[cluster]'") from error
    try:
        client = Client(address, timeout=10)
        client.wait_for_workers(1, timeout=60)
    except (OSError, ValueError, TimeoutError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--cluster is {address!r}, but no Dask scheduler with workers answers there ({reason}); "
            "start them with: dask scheduler, and dask worker ADDRESS --nthreads 1"
        ) from error
    threads = client.nthreads()
    if any(n != 1 for n in threads.values()):
        client.close()
        raise UserError(
            f"the workers of --cluster {address} have {sorted(threads.values())} threads, but a process can train one run at a "
            "time; start them with: dask worker ADDRESS --nworkers N --nthreads 1"
        )

    def call(died: Callable[[], None], function: Callable[..., Any], *arguments: Any) -> Any:
        for _ in range(DEATHS):
            try:
                return client.submit(function, *arguments, pure=False).result()
            except KilledWorker:  # Dask has already tried several workers
                died()
            except (CancelledError, asyncio.CancelledError, CommClosedError) as error:  # all futures are, without a scheduler
                raise UserError(
                    f"the Dask scheduler at {address} is gone ({error}); start it and its workers again, and then the same "
                    "command: it continues where it stopped"
                ) from error
        raise UserError(f"the workers of --cluster {address} keep dying with the same run; is there enough memory on them?")

    return len(threads), call, client.close
