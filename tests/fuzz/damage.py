"""Files with anything in them: what is read is what was written, or an error that names the file, and nothing else happens."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from spherical_loss import FactoredHead
from spherical_loss.experiments.data.text import read_corpus
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.report.write_report import write_report
from spherical_loss.experiments.results.collect import collect
from spherical_loss.experiments.results.store import add_runs, read_runs
from spherical_loss.files import DamagedFileError
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint
from tests.experiments.results.stores import image_line, text_line

STRANGE: list[Any] = [
    None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "..", "../../escaped", "a\\b", "$x_", "<script>", "\0",
    "\ud800", [], [[]], {}, {"": {}}, ["dense"], "dense", 1.5,
]  # fmt: skip


def changed(value: Any, chance: random.Random) -> Any:
    """``value`` with something somewhere in it deleted, added, or replaced."""
    value = copy.deepcopy(value)
    inside, key = [value], 0
    while isinstance(inside[key], (dict, list)) and inside[key] and chance.random() < 0.8:  # type: ignore[index]
        inside = inside[key]  # type: ignore[assignment]
        key = chance.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    action = chance.choice(["replace", "replace", "delete", "add"])
    if action == "delete":
        inside.pop(key)
    elif action == "add" and isinstance(inside, dict):
        inside[chance.choice(["x", "", "start", "data", "pruned", "\0"])] = chance.choice(STRANGE)
    else:
        inside[key] = chance.choice(STRANGE)
    return value if not isinstance(inside, list) or value is not inside else inside


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Some bytes of ``content`` changed, or a part of it missing."""
    changed = bytearray(content)
    if chance.random() < 0.2:
        return content[: chance.randrange(len(content))]
    for _ in range(chance.choice([1, 1, 1, 5])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def damage(seed: int) -> str:
    """One damaged file; gives what it was, and what was said."""
    chance = random.Random(seed)
    kind = chance.choice([damage_store, damage_folder, damage_head, damage_cache])
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "a", "b", "c")
        inner.mkdir(parents=True)
        said = kind(inner, chance)
        outside = [path for path in Path(folder).rglob("*") if path.is_file() and inner not in path.parents]
        assert not outside, f"written elsewhere: {outside} (seed {seed})"
    return f"{kind.__name__}: {said}"


def named(path: Path, error: Exception) -> str:
    assert str(path) in str(error), f"{path} is not named: {error}"
    return str(error)


def damage_store(folder: Path, chance: random.Random) -> str:
    """A line of the results; then the report."""
    lines = [image_line("taylor", 0, 0.01), image_line("softmax", 0, 0.02), text_line("softmax", 0, 100.0)]
    lines += [text_line("bound", 0, 100.0, task="bounds")]
    add_runs(folder, lines)
    path = chance.choice(sorted((folder / "runs").glob("*.jsonl")))
    if chance.random() < 0.7:
        stored = [changed(json.loads(line), chance) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in stored))
    else:
        path.write_bytes(flipped(path.read_bytes(), chance))
    try:
        read_runs(folder)
        write_report(folder, folder / "report.html", None)
    except UserError as error:
        return named(path.parent, error)
    assert "<script>" not in (folder / "report.html").read_text()
    return "read"


def damage_folder(folder: Path, chance: random.Random) -> str:
    """A file of a run; then ``collect``."""
    line = chance.choice([image_line("taylor", 0, 0.01), text_line("taylor", 0, 100.0)])
    run = folder / "out" / line["run"]["task"] / line["name"]
    run.mkdir(parents=True)
    parts = {"config": line["run"], "environment": line["environment"], "result": line["result"]}
    which = chance.choice(list(parts))
    parts[which] = changed(parts[which], chance)
    for name, content in parts.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    (run / "metrics.jsonl").write_bytes(chance.choice([b"", b"", b"", b"", b"[]\n", b"{}\n", b"\xff\n", b'{"epoch": 1}\n']))
    try:
        collect(folder / "out", folder / "results", False, lambda text: None)
        read_runs(folder / "results")
    except UserError as error:
        return named(run, error)
    return "read"


def damage_head(folder: Path, chance: random.Random) -> str:
    """A file of a checkpoint."""
    head, other = FactoredHead(4, 20), FactoredHead(4, 20, init="zero")
    save_checkpoint(head, folder)
    path = chance.choice(sorted(folder.iterdir()))
    path.write_bytes(flipped(path.read_bytes(), chance))
    try:
        load_checkpoint(other, folder)
    except DamagedFileError as error:
        if not other.V.any():
            return named(path, error)
    raise AssertionError(f"{path.name} is not what was written, but was read")


def damage_cache(folder: Path, chance: random.Random) -> str:
    """A file of an encoded text."""
    text = folder / "text.txt"
    text.write_text("a b c a b\n")

    def encoded() -> tuple[list[str], list[int]]:
        corpus = read_corpus([[text]], 1, "spaces", "full", 1, folder / "cache")
        return corpus.words, corpus.parts[0].tolist()

    before = encoded()
    path = chance.choice(sorted((folder / "cache").glob("*/*")))
    path.write_bytes(flipped(path.read_bytes(), chance))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert encoded() == before
    assert str(path) in said.getvalue()
    return said.getvalue()
