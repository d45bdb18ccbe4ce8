"""Restarted processes find each other, whatever dead ones left behind."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from spherical_loss.processes import name_of_this_start
from tests.support.torchrun import run, torchrun

SHORT, LONG = timedelta(seconds=0.3), timedelta(minutes=5)


@pytest.fixture
def store() -> dist.TCPStore:
    """What torchrun has: one store for all starts."""
    return dist.TCPStore("localhost", 0, is_master=True)


def names(store: dist.TCPStore, ranks: int, alive: list[int], timeout: timedelta) -> list[Future[str]]:
    """What each of the ranks that are alive gets, of all that should be; every one has its own connection."""

    def name(rank: int) -> str:
        mine = dist.TCPStore("localhost", store.port, is_master=False, timeout=timeout)
        return name_of_this_start(mine, rank, ranks, timeout)

    with ThreadPoolExecutor() as threads:
        return [threads.submit(name, rank) for rank in alive]


def test_all_agree_on_a_new_name_every_time(store: dist.TCPStore) -> None:
    found = []
    for ranks in (3, 3, 1, 4, 2):
        (name,) = {future.result() for future in names(store, ranks, list(range(ranks)), LONG)}
        found.append(name)
    assert len(set(found)) == len(found)


def test_a_start_that_failed_does_not_disturb_the_next(store: dist.TCPStore) -> None:
    zero, one = names(store, 3, [0, 1], SHORT)
    with pytest.raises(ConnectionError, match=r"rank 0 of 3 has waited 0:00:00.3\d* for the ranks \[2\]"):
        zero.result()
    for rank, future in zip([1, 2], names(store, 3, [1, 2], SHORT), strict=True):
        with pytest.raises(ConnectionError, match=f"rank {rank} of 3 has waited 0:00:00.3.* for rank 0"):
            future.result()
    (name,) = {future.result() for future in names(store, 3, [0, 1, 2], LONG)}
    assert name != one.result()


# The last rank of the first start dies when all have joined. The other machine's processes are stopped while they sleep, so
# that they have not failed.
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from spherical_loss.processes import end, process_group

died = Path(sys.argv[1])
first = not died.exists()
with process_group("gloo", timedelta(minutes=5)) as group:
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    if first and dist.get_rank() == 1:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if first:
        time.sleep(300)
print("together:", int(ranks), "restarts:", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
end()
"""


def test_two_machines_that_count_different_restarts(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    machines = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    command = torchrun(program, str(tmp_path / "died"), options=(*machines, "--max-restarts", "1"))
    with ThreadPoolExecutor() as threads:
        done = list(threads.map(run, [command, command]))
    assert [code for code, _ in done] == [0, 0], done
    said = sorted(line for _, output in done for line in output.splitlines() if line.startswith("together"))
    assert said == ["together: 2 restarts: 0", "together: 2 restarts: 1"]
