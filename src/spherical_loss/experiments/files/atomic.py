"""Writing whole files or nothing, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spherical_loss.files import replacing


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``. Whatever fails, the file is either the old one or the new one."""
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise named(error, path) from error


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which write and fsync do not give."""
    return OSError(error.errno, error.strerror, str(path))


def write_json(path: Path, value: Any) -> None:
    """:func:`write_atomically` of ``value`` as JSON, which knows neither nan nor infinity."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())
