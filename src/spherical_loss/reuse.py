"""Memory of gradients, used again from step to step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**25  # bytes; larger ones belong to the system between two steps

_use_count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_kept: list[Tensor] = []  # a single one, but for threads that ask at the same time


def room_like(x: Tensor) -> Tensor:
    """Memory for a gradient of ``x``, on the CPU: that of the gradient before, if nobody has it any more.

    glibc gives freed memory back to the system now and then, by where it lies, and who gets it next pays for a page fault every
    4 KiB: at 250 x 10,000 up to 2 ms a step, in which the arithmetic takes 0.45. So the last gradient of up to 32 MiB, the size
    that glibc may keep, stays here, to be written again as soon as no tensor, array or storage shares its memory.

    >>> import torch
    >>> first = room_like(x := torch.ones(4, 5))
    >>> address, view = first.data_ptr(), first[0]
    >>> del first
    >>> room_like(x).data_ptr() == address  # the view has it
    False
    """
    if _use_count is None or type(x) is not Tensor or x.nbytes > LARGEST or not x.is_contiguous():
        return torch.empty_like(x)
    try:
        kept = _kept.pop()  # nobody else finds it until it is back with one more user
    except IndexError:
        kept = None
    if kept is None or kept.dtype != x.dtype or kept.numel() != x.numel() or not _is_free(kept):
        kept = torch.empty(x.numel(), dtype=x.dtype, device="cpu")
    room = kept.view(x.shape)
    _kept.append(kept)
    return room


def _is_free(kept: Tensor) -> bool:
    return _users(kept) == _one_user() and not kept.is_shared()  # another process may read what is shared


@cache
def _one_user() -> tuple[int, int]:
    return _users(torch.empty(1, device="cpu"))


def _users(x: Tensor) -> tuple[int, int]:
    """How many have the memory of a tensor in C++, and its storage in Python, where all share one object."""
    assert _use_count is not None
    storage = x.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)
