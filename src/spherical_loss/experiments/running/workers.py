"""Several runs at once: on the workers of a Dask cluster, on this machine (``--workers``) or on many (``--cluster``).

Every worker is a process that trains one run at a time. Dask gives a run whose worker dies to another one, which resumes it
from its checkpoint; on this machine, Dask also starts a new worker.

The number of workers does not affect the results: a run is trained with the threads of its settings, which are decided
before (:func:`~spherical_loss.experiments.training.settings.with_threads`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.locks import BusyError
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.settings import Run
from spherical_loss.experiments.training.train import train

if TYPE_CHECKING:
    from distributed import Client

DEATHS = 5  # of workers of this machine with the same run, before the command gives up


def train_run(run: Run, out: Path, tensorboard: bool, wait: bool, until: int | None) -> dict[str, Any] | None:
    """What a worker does; None if another process is training the run and ``wait`` is false."""
    try:
        return train(run, out, Display(), tensorboard=tensorboard, wait=wait, until=until)
    except BusyError:
        return None


class Workers:
    """``count`` workers on this machine, or those of the Dask scheduler at ``cluster``. A context manager."""

    def __init__(self, count: int | None, cluster: str | None = None) -> None:
        self.cluster = cluster
        self.opened = ExitStack()
        try:
            with left_to_the_parent(signal.SIGINT):
                if cluster is None:
                    self.client = self.opened.enter_context(local_client(count or 1))
                else:
                    self.client = self.opened.enter_context(cluster_client(cluster))
        except ImportError as error:
            raise UserError("--workers and --cluster need Dask: pip install 'spherical-loss[experiments]'") from error
        self.count = len(self.client.nthreads())
        self.executor = self.client.get_executor(pure=False)

    def submit(self, run: Run, out: Path, tensorboard: bool, wait: bool, until: int | None) -> Future[Any]:
        """Start to train ``run`` as soon as a worker is free."""
        return self.executor.submit(train_run, run, out.absolute(), tensorboard, wait, until)

    def result(self, future: Future[Any]) -> dict[str, Any] | None:
        """What :func:`train_run` returned, or an error that says what became of the workers."""
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError

        try:
            return future.result()
        except KilledWorker as error:
            whose = f"of --cluster {self.cluster}" if self.cluster else "of this machine"
            raise UserError(
                f"several workers {whose} died with the same run; is there enough memory for all of them?"
            ) from error
        except (CancelledError, asyncio.CancelledError, CommClosedError) as error:  # all futures are, without a scheduler
            raise UserError(
                f"the Dask scheduler at {self.cluster or 'this machine'} is gone ({error}); start it and its workers again, "
                "and then the same command: it continues where it stopped"
            ) from error

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop everything; the next command resumes an unfinished run from its checkpoint."""
        self.opened.close()


def open_workers(count: int | None, cluster: str | None) -> AbstractContextManager[Workers | None]:
    """The workers of ``--workers`` or ``--cluster``; without either, None: runs are trained in this process."""
    return nullcontext() if count is None and cluster is None else Workers(count, cluster)


@contextmanager
def left_to_the_parent(number: signal.Signals) -> Iterator[None]:
    """A signal, such as that of Ctrl-C, does not reach the threads and processes that are started in here, nor theirs."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Of a process that ends at once, as after Ctrl-C, multiprocessing's tracker would warn: there is nothing to tidy up. It is
    # started here, since the thread that starts it no longer blocks SIGINT afterwards.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def local_client(count: int) -> Iterator[Client]:
    """Workers on this machine, which end with this process, however it ends."""
    import dask
    from distributed import Client, LocalCluster

    ours = {
        "distributed.scheduler.allowed-failures": DEATHS - 1,
        "distributed.nanny.pre-spawn-environ": {},  # Dask would change the allocator and the threads of torch
    }
    local: dict[str, Any] = {"n_workers": count, "threads_per_worker": 1, "processes": True, "host": "127.0.0.1"}
    silent: dict[str, Any] = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL, "memory_limit": None}
    with dask.config.set(ours):
        cluster = LocalCluster(**local, **silent)
        try:
            with Client(cluster) as client:
                yield client
        finally:
            with suppress(AssertionError):  # of Dask, if it is about to start a worker again that has died
                cluster.close()


@contextmanager
def cluster_client(address: str) -> Iterator[Client]:
    """The cluster of the Dask scheduler at ``address``."""
    from distributed import Client

    try:
        client = Client(address, timeout=10)
        client.wait_for_workers(1, timeout=60)
    except (OSError, ValueError, TimeoutError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--cluster is {address!r}, but no Dask scheduler with workers answers there ({reason}); "
            "start them with: dask scheduler, and dask worker ADDRESS --nthreads 1"
        ) from error
    with client:
        threads = client.nthreads()
        if any(n != 1 for n in threads.values()):
            raise UserError(
                f"the workers of --cluster {address} have {sorted(threads.values())} threads, but a process can train one run "
                "at a time; start them with: dask worker ADDRESS --nworkers N --nthreads 1"
            )
        yield client
