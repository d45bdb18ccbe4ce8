"""Damage to files: flipped bits, and malicious content."""

from __future__ import annotations

import os
from pathlib import Path


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """``at`` is a byte, counted from the end if it is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


class Executed:
    """Unpickling it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)
