"""The processes that ``torchrun`` has started, as a process group, which can be made again after a restart.

    with process_group("gloo", timeout=timedelta(minutes=5)) as group:
        head = FactoredHead(d, D, group=group)
        ...
    end()

The same code runs the first time and after a restart, and resumes from its checkpoints.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous


@contextmanager
def process_group(backend: str, timeout: timedelta) -> Iterator[dist.ProcessGroup]:
    """Join the processes of ``torchrun``, and leave them together. No process waits longer than ``timeout`` for another.

    When a process dies, those that exchange data with it get an error. ``torchrun --max-restarts K`` then starts all of them
    again, K times at most, and they have to resume from a checkpoint.
    """
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(name_of_this_start(store, rank, ranks, timeout), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
        dist.barrier()  # no process leaves while another still communicates with it
    finally:
        dist.destroy_process_group()


def name_of_this_start(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A new name that all processes agree on: it separates their entries in ``store`` from older ones.

    ``torchrun`` has one store for all its starts, in which a process finds the addresses of those that have died. It tells a
    process the number of restarts, but each machine counts its own. So the first process makes up a name and sends it to each
    process that asks. The request of a dead process is answered, too, which does no harm: an answer belongs to a request,
    not to a rank.
    """
    if rank > 0:
        call = uuid4().hex
        store.set(f"call/{rank}", call)
        try:
            name = store.get(f"answer/{call}").decode()
        except dist.DistError as error:
            raise ConnectionError(f"rank {rank} of {ranks} has waited {timeout} for rank 0: has it been started?") from error
        store.set(f"{name}/{rank}", "heard")
        return name
    name, deadline = uuid4().hex, time.monotonic() + timeout.total_seconds()
    while missing := [r for r in range(1, ranks) if not store.check([f"{name}/{r}"])]:
        for r in missing:
            if store.check([f"call/{r}"]):
                store.set(f"answer/{store.get(f'call/{r}').decode()}", name)
        if time.monotonic() > deadline:
            raise ConnectionError(f"rank 0 of {ranks} has waited {timeout} for the ranks {missing}: have they been started?")
        time.sleep(0.01)
    return name


@contextmanager
def only_job(folder: Path) -> Iterator[None]:
    """Allow one job at a time in ``folder``: a second one gets a ``BlockingIOError`` in all of its processes.

    The first process locks the file ``lock``, and the system releases the lock when that process dies.
    """
    import fcntl  # which Windows does not have

    busy = torch.zeros(1)
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / "lock", "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy.fill_(1)
        dist.broadcast(busy, src=0)
        if busy:
            raise BlockingIOError(f"another job works in {folder}: wait for its end, or choose another folder")
        yield


def end(code: int = 0) -> NoReturn:
    """End this process, one of several, without the interpreter's clean-up.

    The threads of a gloo group outlive ``destroy_process_group`` where a DistributedDataParallel has used the group, even one
    that was deleted. If such a thread still holds a tensor of the last exchange when the interpreter shuts down, as it may on a
    busy machine, the process aborts (SIGABRT) after all its work is done: pytorch issue 190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
