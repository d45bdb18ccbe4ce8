"""Checkpoints of a factored or a tiered head, sharded or not: each rank writes its own rows, and reads those it needs.

A head saved by some number of ranks can be loaded by any other number, also by one process without a group::

    save_checkpoint(head, "step-1000")         # every rank calls it
    load_checkpoint(head, "step-1000")         # into a head of the same d, D and bias

A checkpoint is a folder that all ranks share::

    rows-0-500000-3fa8c1d2.pt      the rows of W of one rank, from 0 to 499,999; the name ends with a part of the checksum
    small-91b2cc07.pt              Q and w, the same on all ranks
    head.json                      layout, number of steps, and the names and checksums of the others

A tiered head has such files for each of its tiers, ``tier0-rows-...``, and one with the order of its classes.

``head.json`` is written last and replaced atomically, so a process that is killed leaves the previous checkpoint intact.
Every byte is checked when it is read, and nothing that was read is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spherical_loss.files import DamagedFileError, load, load_json, save, save_json
from spherical_loss.heads.base import Head
from spherical_loss.heads.factored import FactoredHead
from spherical_loss.heads.tiered import TieredHead

MANIFEST = "head.json"
OURS = ("rows-*.pt*", "small-*.pt*", "order-*.pt*", "tier*-*.pt*")  # files that a later checkpoint replaces
KINDS = (OSError, FileNotFoundError, ValueError, DamagedFileError)  # of errors that all ranks raise if one does

# What a manifest holds: the types of values, [x] for any number of x, (x, y) for x or y.
FILE = {"file": str, "sha256": str}
FACTORED = {"layout": [int], "steps": int, "rows": [{"start": int, "stop": int, **FILE}], "small": FILE}
TIERED = {"layout": [int], "frequencies": [float], "tiers": [(FACTORED, FILE)], "order": FILE}

AnyFactored = FactoredHead | TieredHead


def save_checkpoint(head: AnyFactored, folder: str | Path) -> None:
    """Write the head, replacing any checkpoint in ``folder``; it is refactored first, so that V is W.

    If a rank cannot write, all of them raise an ``OSError``.
    """
    folder = Path(folder)
    _on_all_ranks(head, lambda: folder.mkdir(parents=True, exist_ok=True))
    if isinstance(head, FactoredHead):
        manifest = _save_factored(head, folder, "")
    else:
        tiers = [_save_tier(tier, folder, f"tier{i}-", head) for i, (tier, _, _) in enumerate(head.ranges)]
        (order, *_) = _on_all_ranks(head, lambda: _write({"order": head.order}, folder, "order") if _is_first(head) else None)
        manifest = {"layout": head.layout(), "frequencies": head.tier_frequencies, "tiers": tiers, "order": order}

    def replace() -> None:
        if not _is_first(head):
            return
        save_json(manifest, folder / MANIFEST)
        there = {path for pattern in OURS for path in folder.glob(pattern)}
        for path in there - {folder / name for name in _files(manifest)}:
            path.unlink(missing_ok=True)  # from the previous checkpoint, or from one that was never finished

    _on_all_ranks(head, replace)


def _save_factored(head: FactoredHead, folder: Path, prefix: str) -> dict[str, Any]:
    """The rows of each rank and what is the same on all of them, as files; their part of the manifest."""
    head.refactor()
    shard = head.shard
    name = f"{prefix}rows-{shard.start}-{shard.stop}"
    rows = _on_all_ranks(head, lambda: {"start": shard.start, "stop": shard.stop, **_write({"V": head.V}, folder, name)})
    small = {"Q": head.Q.base, "w": head.w}
    (written, *_) = _on_all_ranks(head, lambda: _write(small, folder, f"{prefix}small") if _is_first(head) else None)
    return {"layout": head.layout(), "steps": head.steps, "rows": rows, "small": written}


def _save_tier(tier: Head, folder: Path, prefix: str, head: TieredHead) -> dict[str, Any]:
    if isinstance(tier, FactoredHead):
        return _save_factored(tier, folder, prefix)
    parameters = {name: p.detach() for name, p in tier.named_parameters()}
    (written, *_) = _on_all_ranks(head, lambda: _write(parameters, folder, f"{prefix}dense") if _is_first(head) else None)
    return dict(written)


@torch.no_grad()
def load_checkpoint(head: AnyFactored, folder: str | Path) -> None:
    """Load a checkpoint into ``head``, whatever number of ranks wrote it.

    If a rank misses a file, or finds one damaged, all of them raise a ``FileNotFoundError`` or a
    :class:`~spherical_loss.files.DamagedFileError`, and the head is unchanged.
    """
    folder = Path(folder)
    writes: list[Callable[[], None]] = []

    def read() -> None:
        manifest = _manifest(folder)
        if isinstance(head, FactoredHead) == ("tiers" in manifest):
            kind = "TieredHead" if "tiers" in manifest else "FactoredHead"
            raise ValueError(f"{folder} has a {kind}, but this is a {type(head).__name__}")
        head.check_layout(manifest["layout"])
        if isinstance(head, FactoredHead):
            writes.append(_read_factored(head, folder, manifest))
            return
        if not len(manifest["tiers"]) == len(manifest["frequencies"]) == len(head.ranges):
            raise DamagedFileError(f"{folder / MANIFEST} does not name all of the {len(head.ranges)} tiers")
        for (tier, _, _), part in zip(head.ranges, manifest["tiers"], strict=True):
            writes.append(_read_tier(tier, folder, part))
        order = _read(folder, manifest["order"], {"order": (head.num_classes,)})["order"]
        if not torch.equal(order.sort().values, torch.arange(head.num_classes)):
            raise DamagedFileError(f"{folder / manifest['order']['file']} is no order of {head.num_classes} classes")
        writes.append(lambda: head.loaded(order, manifest["frequencies"]))

    _on_all_ranks(head, read)
    for write in writes:
        write()


def _read_factored(head: FactoredHead, folder: Path, manifest: dict[str, Any]) -> Callable[[], None]:
    """Read and check the files of a factored head; what is returned writes them into the head."""
    shard, columns = head.shard, head.V.shape[1]
    head.check_layout(manifest["layout"])
    small = _read(folder, manifest["small"], {"Q": (columns, columns), "w": (columns,)})
    rows = []
    for part in sorted(manifest["rows"], key=itemgetter("start")):
        start, stop = max(part["start"], shard.start), min(part["stop"], shard.stop)
        if start < stop:
            V = _read(folder, part, {"V": (part["stop"] - part["start"], columns)})["V"]
            rows.append((start - shard.start, V[start - part["start"] : stop - part["start"]]))
    ends = [0, *accumulate(len(V) for _, V in rows)]
    if [start for start, _ in rows] != ends[:-1] or ends[-1] != len(shard):
        raise DamagedFileError(f"{folder / MANIFEST} does not name all of the {head.num_classes} rows")

    def write() -> None:
        for start, V in rows:
            head.V[start : start + len(V)] = V
        head.w.copy_(small["w"])
        head.loaded(Q=small["Q"].to(head.w.device), steps=manifest["steps"])

    return write


def _read_tier(tier: Head, folder: Path, part: dict[str, Any]) -> Callable[[], None]:
    if isinstance(tier, FactoredHead) != ("rows" in part):
        raise ValueError(f"{folder} has tiers of other kinds than this head: make it alike")
    if isinstance(tier, FactoredHead):
        return _read_factored(tier, folder, part)
    state = _read(folder, part, {name: tuple(p.shape) for name, p in tier.named_parameters()})

    def write() -> None:
        tier.load_state_dict(state)

    return write


def _is_first(head: AnyFactored) -> bool:
    return head.shard.rank == 0


def _files(manifest: Any) -> set[str]:
    """The names of all files that a manifest names."""
    if isinstance(manifest, dict):
        named = {manifest["file"]} if "file" in manifest else set()
        return named.union(*(_files(value) for value in manifest.values()))
    return set().union(*(_files(value) for value in manifest)) if isinstance(manifest, list) else set()


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
    dense = isinstance(state, dict) and all(
        isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta for x in state.values()
    )
    if not dense or {name: tuple(x.shape) for name, x in state.items()} != shapes:
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
    manifest = load_json(path)
    if not _is(TIERED if "tiers" in manifest else FACTORED, manifest):
        raise DamagedFileError(f"{path} does not describe the checkpoint of a head: it has the keys {', '.join(manifest)}")
    return manifest


def _is(kind: Any, value: Any) -> bool:
    """Whether a value of a manifest is of the kind: a type, or a composition of types as in ``FACTORED``."""
    if isinstance(kind, tuple):
        return any(_is(one, value) for one in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(kind[0], x) for x in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(name in value and _is(of, value[name]) for name, of in kind.items())
    return isinstance(value, kind)


def _on_all_ranks(head: AnyFactored, call: Callable[[], Any]) -> list[Any]:
    """What ``call`` returns on each rank. If it raises on one, all raise an error of that kind, and no rank waits."""
    shard = head.shard
    error: Exception | None = None
    try:
        said = [None, call()]
    except Exception as caught:
        error = caught
        kind = max((i for i, kind in enumerate(KINDS) if isinstance(error, kind)), default=0)
        said = [kind, f"rank {shard.rank} of {shard.ranks}: {error}"]
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8).to(
        head.w.device if isinstance(head, FactoredHead) else head.order.device
    )
    everyone = [json.loads(bytes(part.tolist())) for part in shard.gather(text)[0]]
    if error is not None:
        raise error
    for kind, value in everyone:
        if kind is not None:
            raise KINDS[kind](value)
    return [value for _, value in everyone]
