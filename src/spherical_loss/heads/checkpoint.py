"""Checkpoints of a factored head through ``torch.distributed.checkpoint``: each rank writes and reads its own rows.

A head saved by some number of ranks can be loaded by another number, one process without a group included::

    save_checkpoint(head, "step-1000")         # every rank calls it
    load_checkpoint(head, "step-1000")         # into a head of the same d, D and bias
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong

from spherical_loss.heads.factored import FactoredHead


def save_checkpoint(head: FactoredHead, folder: str | Path) -> None:
    """Write the head; it is refactored first, so that W alone is to be saved."""
    head.refactor()
    with _one_process_is_meant(head):
        save({"layout": torch.tensor(head.layout()), **_state(head)}, **_place(head, folder))


@torch.no_grad()
def load_checkpoint(head: FactoredHead, folder: str | Path) -> None:
    """Read a head in place, whatever number of ranks wrote it."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}: give the folder of a save_checkpoint")
    layout, state = {"layout": torch.tensor(head.layout())}, _state(head)
    with _one_process_is_meant(head):
        load(layout, **_place(head, folder))
        head.check_layout(layout["layout"])
        load(state, **_place(head, folder))
    head.loaded(Q=state["Q"], steps=int(state["steps"]))


@contextmanager
def _one_process_is_meant(head: FactoredHead) -> Iterator[None]:
    """torch warns where no group is used; here that is what the head says."""
    with warnings.catch_warnings():
        if head.shard.group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _place(head: FactoredHead, folder: str | Path) -> dict[str, Any]:
    return {"checkpoint_id": folder, "process_group": head.shard.group, "no_dist": head.shard.group is None}


def _state(head: FactoredHead) -> dict[str, Any]:
    """V as the rows of one D x d tensor, so that any number of ranks can read its own; the rest is the same everywhere."""
    return {"V": _rows(head), "Q": head.Q.base, "w": head.w, "steps": torch.tensor(head.steps)}


def _rows(head: FactoredHead) -> Tensor:
    if head.shard.group is None:
        return head.V
    mesh = DeviceMesh.from_group(head.shard.group, head.V.device.type)
    shape = torch.Size((head.num_classes, head.V.shape[1]))
    return DTensor.from_local(head.V, mesh, [ShardedAlong(0)], run_check=False, shape=shape, stride=(shape[1], 1))
