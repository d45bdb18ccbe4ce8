"""A matrix that many thousands of small changes are added to, without drift, and that products read in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Accumulator(nn.Module):
    """A d x d matrix as ``base - recent``: the float64 value of some steps ago, and the float32 sum of the changes since.

    In float32 alone, changes below 6e-8 of an entry would be lost, step after step; a float64 matrix would have to be converted
    for every product, which at d = 1000 takes as long as two of the products. The sum of a few changes is as precise as the
    changes are. ``value`` is for products: the matrix in float32, off by the rounding errors since the last :meth:`settle`.

    >>> x = Accumulator(2, torch.float32, torch.float64)
    >>> x.set_(torch.eye(2))
    >>> for _ in range(1000):
    ...     x.subtract_(torch.full((2, 2), 1e-9))
    >>> x.settle()
    >>> f"{float(1 - x.exact[0, 0]):.3g}"
    '1e-06'
    """

    base: Tensor
    recent: Tensor
    value: Tensor

    def __init__(self, d: int, dtype: torch.dtype, precise: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros(d, d, dtype=precise))
        self.register_buffer("recent", torch.zeros(d, d, dtype=dtype))
        self.register_buffer("value", torch.zeros(d, d, dtype=dtype))

    @property
    def exact(self) -> Tensor:
        return self.base - self.recent

    def set_(self, matrix: Tensor) -> None:
        self.base.copy_(matrix)
        self.value.copy_(matrix)
        self.recent.zero_()

    def subtract_(self, change: Tensor, alpha: float = 1.0) -> None:
        self.value.sub_(change, alpha=alpha)
        self.recent.add_(change, alpha=alpha)

    def scale_(self, factor: float) -> None:
        if factor != 1:
            for part in (self.base, self.recent, self.value):
                part.mul_(factor)

    def settle(self) -> None:
        """Let the recent changes become part of the base, and ``value`` what it should be."""
        self.set_(self.exact)

    def change_dtype(self, dtype: torch.dtype) -> None:
        """Of what products read."""
        self.recent, self.value = self.recent.to(dtype), self.value.to(dtype)
