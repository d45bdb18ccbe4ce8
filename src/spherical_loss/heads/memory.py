"""Memory for the intermediate results of batches and steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Memory:
    """Uninitialized tensors that the next step uses again.

    A training step has some twenty intermediate results of N x d or d x d numbers. The system takes memory of that size back as
    soon as it is free, and every step would pay for its page faults: 15% of the step at N = 250 and d = 300. After
    :meth:`reuse`, the n-th tensor that is asked for has the memory of the n-th one before.

    >>> memory, x = Memory(), torch.zeros(2, 3)
    >>> first = memory.like(x)
    >>> memory.reuse()
    >>> memory.like(x, 3, 2).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.given: list[Tensor] = []  # the last part of each that was given out: the next one is often the same
        self.used = 0

    def like(self, x: Tensor, *shape: int) -> Tensor:
        """A tensor with the dtype and the device of ``x``, and its shape unless another one is given."""
        shape, i = shape or x.shape, self.used
        self.used += 1
        if i == len(self.given):
            self.buffers.append(x.new_empty(0))
            self.given.append(x.new_empty(0))
        given = self.given[i]
        if given.shape == shape and given.dtype == x.dtype and given.device == x.device:
            return given
        buffer, size = self.buffers[i], math.prod(shape)
        if buffer.numel() < size or buffer.dtype != x.dtype or buffer.device != x.device:
            buffer = self.buffers[i] = torch.empty(size, dtype=x.dtype, device=x.device)
        given = self.given[i] = buffer[:size].view(shape)
        return given

    def reuse(self) -> None:
        """What was given out so far is no longer needed."""
        self.used = 0

    def __deepcopy__(self, memo: Any) -> Memory:
        return Memory()  # a copy of the head has its own

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, ()
