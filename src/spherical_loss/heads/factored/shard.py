"""Which rows of the weights a process keeps, and how processes exchange what they need of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spherical_loss.heads.base import TopK

SAID = 232  # characters of a message that all ranks show if they do not agree


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


class Shard:
    """The rows ``start`` to ``stop`` of D that this process keeps: all of them without a process group.

    With a group of R processes the rows are cut as ``torch.chunk`` cuts them, ``ceil(D / R)`` each and fewer, or none, for the
    last. All methods that take a tensor are collective: every process of the group must call them.
    """

    def __init__(self, D: int, group: dist.ProcessGroup | None = None, **layout: object) -> None:
        self.group = group
        self.layout = {"D": D, **layout}
        """What must be the same in all processes, at every exchange."""
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

    def gather(self, *tensors: Tensor, **options: object) -> tuple[list[Tensor], ...]:
        """For each tensor, that of every process. The tensors of one process have the same length; processes may differ.

        Shapes, dtypes, and the ``options`` must be the same: see :meth:`agree`.
        """
        if self.group is None:
            return tuple([x] for x in tensors)
        counts = self._lengths(len(tensors[0]), [x[:0] for x in tensors], options)
        return tuple(self._gather_padded(x, counts) for x in tensors)

    def everywhere(self, here: bool, like: Tensor, **options: object) -> bool:
        """Whether it is so in all processes."""
        return here if self.group is None else all(self._lengths(int(here), [like[:0]], options))

    def topk(self, hidden: Tensor, k: int, search: Callable[[Tensor], TopK]) -> TopK:
        """The best classes of all processes for the hidden vectors (..., d) of each; ``search`` finds those kept here: k, or
        all of them where fewer are kept."""
        (batches,) = self.gather(hidden.reshape(-1, hidden.shape[-1]), k=k)
        found = search(torch.cat(batches))
        scores, classes = (torch.cat(parts).T for parts in self.gather(*(x.T.contiguous() for x in found)))
        best = scores.topk(k)
        first, count = sum(len(batch) for batch in batches[: self.rank]), len(batches[self.rank])
        mine, shape = slice(first, first + count), (*hidden.shape[:-1], k)
        return TopK(best.values[mine].reshape(shape), classes.gather(1, best.indices)[mine].reshape(shape))

    def agree(self, *tensors: Tensor, **options: object) -> None:
        """Raise a ``ValueError`` in all processes unless they all come here, with the same layout, options, and shapes.

        Otherwise they would exchange what has nothing to do with each other, or abort in the middle of it.
        """
        if self.group is not None:
            self._lengths(0, tensors, options)

    def _lengths(self, length: int, tensors: Sequence[Tensor], options: dict[str, object]) -> list[int]:
        """The lengths of all processes, exchanged together with what must be the same."""
        shapes = {"tensors": " ".join(f"{str(x.dtype)[6:]}{list(x.shape)}" for x in tensors)}
        text = ", ".join(f"{name}={value}" for name, value in {**self.layout, **options, **shapes}.items()).encode()
        mine = length.to_bytes(8, "little") + sha256(text).digest()[:16] + text[:SAID].ljust(SAID)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(tensors[0].device)
        parts = [torch.empty_like(sent) for _ in range(self.ranks)]
        self._collective(sent, lambda: dist.all_gather(parts, sent, group=self.group))
        if not all(torch.equal(part[8:], sent[8:]) for part in parts):
            said = "; ".join(f"rank {rank}: {bytes(part[24:].tolist()).decode().strip()}" for rank, part in enumerate(parts))
            raise ValueError(f"the ranks do not agree ({said}): all must make the same calls, with heads and options alike")
        return [int.from_bytes(bytes(part[:8].tolist()), "little") for part in parts]

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
