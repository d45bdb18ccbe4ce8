"""What went wrong with a file, in words."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spherical_loss.experiments.data.folder import VARIABLE, data_folder


def warn(text: str) -> None:
    """Report a problem that has been handled; also with --quiet, and on a worker."""
    print(f"spherical-loss: {text}", file=sys.stderr, flush=True)


@contextmanager
def silent_threads(*kinds: type[BaseException]) -> Iterator[None]:
    """A thread of a library that dies of one of these prints no traceback: what it did is missed by this one, which says so."""
    hook = threading.excepthook

    def print_others(failure: threading.ExceptHookArgs) -> None:
        if not issubclass(failure.exc_type, kinds):
            hook(failure)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = hook


def explain(error: OSError) -> str:
    """What went wrong with a file, and the remedy, in one sentence."""
    where = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {where}: free some and run the same command again; finished runs are kept"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {where}: change its permissions, or choose another place ({place_of(where)})"
    if error.errno == errno.ENOTDIR:
        return f"{where} cannot be written, since a part of its path is not a folder: choose another place ({place_of(where)})"
    return f"{where}: {error.strerror or error}"


def place_of(where: str) -> str:
    """The option or variable that decides where a file is written."""
    if data_folder().absolute() in Path(where).absolute().parents:
        return f"the variable {VARIABLE}"
    return "--out"
