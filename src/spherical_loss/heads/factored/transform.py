"""U of ``W = V U + 1 w0^T``: what the steps did to all rows in common, with its inverse, accurate over any number of steps.

Deviations. U and its inverse start as the identity and differ from it by many small changes, which would be rounded
relative to 1. So the difference from the identity is kept, and weight decay as a number:

    U = scale (I - deviation),      U^-1 = (I + inverse_deviation) / scale.

Frames. A step multiplies U by ``B = I - rate A``, which shrinks some directions. The condition number of U grows
exponentially with the steps, and what is written through ``U^-1`` drowns in rounding errors. Only *writing* needs the
inverse; *reading* a row is a product of contractions and always stable. So U covers only the steps since a recent moment, the
start of a frame. When its condition number could pass ``MAX_CONDITION``, the frame is closed: U becomes the identity, and a
row last written in frame k is read as ``V_row past[k] U``, with ``past[k]`` the product of all U between the end of frame k
and now. A row moves to the current frame when it is written, at the cost of one product with a d x d matrix. After
``MAX_FRAMES`` frames the head brings all rows up to date (``FactoredHead.refactor``) and starts over.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spherical_loss.heads.factored.weighted_gram import WeightedGram
from spherical_loss.heads.products import product

MAX_CONDITION = 1e2  # of U: float32 rounding (6e-8) times this is the relative error of one written increment
MAX_FRAMES = 48  # d x d matrices kept; closing a frame costs one matmul for each
MAX_SHRINKAGE = 1e8  # of U by weight decay in a frame: float32 reaches to 1e38, and so must the inverse
LARGE_STEP = 0.25  # norm of rate A from which a frame is closed rather than B inverted
SERIES_ERROR = 5  # of the inverse of B, relative, in units of the rounding error of its dtype; at most
MAX_RESIDUAL = 50  # of U^-1 U, in the same units, from the truncation of the series: above, a Newton step removes it


class RowTransform(nn.Module):
    """The d x d matrix U, its inverse, and the frames before the current one.

    >>> import torch
    >>> U, rows = RowTransform(4, torch.float64), torch.randn(3, 4, dtype=torch.float64)
    >>> U.multiply_(WeightedGram(torch.randn(8, 4, dtype=torch.float64), torch.full((8,), 0.001, dtype=torch.float64)), rate=1)
    >>> torch.allclose(U.transform(rows), rows @ U.matrix), torch.allclose(U.transform(U.solve(rows)), rows)
    (True, True)
    """

    deviation: Tensor
    inverse_deviation: Tensor
    past: Tensor

    def __init__(self, d: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("deviation", torch.zeros(d, d, dtype=dtype))
        self.register_buffer("inverse_deviation", torch.zeros(d, d, dtype=dtype))
        self.register_buffer("past", torch.zeros(0, d, d, dtype=dtype))
        self.log_condition = 0.0  # an upper bound of the log of the condition number
        self.log_scale = 0.0
        self.residual = 0.0  # how far U^-1 U may be from the identity, because the series of the inverse were cut
        self.first_frame = 0  # the number of the oldest frame in ``past``

    @property
    def scale(self) -> float:
        return math.exp(self.log_scale)

    @property
    def matrix(self) -> Tensor:
        """U, as a new tensor."""
        one = torch.eye(len(self.deviation), dtype=self.deviation.dtype, device=self.deviation.device)
        return self.scale * (one - self.deviation)

    @property
    def is_identity(self) -> bool:
        """Whether rows of V are rows of V U, in all frames."""
        return len(self.past) == 0 and self.scale == 1 and not self.deviation.any()

    @property
    def condition_bound(self) -> float:
        """An upper bound of the condition number of U, by the norms of the steps."""
        return math.exp(self.log_condition)

    @property
    def frame(self) -> int:
        """The number of the current frame, which only ever grows."""
        return self.first_frame + len(self.past)

    # Reading -------------------------------------------------------------------------------------------------------

    def transform(self, rows: Tensor) -> Tensor:
        """``rows U``, for rows in the current frame."""
        return _times(rows - product(rows, self.deviation), self.scale)

    def transform_transposed(self, X: Tensor) -> Tensor:
        """``X U^T``, so that ``X (V U)^T`` is a matrix product with V."""
        return _times(X - product(X, self.deviation.T), self.scale)

    def solve(self, rows: Tensor) -> Tensor:
        """``rows U^-1``"""
        return _times(product(rows, self.inverse_deviation, plus=rows), 1 / self.scale)

    def through_frames(self) -> Tensor:
        """What each row of V is multiplied by to be one of V U, (frames, d, d): the current frame is the last."""
        U = self.matrix
        return torch.cat([self.past @ U, U.unsqueeze(0)])

    def bring_forward_(self, rows: Tensor, frames: Tensor, transforms: Tensor | None = None) -> Tensor:
        """Bring rows of V to the current frame, in place; ``frames`` has the index of each row's frame in ``past``.

        With ``transforms=through_frames()``, which serves many rows, to the dense rows V U.
        """
        transforms = self.past if transforms is None else transforms
        counts = torch.bincount(frames, minlength=len(self.past) + 1).tolist()
        if len(rows) in counts:  # all of one frame
            frame = counts.index(len(rows))
            return rows.copy_(product(rows, transforms[frame])) if frame < len(transforms) else rows
        order = frames.argsort()
        ordered = rows.index_select(0, order)
        out = ordered.clone()
        for part, into, transform in zip(ordered.split(counts), out.split(counts), transforms, strict=False):
            if len(part):
                torch.mm(part, transform, out=into)
        return rows.index_copy_(0, order, out)

    # Writing -------------------------------------------------------------------------------------------------------

    def multiply_(self, A: WeightedGram, rate: float, decay: float = 1.0) -> Tensor | None:
        """``U <- decay U B`` with ``B = I - rate A``, in a new frame if the inverse would lose its accuracy.

        Returns ``H U^-1`` if it was computed, which is if A is not formed.
        """
        self.log_condition += _log_condition(rate * A.norm, A.is_positive)
        self.log_scale += math.log(decay)
        self._multiply_deviation(A, rate)
        if self.log_condition > math.log(MAX_CONDITION) or abs(self.log_scale) > math.log(MAX_SHRINKAGE):
            self.close_frame()
            return None
        return self._multiply_inverse(A, rate)

    def close_frame(self) -> None:
        """Start a new frame: U becomes the identity, and its old value is kept for the rows that are not written since."""
        self.past = self.through_frames()
        self._reset()

    def start_over(self) -> None:
        """All rows are up to date: no frames, and U is the identity."""
        self.first_frame = self.frame + 1
        self.past = self.past[:0]
        self._reset()

    def _reset(self) -> None:
        self.deviation.zero_()
        self.inverse_deviation.zero_()
        self.log_condition = self.log_scale = self.residual = 0.0

    def _multiply_deviation(self, A: WeightedGram, rate: float) -> None:
        """``I - deviation <- (I - deviation) B``, that is ``deviation += rate (I - deviation) A``."""
        deviation = self.deviation
        if A.is_formed:
            deviation.add_(A.core - product(deviation, A.core), alpha=rate)
        else:
            deviation.add_(product((A.H - product(A.H, deviation.T)).T, A.weighted_H), alpha=rate)

    def _multiply_inverse(self, A: WeightedGram, rate: float) -> Tensor | None:
        """``I + inverse_deviation <- B^-1 (I + inverse_deviation)``, by the series ``B^-1 = I + rate A + (rate A)^2 + ...``

        Its matmuls run at full speed; a factorization does not. t terms leave an error of ``||rate A||^(t + 1)``.
        """
        inverse, norm, eps = self.inverse_deviation, rate * A.norm, torch.finfo(self.inverse_deviation.dtype).eps
        error = SERIES_ERROR * eps
        needed = 1 if norm == 0 else max(1, math.ceil(math.log(error) / math.log(norm)) - 1)
        terms = 2 ** math.ceil(math.log2(needed))
        self.residual += norm ** (terms + 1)
        H_inverse = None
        if not A.is_formed:  # with C = rate core: H B^-1 = (I + C + C^2 + ...)^T H, and B^-1 = I + rate weighted_H^T H B^-1
            H_inverse = product(A.H, inverse, plus=A.H)
            H_inverse = product(_geometric(rate * A.core, terms).T, H_inverse, plus=H_inverse)
            inverse.add_(product(A.weighted_H.T, H_inverse), alpha=rate)
        elif terms == 1:
            inverse.add_(product(A.core, inverse, plus=A.core), alpha=rate)
        elif terms == 2 and rate**2 * A.rank_one_square[1] < error:
            y, left_out = A.rank_one_square
            y_inverse = torch.addmv(y, inverse.T, y)
            inverse.add_(product(A.core, inverse, plus=A.core), alpha=rate).addr_(y, y_inverse, alpha=rate**2)
            self.residual += rate**2 * left_out
        else:
            series = _geometric(rate * A.core, terms)
            inverse.add_(product(series, inverse, plus=series))
        if self.residual > MAX_RESIDUAL * eps:
            self._polish_inverse()
        return H_inverse if H_inverse is None or self.log_scale == 0 else H_inverse.div_(self.scale)

    def _polish_inverse(self) -> None:
        """A Newton step, which squares the residual ``T = U^-1 U - I``: ``U^-1 <- U^-1 - T U^-1``.

        With ``U U^-1`` instead, the rounding errors would be multiplied by the inverse twice.
        """
        deviation, inverse = self.deviation, self.inverse_deviation
        residual = (inverse - deviation).sub_(product(inverse, deviation))
        inverse.sub_(product(residual, inverse, plus=residual))
        self.residual = 0.0

    # State ---------------------------------------------------------------------------------------------------------

    def change_dtype(self, dtype: torch.dtype) -> None:
        self.deviation, self.inverse_deviation, self.past = (
            x.to(dtype) for x in (self.deviation, self.inverse_deviation, self.past)
        )

    def numbers(self) -> tuple[float, float, float]:
        """The part of the state that is not in tensors."""
        return self.log_condition, self.log_scale, self.residual

    def set_numbers(self, log_condition: float, log_scale: float, residual: float) -> None:
        self.log_condition, self.log_scale, self.residual = log_condition, log_scale, residual


def _times(X: Tensor, scale: float) -> Tensor:
    """``scale X``, in place"""
    return X if scale == 1 else X.mul_(scale)


def _log_condition(norm: float, is_positive: bool) -> float:
    """A bound of the log of the condition number of ``B = I - rate A``, whose eigenvalues are within ``norm`` of 1."""
    if norm >= LARGE_STEP:
        return math.inf
    return -math.log1p(-norm) if is_positive else 2 * math.atanh(norm)


def _geometric(C: Tensor, terms: int) -> Tensor:
    """``C + C^2 + ... + C^n`` for n terms, a power of two, by doubling: ``G_2n = G_n + C^n G_n``."""
    if terms == 1:
        return C
    power = product(C, C)
    G, n = C + power, 2
    while n < terms:
        G = product(power, G, plus=G)
        n *= 2
        if n < terms:
            power = product(power, power)
    return G
