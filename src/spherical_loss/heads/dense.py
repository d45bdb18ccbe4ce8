"""The plain linear layer: the reference, and the choice for small problems. Also the base of heads with ordinary weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from spherical_loss.heads.base import Head, chunk_rows, he_std
from spherical_loss.heads.products import linear, product
from spherical_loss.statistics import dense_statistics, widened


class ParameterHead(Head):
    """A head whose weight (D, d) and bias (D,) are ordinary parameters, for any optimizer."""

    def __init__(
        self, in_features: int, num_classes: int, bias: bool = True, init: str = "he", ignore_index: int = -100
    ) -> None:
        super().__init__(in_features, num_classes, bias, init, ignore_index)
        self.weight = nn.Parameter(torch.zeros(num_classes, in_features))
        self.bias = nn.Parameter(torch.zeros(num_classes)) if bias else None
        if init == "he":
            nn.init.normal_(self.weight, std=he_std(in_features))

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        self._check_weight(weight)
        self.weight.copy_(weight)

    @torch.no_grad()
    def set_bias(self, bias: Tensor) -> None:
        self._check_bias(bias)
        self.bias.copy_(bias)

    @torch.no_grad()
    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        weight = self.weight[rows]
        return weight.clone() if self.bias is None else torch.cat([weight, self.bias[rows].unsqueeze(1)], 1)

    def logit_chunks(self, H: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.num_classes, rows):
            chunk = slice(start, start + rows)
            o = product(H, self.weight[chunk].T)
            yield start, o if self.bias is None else o.add_(self.bias[chunk])

    @torch.no_grad()
    def sums(self, H: Tensor) -> tuple[Tensor, Tensor]:
        s = q = H.new_zeros(H.shape[0], dtype=widened(H.dtype))
        for _, o in self.logit_chunks(H, rows=chunk_rows(H.shape[0])):
            s, q = s + o.to(s.dtype).sum(1), q + o.to(q.dtype).square().sum(1)
        return s, q


class DenseHead(ParameterHead):
    """``nn.Linear`` with the interface of the heads: computes all N x D logits, in O(N d D).

    >>> import torch
    >>> from spherical_loss import SphericalSoftmaxLoss
    >>> head = DenseHead(16, 50)
    >>> SphericalSoftmaxLoss(eps=0.1)(head(torch.randn(8, 16), torch.arange(8))).backward()
    >>> head.weight.grad.shape
    torch.Size([50, 16])
    """

    def statistics(self, H: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o = self.logits(H)
        s, q, o_c = (x.squeeze(1) for x in dense_statistics(o.unsqueeze(2), classes[:, :1]))
        if classes.shape[1] == 1:
            return s, q, o_c.unsqueeze(1)
        return s, q, o.gather(1, classes).to(s.dtype)
