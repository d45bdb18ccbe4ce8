"""``A = 2 H^T diag(g_q) H``, the matrix by which the gradient ``W A + 1 a^T + Delta`` depends on all of W."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from spherical_loss.heads.products import product, transposed


class WeightedGram:
    """The d x d matrix ``A = 2 H^T diag(g_q) H`` of a batch, with H (N, d) and g_q (N,).

    For ``N >= d / 2`` A is formed. For fewer examples it is not: ``X A = (X H^T) (2 diag(g_q) H)`` is cheaper, and the N x N
    matrix ``2 diag(g_q) H H^T``, with the same eigenvalues except zeros, stands for it. ``core`` is the one or the other.
    """

    def __init__(self, H: Tensor, g_q: Tensor) -> None:
        N, d = H.shape
        self.H, self.weights = H, (2 * g_q).unsqueeze(1)
        self.weighted_H = self.weights * H
        self.is_formed = d <= 2 * N
        self.H_T = transposed(H)
        self.core = product(self.H_T, self.weighted_H) if self.is_formed else product(H, self.H_T).mul_(self.weights)

    def times(self, X: Tensor) -> Tensor:
        """``X A``"""
        return product(X, self.core) if self.is_formed else product(product(X, self.H_T), self.weighted_H)

    def times_vector(self, v: Tensor) -> Tensor:
        """``A v``, as precise as A is, in the dtype of v."""
        x = v.to(self.core.dtype)
        return (self.core @ x if self.is_formed else self.weighted_H.T @ (self.H @ x)).to(v.dtype)

    @cached_property
    def norm(self) -> float:
        """Frobenius norm: an upper bound of the largest eigenvalue, and close to it where one direction dominates."""
        if self.is_formed:
            return float(torch.linalg.vector_norm(self.core))
        square = float((self.core * self.core.T).sum())
        return math.sqrt(max(0.0, square)) if math.isfinite(square) else math.nan

    @cached_property
    def is_positive(self) -> bool:
        """No negative eigenvalue, because no g_q is negative: so with all likelihoods of the family."""
        return len(self.weights) == 0 or float(self.weights.min()) >= 0

    @cached_property
    def rank_one_square(self) -> tuple[Tensor, float]:
        """y with ``A^2 = y y^T`` up to an error, and a bound of the error's norm: small where one direction dominates A, as the
        mean of hidden vectors does after a ReLU.

        For ``y = A v`` with any unit vector v, ``A^2 - y y^T = A (I - v v^T) A``, whose norm is at most ``||A||^2 - ||y||^2``.
        Here v is one step of the power method from a vector of ones.
        """
        v = self.core.sum(0)
        y = self.core @ (v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny))
        return y, max(0.0, self.norm**2 - float(y @ y))

    def nearest_eigenvalue(self, to: float) -> float:
        """The eigenvalue of A nearest to a number."""
        eigenvalues = torch.linalg.eigvals(self.core.double()).real
        return float(eigenvalues[(to - eigenvalues).abs().argmin()])
