"""Files that are whole or not there: written under a temporary name, synced, and renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``, all of it or (whatever happens) nothing."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise named(error, path) from error


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` last, where the system lets one open folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which write and fsync do not give."""
    return OSError(error.errno, error.strerror, str(path))


def write_json(path: Path, value: Any) -> None:
    """:func:`write_atomically` of ``value`` as JSON, which knows neither nan nor infinity."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())
