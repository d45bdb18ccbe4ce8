"""One process at a time: locks that the operating system takes back when their process dies, however it dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class BusyError(Exception):
    """Another process has the lock."""


@contextmanager
def locked(path: Path, wait: bool = True, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is made if need be and left where it is: removing it would let in two.

    If another process has the lock, ``waiting()`` is called and then this one waits; without ``wait``, :class:`BusyError`.
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
