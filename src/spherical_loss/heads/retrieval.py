"""Fast approximate top-k over very many classes, through a faiss index of the weights (the ``faiss`` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spherical_loss.base import Loss
from spherical_loss.files import DamagedFileError, load, save
from spherical_loss.heads.base import CHUNK, Head, TopK
from spherical_loss.heads.factored.keeper import GradientKeeper

FEW_CLASSES = 4_096  # below, codes of four bits cannot be trained well, and an exact search takes no time
CANDIDATES = 64  # for each of the k classes; see the measurement in docs/guides/serving.md


class FaissIndex:
    """An index over a snapshot of a head's weights. If the head is trained further, the index must be built again.

    The losses of the family are not monotone in the outputs: the Taylor softmax prefers the largest ``|o + 1|``, the spherical
    softmax ``|o|``. So both signs are searched, for the largest and for the smallest outputs. For all candidates the head then
    computes the outputs, and the loss itself ranks them: only the choice of the candidates is approximate.

    Args:
        head: any head.
        factory: a faiss index factory string. By default all rows of W are compared, through codes of four bits for every two
            numbers, a sixteenth of their memory: this needs no clusters in the data. With fewer than 4,096 classes it is
            ``"Flat"``, which is exact. ``"IVF1024,Flat"`` searches ``nprobe`` of 1024 clusters of rows.
        nprobe: how many clusters are searched, for indexes that have them.
        candidates: for each of the ``k`` classes, how many the index is asked for, of either sign: more is slower and finds
            more. By default 64, and 1 for an index that keeps the rows as they are (``"...Flat"``). See :meth:`tune`.

    >>> import torch
    >>> from spherical_loss import FaissIndex, TaylorSoftmaxLoss
    >>> from spherical_loss.heads import DenseHead
    >>> _ = torch.manual_seed(0)
    >>> head, hidden, loss = DenseHead(16, 20_000), torch.randn(50, 16), TaylorSoftmaxLoss()
    >>> index = FaissIndex(head)
    >>> found = index.tune(hidden, 5, loss, recall=0.9)
    >>> found >= 0.9, index.topk(hidden, 5, loss).classes.shape
    (True, torch.Size([50, 5]))
    """

    def __init__(self, head: Head, factory: str | None = None, nprobe: int = 32, candidates: int | None = None) -> None:
        faiss = _faiss()
        if not isinstance(head, Head):
            raise TypeError(
                f"FaissIndex takes a head, not {type(head).__name__}: for an AdaptiveSphericalSoftmax layer.tail, whose class "
                "i is layer.order[layer.frequent + i]; for a SampledSoftmax layer.head"
            )
        if isinstance(head, GradientKeeper) and head.shard.group is not None:
            raise ValueError(
                f"a rank of a sharded head has only {len(head.shard)} of the {head.num_classes} rows: load its checkpoint into "
                "a head without a group, and index that one, or use head.topk"
            )
        if candidates is not None and candidates < 1:
            raise ValueError(f"candidates is {candidates}, but must be at least 1 for each of the k classes")
        self.head = head
        self.width = head.in_features + head.has_bias
        factory = default_factory(self.width, head.num_classes) if factory is None else factory
        self.candidates = candidates or (1 if factory.endswith("Flat") else CANDIDATES)
        self.index = faiss.index_factory(self.width, factory, faiss.METRIC_INNER_PRODUCT)
        rows = max(1, CHUNK // self.width)
        if not self.index.is_trained:  # on evenly spaced rows: 64 per cluster are enough, and faiss warns below 39
            clusters = 16 if self._clusters is None else int(self._clusters.nlist)
            sample = max(1, head.num_classes // max(rows, 64 * clusters))
            self.index.train(_numpy(head.dense_rows(slice(0, head.num_classes, sample))))
        for start in range(0, head.num_classes, rows):
            self.index.add(_numpy(head.dense_rows(slice(start, min(start + rows, head.num_classes)))))
        if self._clusters is not None:
            self._clusters.nprobe = nprobe

    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        """As :meth:`Head.topk`, among the classes the index finds; where it finds fewer than k, -1 with score -inf."""
        if not 1 <= k <= self.head.num_classes:
            raise ValueError(f"k is {k}, but must be between 1 and the {self.head.num_classes} classes")
        H = hidden.detach().reshape(-1, self.head.in_features)
        examples = max(1, CHUNK // (2 * self._asked(k) * self.width))  # at a time: the rows of all their candidates are read
        best = [self._best(part, k, loss) for part in H.split(examples)]
        shape = (*hidden.shape[:-1], k)
        return TopK(*(torch.cat(part).reshape(shape) for part in zip(*best, strict=True)))

    def recall(self, hidden: Tensor, k: int, loss: Loss) -> float:
        """The share of the exact top k that the index finds."""
        return self._recall(self.head.topk(hidden, k, loss).classes, hidden, k, loss)

    def tune(self, hidden: Tensor, k: int, loss: Loss, recall: float = 0.95) -> float:
        """Search no more than these hidden vectors need for a mean ``recall`` of their ``k`` best classes; returns that found.

        Sets ``nprobe``, where the index has clusters, and then ``candidates`` to the smallest power of two that is enough. Some
        hundred vectors as they will occur, and not those the head was trained with, make a good estimate.
        """
        if not 0 < recall <= 1:
            raise ValueError(f"recall is {recall}, but must be a share between 0 and 1")
        exact = self.head.topk(hidden, k, loss).classes
        if (clusters := self._clusters) is not None:
            self.candidates = CANDIDATES
            for n in _powers_of_two(int(clusters.nlist)):
                clusters.nprobe = n
                if self._recall(exact, hidden, k, loss) >= recall:
                    break
        for n in _powers_of_two(-(-self.head.num_classes // k)):
            self.candidates = n
            if (found := self._recall(exact, hidden, k, loss)) >= recall:
                break
        return found

    def save(self, path: str | PathLike[str]) -> None:
        """Write the index and its parameters, with a checksum; the weights of the head are not among them."""
        state = {
            "index": torch.from_numpy(_faiss().serialize_index(self.index)),
            "candidates": self.candidates,
            "layout": self._layout(),
            "rows": self._sample(),
        }
        save(state, Path(path))

    @classmethod
    def load(cls, path: str | PathLike[str], head: Head) -> FaissIndex:
        """What :meth:`save` wrote, for a head with the weights it was built from; other weights are a ``ValueError``."""
        faiss, state = _faiss(), load(Path(path))
        if not (isinstance(state, dict) and {"index", "candidates", "layout", "rows"} <= state.keys()):
            raise DamagedFileError(f"{path} is not an index that FaissIndex.save wrote")
        index = cls.__new__(cls)
        index.head, index.width, index.candidates = head, head.in_features + head.has_bias, state["candidates"]
        if state["layout"] != index._layout():
            names = "in_features={}, bias={} and num_classes={}"
            raise ValueError(
                f"{path} is the index of a head with {names.format(*state['layout'])}, but this one has "
                f"{names.format(*index._layout())}"
            )
        here, there = index._sample(), state["rows"]
        if not torch.allclose(here, there, rtol=1e-3, atol=1e-3 * float(there.abs().max())):
            raise ValueError(f"{path} is the index of other weights: build it again, FaissIndex(head), and save it")
        index.index = faiss.deserialize_index(state["index"].numpy())
        return index

    @property
    def _clusters(self) -> Any:
        """The part of the index that has clusters, or None."""
        return _faiss().try_extract_index_ivf(self.index)

    def _asked(self, k: int) -> int:
        return min(self.head.num_classes, k * self.candidates)

    @torch.no_grad()
    def _best(self, H: Tensor, k: int, loss: Loss) -> tuple[Tensor, Tensor]:
        x = H.float() if self.width == H.shape[1] else torch.cat([H.float(), torch.ones(len(H), 1, device=H.device)], 1)
        _, classes = self.index.search(_numpy(torch.cat([x, -x])), self._asked(k))
        found = torch.cat(torch.from_numpy(classes).to(H.device).split(len(H)), 1)
        o = self.head.outputs_of(H, found.clamp_min(0))
        s, q = (x.unsqueeze(1).to(o.dtype) for x in self.head.sums_for(loss, H))
        scores = loss.score(s, q, o, self.head.num_classes).masked_fill((found < 0) | _repeated(found), -torch.inf)
        top = scores.topk(k, dim=1)
        return top.values, found.gather(1, top.indices).masked_fill(top.values == -torch.inf, -1)

    def _recall(self, exact: Tensor, hidden: Tensor, k: int, loss: Loss) -> float:
        found = self.topk(hidden, k, loss).classes
        return float((exact.unsqueeze(-1) == found.unsqueeze(-2)).any(-1).float().mean())

    def _layout(self) -> list[int]:
        return [self.head.in_features, int(self.head.has_bias), self.head.num_classes]

    def _sample(self) -> Tensor:
        """Some evenly spaced rows, by which the weights are recognized."""
        return self.head.dense_rows(slice(0, self.head.num_classes, max(1, self.head.num_classes // 16))).float().cpu()


def default_factory(width: int, num_classes: int) -> str:
    """Four bits for every two numbers of a row, looked up in registers (``x4fs``); an odd width is padded."""
    if num_classes < FEW_CLASSES:
        return "Flat"
    pairs = -(-width // 2)
    return f"PQ{pairs}x4fs" if width == 2 * pairs else f"Pad{2 * pairs},PQ{pairs}x4fs"


def _powers_of_two(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and the largest."""
    n = 1
    while n < largest:
        yield n
        n *= 2
    yield largest


def _repeated(found: Tensor) -> Tensor:
    """Marks all but the first occurrence of a class in each row: with few classes both searches find the same ones."""
    ordered, order = found.sort(dim=1, stable=True)
    again = torch.zeros_like(found, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, order, again)


def _numpy(x: Tensor) -> Any:
    return x.float().cpu().contiguous().numpy()


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("FaissIndex needs faiss: pip install 'spherical-loss[faiss]'") from error
    return faiss
