"""Hidden vectors as ``h = alpha u + r``: the part in the direction u that dominates a batch, and the rest.

``q = h^T Q h`` cancels where the hidden vectors have a large common part, such as a mean, of which the weights see little:
terms of the size of ``|h|^2`` add up to one of the size of ``|r|^2``. Written as

    q = alpha^2 u^T Q u + 2 alpha r^T Q u + r^T Q r,

nothing of the size of ``|h|^2`` is left if ``Q u``, one vector for the whole batch, is computed more precisely than the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NO_MORE_THAN_ROUNDING = 1e-6  # of a mean square of the outputs of all classes


class Split(NamedTuple):
    """N hidden vectors, of size d."""

    u: Tensor
    """(d,)"""
    alpha: Tensor
    """(N,)"""
    R: Tensor
    """(N, d)"""


def split(X: Tensor) -> Split:
    """``X = alpha u^T + R``, with u one step of the power method from the mean.

    The rest is never longer than the vector, so small vectors lose nothing. Where X is not finite, or so large that its cube
    is not, u is 0 and R is X: an example does not affect the others.

    >>> X = 1000 + torch.randn(50, 4)
    >>> u, alpha, R = split(X)
    >>> torch.allclose(torch.outer(alpha, u) + R, X), bool(R.norm() < X.norm() / 100)
    (True, True)
    """
    u = X.T @ (X @ X.sum(0))
    u = (u / torch.linalg.vector_norm(u)).nan_to_num(0.0, 0.0, 0.0)
    return along(X, u, X @ u)


def along(X: Tensor, u: Tensor, alpha: Tensor) -> Split:
    return Split(u, alpha, torch.addr(X, alpha, u, alpha=-1))


def without_rounding(q: Tensor, D: int) -> Tensor:
    """``q`` of D outputs that are all 0 may be slightly negative in floating point: then it is 0. A q far below 0 has lost all
    of its digits, and stays as it is: a step refuses it."""
    return torch.where(q > -NO_MORE_THAN_ROUNDING * D, q.clamp_min(0), q)
