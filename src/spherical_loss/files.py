"""Files that are written completely or not at all, with a checksum that detects any change.

    save(state, path)      # torch.save, with a checksum at the end; replaces the old file atomically
    state = load(path)     # DamagedFileError if a bit has changed; nothing in the file is executed

``torch.load`` does not verify checksums: a flipped bit in a weight goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

PARTIAL = ".partial"
BLOCK = 2**22  # bytes that are read at once
DIGEST = hashlib.sha256().digest_size


class DamagedFileError(ValueError):
    """A file has changed since it was written; the message names it."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes ``path`` at the end of the block; whatever happens before, ``path`` stays as it was."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, where the system allows opening folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Hashing:
    """A file that torch.save can write to, and the checksum of what it wrote."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(state: Any, path: Path) -> str:
    """``torch.save``, with the SHA-256 of all bytes as the last 32; returns it. ``torch.load`` reads the file, too."""
    with replacing(path) as file:
        hashing = _Hashing(file)
        torch.save(state, cast(IO[bytes], hashing))
        file.write(hashing.sha256.digest())
    return hashing.sha256.hexdigest()


def load(path: Path, sha256: str | None = None, mmap: bool = False) -> Any:
    """What :func:`save` wrote, if it has not changed, and, with ``sha256``, if it is the file with that checksum.

    Only tensors and plain Python values are read (``weights_only``). With ``mmap`` the tensors stay in the file until they are
    used.
    """
    found, written = _checksums(path)
    if found != written or sha256 not in (None, written):
        raise DamagedFileError(f"{path} is damaged: its checksum is {found[:12]}, but should be {(sha256 or written)[:12]}")
    try:
        return torch.load(path, weights_only=True, mmap=mmap, map_location="cpu" if mmap else None)
    except Exception as error:  # torch raises many kinds
        raise DamagedFileError(f"{path} was not written by this library: torch cannot read it without executing it") from error


def save_json(content: dict[str, Any], path: Path) -> None:
    """``content`` as JSON, with the additional key ``sha256``, the checksum of the others."""
    with replacing(path) as file:
        file.write(json.dumps({**content, "sha256": _checksum(content)}).encode())


def load_json(path: Path) -> dict[str, Any]:
    """What :func:`save_json` wrote, if it has not changed."""
    try:
        content = json.loads(path.read_bytes())
        written = content.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if (found := _checksum(content)) != written:
        raise DamagedFileError(f"{path} is damaged: its checksum is {found[:12]}, but should be {written!s:.12}")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of all bytes of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _checksums(path: Path) -> tuple[str, str]:
    """The SHA-256 of all but the last 32 bytes, and those 32 bytes."""
    left = path.stat().st_size - DIGEST
    if left < 0:
        raise DamagedFileError(f"{path} is damaged: it has {left + DIGEST} bytes, less than a checksum")
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while left > 0 and (block := file.read(min(left, BLOCK))):
            digest.update(block)
            left -= len(block)
        return digest.hexdigest(), file.read().hex()
