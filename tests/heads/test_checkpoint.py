"""Checkpoints of a factored head on one process: what is damaged is named, and nothing is executed; see also test_sharded."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spherical_loss import FactoredHead, TieredHead, files
from spherical_loss.files import DamagedFileError, load_json, save_json
from spherical_loss.heads import checkpoint
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint

from ..support.damage import Executed, flip_bit

d, D = 5, 30


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    head, other = FactoredHead(d, D), FactoredHead(d, D, init="zero")
    head.steps = 7
    save_checkpoint(head, tmp_path / "saved")
    load_checkpoint(other, tmp_path / "saved")
    assert torch.equal(other.V, head.V)
    assert torch.equal(other.Q.exact, head.Q.exact)
    assert torch.equal(other.w, head.w)
    assert other.steps == 7


def test_a_flipped_bit_anywhere_is_named_and_the_head_is_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(FactoredHead(d, D), tmp_path / "saved")
    head = FactoredHead(d, D)
    before = head.state_dict()
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert [name.split("-")[0] for name in names] == ["head.json", "rows", "small"]
    for name in names:
        size = (tmp_path / "saved" / name).stat().st_size
        for k in range(40):
            damaged = shutil.copytree(tmp_path / "saved", tmp_path / "damaged", dirs_exist_ok=True)
            flip_bit(damaged / name, at=size * k // 40, bit=k % 8)
            with pytest.raises(DamagedFileError, match=f"{name}.* is damaged"):
                load_checkpoint(head, damaged)
    after = head.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    head = FactoredHead(d, D)
    for name in ("one", "two"):
        save_checkpoint(FactoredHead(d, D), tmp_path / name)
    rows = {name: next((tmp_path / name).glob("rows-*")) for name in ("one", "two")}
    shutil.copy(rows["one"], rows["two"])  # whole, but of another checkpoint
    with pytest.raises(DamagedFileError, match=f"{rows['two'].name} is damaged"):
        load_checkpoint(head, tmp_path / "two")
    rows["two"].unlink()
    with pytest.raises(FileNotFoundError, match=rows["two"].name):
        load_checkpoint(head, tmp_path / "two")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(head, tmp_path / "nowhere")


def test_an_old_checkpoint_is_a_message_and_its_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Executed(tmp_path / "executed")))
    with pytest.raises(ValueError, match="written by an earlier version"):
        load_checkpoint(FactoredHead(d, D), tmp_path)
    assert not (tmp_path / "executed").exists()


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attacker knows the format, and computes the right checksums."""
    head, crafted = FactoredHead(d, D), Executed(tmp_path / "executed")
    save = checkpoint.save
    for name in ("rows", "small"):

        def harmful(tensors: dict[str, object], path: Path, name: str = name) -> str:
            return save({**tensors, "V": crafted} if path.name.startswith(name) else tensors, path)

        monkeypatch.setattr(checkpoint, "save", harmful)
        save_checkpoint(head, tmp_path / name)
        with pytest.raises(DamagedFileError, match=f"{name}-.* was not written by this library"):
            load_checkpoint(head, tmp_path / name)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(crafted))
    assert (tmp_path / "executed").exists()


ANYTHING = (None, True, -1, 1.5, math.inf, 10**30, "x", [], {}, [1, 2], [[1]], ["6", "1", "400"], [None] * 3, {"a": 1})


@pytest.mark.parametrize(
    "make", [lambda: FactoredHead(d, D), lambda: TieredHead(d, D, cuts=(10,), kinds=("dense", "factored"))]
)
def test_a_manifest_with_anything_in_it_is_a_message(tmp_path: Path, make: Callable[[], FactoredHead | TieredHead]) -> None:
    """Its checksum is right, but it was not written by this version: values are missing, or of any kind."""
    head, whole, folder = make(), make(), tmp_path / "saved"
    save_checkpoint(whole, folder)
    manifest, before = load_json(folder / checkpoint.MANIFEST), copy.deepcopy(head.state_dict())
    for place, key in places(manifest):
        for value in ("missing", *ANYTHING):
            changed = copy.deepcopy(manifest)
            inside = functools.reduce(lambda part, k: part[k], place, changed)
            inside.pop(key) if value == "missing" else operator.setitem(inside, key, value)
            save_json(changed, folder / checkpoint.MANIFEST)
            try:
                load_checkpoint(head, folder)
            except (ValueError, OSError):
                assert all(torch.equal(x, before[name]) for name, x in head.state_dict().items())
            else:  # such as another number of steps
                assert torch.equal(head.weight, whole.weight)
                head.load_state_dict(before)


def places(part: Any, *place: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All values of nested dicts and lists: where each is, and its key."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield place, key
        if isinstance(value, dict | list):
            yield from places(value, *place, key)


def test_rows_that_are_named_twice_are_not_all_rows(tmp_path: Path) -> None:
    save_checkpoint(FactoredHead(d, D), tmp_path)
    manifest = load_json(tmp_path / checkpoint.MANIFEST)
    half = FactoredHead(d, D // 2)
    rows = {"start": 0, "stop": D // 2, **checkpoint._write({"V": half.V}, tmp_path, "rows")}
    save_json({**manifest, "rows": [rows, rows]}, tmp_path / checkpoint.MANIFEST)
    with pytest.raises(DamagedFileError, match=f"does not name all of the {D} rows"):
        load_checkpoint(FactoredHead(d, D), tmp_path)


def test_an_order_that_is_none(tmp_path: Path) -> None:
    head = TieredHead(d, D, cuts=(10,))
    save_checkpoint(head, tmp_path)
    manifest = load_json(tmp_path / checkpoint.MANIFEST)
    for order in (torch.zeros(D, dtype=torch.long), torch.arange(D) + 1):
        save_json({**manifest, "order": checkpoint._write({"order": order}, tmp_path, "order")}, tmp_path / checkpoint.MANIFEST)
        with pytest.raises(DamagedFileError, match=f"is no order of {D} classes"):
            load_checkpoint(head, tmp_path)


def test_killed_while_saving_the_checkpoint_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    head, folder = FactoredHead(d, 2000, init="zero"), tmp_path / "saved"
    save_checkpoint(head, folder)
    whole, interrupted = len(list(folder.iterdir())), 0
    for k in range(12):
        before = (folder / checkpoint.MANIFEST).stat().st_ino
        if (child := os.fork()) == 0:
            try:
                for step in itertools.count(1_000 * k + 1):
                    head.steps = step
                    head.V.fill_(step)
                    save_checkpoint(head, folder)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 60
        while (folder / checkpoint.MANIFEST).stat().st_ino == before and time.monotonic() < deadline:
            time.sleep(0.001)  # until the child has saved once
        time.sleep(0.002 * k)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        interrupted += len(list(folder.iterdir())) > whole  # files of a checkpoint that was never finished
        loaded = FactoredHead(d, 2000, init="zero")
        load_checkpoint(loaded, folder)
        assert loaded.steps > 1_000 * k
        assert torch.equal(loaded.V, torch.full_like(loaded.V, loaded.steps))
    assert interrupted > 0


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = FactoredHead(d, D)
    save_checkpoint(head, tmp_path / "saved")
    before = {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    monkeypatch.setattr(files.os, "fsync", lambda _: Path("/dev/full").write_text("x"))
    head.V.fill_(1)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(head, tmp_path / "saved")
    assert {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
