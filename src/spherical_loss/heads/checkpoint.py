"""Checkpoints of a factored head, sharded or not: each rank writes its own rows, and reads those it needs.

A head saved by some number of ranks can be loaded by any other number, also by one process without a group::

    save_checkpoint(head, "step-1000")         # every rank calls it
    load_checkpoint(head, "step-1000")         # into a head of the same d, D and bias

A checkpoint is a folder that all ranks share::

    rows-0-500000-3fa8c1d2.pt      the rows of W of one rank, from 0 to 499,999; the name ends with a part of the checksum
    small-91b2cc07.pt              Q and w, the same on all ranks
    head.json                      layout, number of steps, and the names and checksums of the others

``head.json`` is written last and replaced atomically, so a process that is killed leaves the previous checkpoint intact.
Every byte is checked when it is read, and nothing that was read is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spherical_loss.files import DamagedFileError, load, load_json, save, save_json
from spherical_loss.heads.factored import FactoredHead

MANIFEST = "head.json"
KINDS = (OSError, FileNotFoundError, ValueError, DamagedFileError)  # of errors that all ranks raise if one does


def save_checkpoint(head: FactoredHead, folder: str | Path) -> None:
    """Write the head, replacing any checkpoint in ``folder``; it is refactored first, so that V is W.

    If a rank cannot write, all of them raise an ``OSError``.
    """
    head.refactor()
    folder, shard = Path(folder), head.shard

    def write_rows() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return {"start": shard.start, "stop": shard.stop, **_write({"V": head.V}, folder, f"rows-{shard.start}-{shard.stop}")}

    rows = _on_all_ranks(head, write_rows)

    def write_the_rest() -> None:
        if shard.rank > 0:
            return
        small = _write({"Q": head.Q.base, "w": head.w}, folder, "small")
        manifest = {"layout": head.layout(), "steps": head.steps, "rows": rows, "small": small}
        save_json(manifest, folder / MANIFEST)
        there = {*folder.glob("rows-*.pt*"), *folder.glob("small-*.pt*")}
        for path in there - {folder / part["file"] for part in (*rows, small)}:
            path.unlink(missing_ok=True)  # from the previous checkpoint, or from one that was never finished

    _on_all_ranks(head, write_the_rest)


@torch.no_grad()
def load_checkpoint(head: FactoredHead, folder: str | Path) -> None:
    """Load a checkpoint into ``head``, whatever number of ranks wrote it.

    If a rank misses a file, or finds one damaged, all of them raise a ``FileNotFoundError`` or a
    :class:`~spherical_loss.files.DamagedFileError`, and the head is unchanged.
    """
    folder, shard, columns = Path(folder), head.shard, head.V.shape[1]
    found: dict[str, Any] = {}

    def read() -> None:
        manifest = _manifest(folder)
        head.check_layout(manifest["layout"])
        small = _read(folder, manifest["small"], {"Q": (columns, columns), "w": (columns,)})
        found.update(small, steps=manifest["steps"], rows=[])
        for part in manifest["rows"]:
            start, stop = max(part["start"], shard.start), min(part["stop"], shard.stop)
            if start < stop:
                V = _read(folder, part, {"V": (part["stop"] - part["start"], columns)})["V"]
                found["rows"].append((start - shard.start, V[start - part["start"] : stop - part["start"]]))
        if sum(len(V) for _, V in found["rows"]) != len(shard):
            raise DamagedFileError(f"{folder / MANIFEST} does not name all of the {head.num_classes} rows")

    _on_all_ranks(head, read)
    for start, V in found["rows"]:
        head.V[start : start + len(V)] = V
    head.w.copy_(found["w"])
    head.loaded(Q=found["Q"].to(head.w.device), steps=found["steps"])


def _write(tensors: dict[str, Tensor], folder: Path, name: str) -> dict[str, str]:
    """Write a file whose name depends on its content, so that another checkpoint in the same folder does not overwrite it."""
    unnamed = folder / f"{name}.pt"
    checksum = save(tensors, unnamed)
    unnamed.replace(named := folder / f"{name}-{checksum[:8]}.pt")
    return {"file": named.name, "sha256": checksum}


def _read(folder: Path, part: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors of these shapes; they stay in the file until they are used."""
    path = folder / Path(part["file"]).name
    state = load(path, part["sha256"], mmap=True)
    if not isinstance(state, dict) or {name: tuple(getattr(x, "shape", ())) for name, x in state.items()} != shapes:
        raise DamagedFileError(f"{path} does not hold tensors of the shapes {shapes}")
    return state


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if (folder / ".metadata").exists() and not path.exists():
        raise ValueError(
            f"{folder} was written by an earlier version, with a layout that is a pickle, and a pickle may execute anything: "
            "load it with that version and save the head's state_dict()"
        )
    if not path.exists():
        raise FileNotFoundError(
            f"there is no checkpoint at {folder} (it has no {MANIFEST}): give the folder of a save_checkpoint"
        )
    return load_json(path)


def _on_all_ranks(head: FactoredHead, call: Callable[[], Any]) -> list[Any]:
    """What ``call`` returns on each rank. If it raises on one, all raise an error of that kind, and no rank waits."""
    shard = head.shard
    error: Exception | None = None
    try:
        said = [None, call()]
    except Exception as caught:
        error = caught
        kind = max((i for i, kind in enumerate(KINDS) if isinstance(error, kind)), default=0)
        said = [kind, f"rank {shard.rank} of {shard.ranks}: {error}"]
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8).to(head.V.device)
    everyone = [json.loads(bytes(part.tolist())) for part in shard.gather(text)[0]]
    if error is not None:
        raise error
    for kind, value in everyone:
        if kind is not None:
            raise KINDS[kind](value)
    return [value for _, value in everyone]
