"""Which rows of the weights a process keeps, and how processes exchange what they need of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Shard:
    """The rows ``start`` to ``stop`` of D that this process keeps: all of them without a process group.

    With a group of R processes the rows are cut as ``torch.chunk`` cuts them, ``ceil(D / R)`` each and fewer, or none, for the
    last. All methods that take a tensor are collective: every process of the group must call them.
    """

    def __init__(self, D: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        size = -(-D // self.ranks)
        self.start, self.stop = min(self.rank * size, D), min((self.rank + 1) * size, D)
        self.sent = 0
        """Bytes this process has given to collectives so far."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __deepcopy__(self, memo: Any) -> Shard:
        copied = Shard.__new__(Shard)  # a process group cannot be copied, and need not be
        copied.__dict__.update(self.__dict__)
        return copied

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.group is not None:
            self._collective(x, lambda: dist.all_reduce(x, group=self.group))
        return x

    def gather(self, *tensors: Tensor) -> tuple[list[Tensor], ...]:
        """For each tensor, that of every process. The tensors of one process have the same length; processes may differ."""
        if self.group is None:
            return tuple([x] for x in tensors)
        length = torch.tensor([len(tensors[0])], device=tensors[0].device)
        lengths = [torch.zeros_like(length) for _ in range(self.ranks)]
        self._collective(length, lambda: dist.all_gather(lengths, length, group=self.group))
        counts = [int(n) for n in lengths]
        return tuple(self._gather_padded(x, counts) for x in tensors)

    def _gather_padded(self, x: Tensor, counts: list[int]) -> list[Tensor]:
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        self._collective(padded, lambda: dist.all_gather(parts, padded, group=self.group))
        return [part[:n] for part, n in zip(parts, counts, strict=True)]

    def _collective(self, x: Tensor, call: Callable[[], object]) -> None:
        self.sent += x.nbytes
        try:
            call()
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {self.rank} of {self.ranks} could not exchange data with the others: one of them may have died, or "
                "waited longer than the timeout of the process group; start again from the last checkpoint"
            ) from error
