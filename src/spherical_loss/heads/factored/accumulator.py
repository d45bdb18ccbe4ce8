"""A symmetric matrix that takes many thousands of small changes without drift, with a float32 copy for matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Accumulator(nn.Module):
    """A symmetric d x d matrix as ``base - recent - recent^T``: its value some steps ago in float64, and half of the changes
    since then, summed in float32.

    In float32 alone, changes below 6e-8 of an entry would be lost, step after step; a float64 matrix would have to be converted
    for every matmul, which at d = 1000 takes as long as two matmuls. The sum of a few changes is as precise as the changes, and
    a matmul can accumulate into it. ``value`` is the float32 matrix for matmuls. It is computed from ``base``, rounded once, so
    that its own rounding errors do not add up.

    >>> x = Accumulator(2, torch.float32, torch.float64)
    >>> x.set_(torch.eye(2))
    >>> for _ in range(1000):
    ...     x.subtract_(torch.full((2, 2), 1e-9))
    >>> f"{float(1 - x.exact[0, 0]):.3g}"
    '2e-06'
    """

    base: Tensor
    recent: Tensor
    rounded: Tensor
    value: Tensor

    def __init__(self, d: int, dtype: torch.dtype, precise: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros(d, d, dtype=precise))
        self.register_buffer("recent", torch.zeros(d, d, dtype=dtype))
        # These follow exactly from the others, and are not saved.
        self.register_buffer("rounded", torch.zeros(d, d, dtype=dtype), persistent=False)
        self.register_buffer("value", torch.zeros(d, d, dtype=dtype), persistent=False)

    @property
    def exact(self) -> Tensor:
        return (self.base - self.recent).sub_(self.recent.T)

    def times_vector(self, v: Tensor) -> Tensor:
        """``M v``, as precise as M is kept."""
        changes = torch.addmv(self.recent @ v, self.recent.T, v)
        return torch.addmv(changes.to(self.base.dtype), self.base, v.to(self.base.dtype), beta=-1)

    def set_(self, matrix: Tensor) -> None:
        self.base.copy_(matrix)
        self.recent.zero_()
        self._round()

    def subtract_(self, half: Tensor, alpha: float = 1.0, scale: float = 1.0) -> None:
        """``M <- scale M - alpha (half + half^T)``"""
        if scale != 1:
            self.base.mul_(scale)
            self.rounded.copy_(self.base)
            self.recent.mul_(scale)
        self.recent.add_(half, alpha=alpha)
        self._evaluate()

    def fold_in(self) -> None:
        """Add the recent changes to the base."""
        self.set_(self.exact)

    def change_dtype(self, dtype: torch.dtype) -> None:
        """The dtype of ``value`` and of the recent changes."""
        self.recent, self.rounded, self.value = (x.to(dtype) for x in (self.recent, self.rounded, self.value))

    def _round(self) -> None:
        self.rounded.copy_(self.base)
        self._evaluate()

    def _evaluate(self) -> None:
        torch.sub(self.rounded, self.recent, out=self.value).sub_(self.recent.T)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            self._round()
