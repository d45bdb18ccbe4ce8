"""One process at a time: locks that the operating system releases when their process dies, however it dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class BusyError(Exception):
    """Another process has the lock."""


@contextmanager
def locked(path: Path, wait: bool = True, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is created if necessary and never removed: removing it could give two processes
    the lock.

    If another process has the lock, ``waiting()`` is called and this process waits; without ``wait`` it raises
    :class:`BusyError`.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise BusyError(str(path)) from None
        waiting()
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()
