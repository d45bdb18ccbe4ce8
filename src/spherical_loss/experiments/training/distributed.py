"""One run on several processes under ``torchrun``: each takes its part of every batch, and gradients are averaged.

Every process makes the same batches and the same steps. The first one (rank 0) alone reads and writes the run's
folder, validates, and prints; the others receive its results. Without ``torchrun`` there is one process, which has the
whole batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from spherical_loss import FactoredHead, Loss
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.failures import warn
from spherical_loss.processes import process_group

T = TypeVar("T")
Objective = Callable[[Tensor, Tensor], Tensor]
PATIENCE = timedelta(minutes=5)  # the longest that anyone waits for another, such as for the first one to validate


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that ``torchrun`` has started, if there are any."""
    if not dist.is_torchelastic_launched():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with process_group(backend, PATIENCE):
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error) and not isinstance(error, dist.DistError):
                raise
            warn(
                f"rank {rank()} of {ranks()} has lost the others: one of them has died, or has been silent for {PATIENCE}; "
                "the same command continues from the last checkpoint"
            )
            raise SystemExit(1) from None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def on_first(call: Callable[[], T]) -> T:
    """What ``call`` returns, or raises, on the first process; the others do not call it. A collective: all must take part."""
    if ranks() == 1:
        return call()
    found: list[Any] = [None, None]
    if rank() == 0:
        try:
            found[0] = call()
        except Exception as error:  # the others would wait forever
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


class Part(NamedTuple):
    """The rows of a batch that belong to this process."""

    rows: slice
    n: int
    """How many of them count."""
    share: float
    """The weight of their mean, such that the mean over the processes is the mean of the batch."""


def part_of(N: int) -> Part:
    """This process's part of a batch of N. A process for which none is left takes a row that does not count."""
    R = ranks()
    start, stop = rank() * N // R, (rank() + 1) * N // R
    n = stop - start
    return Part(slice(start, stop) if n else slice(0, 1), n, n * R / N)


def summed(x: Tensor) -> Tensor:
    """The sum over the processes."""
    if ranks() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


class MeanLoss(nn.Module):
    """``network.objective`` as a module, which is what DistributedDataParallel takes."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.network.objective(x, target, self.loss)  # type: ignore[operator]


def objective_of(network: Any, loss: Loss, note: Callable[[str], None]) -> Objective:
    """The mean loss of a batch, whose gradients are averaged over the processes; all start with the first one's weights.

    Batch normalization sees the whole batch on GPUs. On the CPU torch has no such layer: each process normalizes by its own
    part, as if the batches were smaller, and the first one's running statistics count; ``note`` says so.
    """
    if ranks() == 1:
        return lambda x, target: network.objective(x, target, loss)
    if any(isinstance(module, FactoredHead) for module in network.modules()):
        raise UserError(
            "the factored head has no weights DistributedDataParallel could synchronize: under torchrun use --head gram or "
            "dense, or shard the head as examples/sharded_training.py does"
        )
    device = next(network.parameters()).device
    if any(isinstance(module, _BatchNorm) for module in network.modules()):
        if device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        else:
            note(f"batch normalization sees each process's part of the batch, 1/{ranks()}: results differ from one process's")
    module = MeanLoss(network, loss)
    return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)


def device_of(name: str) -> torch.device:
    """The device of that name; for "cuda", each process takes its own GPU."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None and ranks() > 1:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device
