"""Fast approximate top-k over very many classes, through a faiss index of the weights (the ``faiss`` extra)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spherical_loss.base import Loss
from spherical_loss.heads.base import CHUNK, Head, TopK
from spherical_loss.heads.factored import FactoredHead


class FaissIndex:
    """An index over a snapshot of a head's weights. If the head is trained further, the index must be built again.

    The losses of the family are not monotone in the outputs: the Taylor softmax prefers the largest ``|o + 1|``, the spherical
    softmax ``|o|``. So both signs are searched, for the largest and for the smallest outputs, and the candidates are ranked by
    the loss itself.

    Args:
        head: any head.
        factory: a faiss index factory string. ``"Flat"`` is exact; ``"IVF1024,Flat"`` searches ``nprobe`` of 1024 clusters.
        nprobe: how many clusters are searched; more is slower and finds more. See :meth:`recall`.

    >>> import torch
    >>> from spherical_loss import TaylorSoftmaxLoss
    >>> from spherical_loss.heads import DenseHead
    >>> head, hidden = DenseHead(16, 5000), torch.randn(10, 16)
    >>> index = FaissIndex(head, "Flat")
    >>> index.topk(hidden, 5, TaylorSoftmaxLoss()).classes.shape, index.recall(hidden, 5, TaylorSoftmaxLoss())
    (torch.Size([10, 5]), 1.0)
    """

    def __init__(self, head: Head, factory: str = "IVF1024,Flat", nprobe: int = 32) -> None:
        faiss = _faiss()
        if isinstance(head, FactoredHead) and head.shard.group is not None:
            raise ValueError(
                f"a rank of a sharded head has only {len(head.shard)} of the {head.num_classes} rows: load its checkpoint into "
                "a head without a group, and index that one, or use head.topk"
            )
        self.head = head
        self.width = head.dense_rows(slice(0, 1)).shape[1]
        self.index = faiss.index_factory(self.width, factory, faiss.METRIC_INNER_PRODUCT)
        rows = max(1, CHUNK // self.width)
        if not self.index.is_trained:  # on evenly spaced rows: 64 per cluster are enough, and faiss warns below 39
            sample = max(1, head.num_classes // max(rows, 64 * _clusters(self.index)))
            self.index.train(_numpy(head.dense_rows(slice(0, head.num_classes, sample))))
        for start in range(0, head.num_classes, rows):
            self.index.add(_numpy(head.dense_rows(slice(start, min(start + rows, head.num_classes)))))
        if hasattr(self.index, "nprobe"):
            self.index.nprobe = nprobe

    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        """As :meth:`Head.topk`, among the classes the index finds; where it finds fewer than k, -1 with score -inf."""
        if not 1 <= k <= self.head.num_classes:
            raise ValueError(f"k is {k}, but must be between 1 and the {self.head.num_classes} classes")
        H = hidden.detach().reshape(-1, self.head.in_features)
        x = H.float() if self.width == H.shape[1] else torch.cat([H.float(), torch.ones(len(H), 1, device=H.device)], 1)
        outputs, classes = zip(*(self._search(sign * x, k) for sign in (1, -1)), strict=True)
        o = torch.cat([outputs[0], -outputs[1]], 1).to(H.device)
        found = torch.cat(classes, 1).to(H.device)
        s, q = self.head.sums(H)
        scores = loss.score(s.unsqueeze(1).to(o.dtype), q.unsqueeze(1).to(o.dtype), o, self.head.num_classes)
        scores = scores.masked_fill((found < 0) | _repeated(found), -torch.inf)
        top = scores.topk(k, dim=1)
        best = found.gather(1, top.indices).masked_fill(top.values == -torch.inf, -1)
        shape = (*hidden.shape[:-1], k)
        return TopK(top.values.reshape(shape), best.reshape(shape))

    def recall(self, hidden: Tensor, k: int, loss: Loss) -> float:
        """The share of the exact top k that the index finds."""
        exact, found = self.head.topk(hidden, k, loss).classes, self.topk(hidden, k, loss).classes
        return float((exact.unsqueeze(-1) == found.unsqueeze(-2)).any(-1).float().mean())

    def _search(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        outputs, classes = self.index.search(_numpy(x), k)
        return torch.from_numpy(outputs), torch.from_numpy(classes)


def _repeated(found: Tensor) -> Tensor:
    """Marks all but the first occurrence of a class in each row: with few classes both searches find the same ones."""
    same = found.unsqueeze(2) == found.unsqueeze(1)
    return same.tril(diagonal=-1).any(2)


def _clusters(index: Any) -> int:
    return int(getattr(index, "nlist", 1024))


def _numpy(x: Tensor) -> Any:
    return x.float().cpu().contiguous().numpy()


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("FaissIndex needs faiss: pip install 'spherical-loss[faiss]'") from error
    return faiss
