"""What the tests compare with: the paper's formulas, dense and in float64, written from the outputs o of every class.

Nothing here uses the library or the statistics (s, q, o_c). Every function takes outputs whose last dimension is the
classes, and returns the loss each class would have as the target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Oracle = Callable[[Tensor], Tensor]


def quadratic(a1: float, a2: float, a3: float) -> Oracle:
    def losses(o: Tensor) -> Tensor:
        g = a1 + a2 * o + a3 * o**2
        return -torch.log(g / g.sum(-1, keepdim=True))

    return losses


def squared_error(y: float) -> Oracle:
    def losses(o: Tensor) -> Tensor:
        return (o**2).sum(-1, keepdim=True) - o**2 + (o - y) ** 2

    return losses


def bouchard(o: Tensor, xi: Tensor) -> Tensor:
    """The bound of log sum exp before the paper simplifies it, at the best alpha; xi is a number per example."""
    D = o.shape[-1]
    lam = torch.where(xi == 0, 1 / 8, (torch.sigmoid(xi) - 0.5) / (2 * torch.where(xi == 0, 1.0, xi)))
    alpha = o.mean(-1) + (D - 2) / (4 * D * lam)  # where the derivative in alpha vanishes
    rest = o - alpha.unsqueeze(-1)
    terms = (rest - xi.unsqueeze(-1)) / 2 + lam.unsqueeze(-1) * (rest**2 - xi.unsqueeze(-1) ** 2)
    return alpha + terms.sum(-1) + D * torch.log1p(torch.exp(-xi.abs())) + D * xi.clamp_min(0)


def best_xi(o: Tensor) -> Tensor:
    """The xi of the tightest bound."""
    return torch.tensor(_best_xi(o.detach().numpy().tobytes(), tuple(o.shape)), dtype=torch.float64)


@lru_cache
@torch.enable_grad()
def _best_xi(outputs: bytes, shape: tuple[int, ...]) -> list[float]:
    """By bisection of the derivative: the bound has one minimum over xi >= 0. Slow, so the last ones are kept."""
    o = torch.frombuffer(bytearray(outputs), dtype=torch.float64).reshape(shape)
    low, high = torch.zeros(shape[:-1], dtype=o.dtype), 60 + 2 * (o - o.mean(-1, keepdim=True)).norm(dim=-1)
    for _ in range(60):
        xi = ((low + high) / 2).requires_grad_()
        falling = torch.autograd.grad(bouchard(o, xi).sum(), xi)[0] < 0
        low, high = torch.where(falling, xi, low).detach(), torch.where(falling, high, xi).detach()
    return ((low + high) / 2).tolist()


def softmax_bound(xi: float | None) -> Oracle:
    def losses(o: Tensor) -> Tensor:
        at = best_xi(o) if xi is None else torch.full(o.shape[:-1], xi, dtype=o.dtype)
        return bouchard(o, at).unsqueeze(-1) - o

    return losses


def z_loss(a: float, b: float) -> Oracle:
    def losses(o: Tensor) -> Tensor:
        rest = o - o.mean(-1, keepdim=True)
        z = torch.zeros_like(o) if o.shape[-1] == 1 else rest / (rest**2).mean(-1, keepdim=True).sqrt()
        return torch.logaddexp(torch.zeros_like(z), a * (b - z)) / a

    return losses


def cosine(o: Tensor) -> Tensor:
    return 1 - o / (o**2).sum(-1, keepdim=True).sqrt()


def softmax(o: Tensor) -> Tensor:
    return torch.logsumexp(o, -1, keepdim=True) - o


def abs_softmax(o: Tensor) -> Tensor:
    return softmax(o.abs())


def expected(
    losses: Oracle,
    o: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch's options for any loss: sum_k y_k w_k l_k, with y the (smoothed) target as class probabilities."""
    o = o.movedim(0 if o.dim() == 1 else 1, -1)
    D = o.shape[-1]
    w = torch.ones(D, dtype=o.dtype) if weight is None else weight.to(o.dtype)
    if target.is_floating_point():
        y = target.movedim(0 if target.dim() == 1 else 1, -1).to(o.dtype)
        counted, importance = torch.ones(y.shape[:-1], dtype=torch.bool), torch.ones(y.shape[:-1], dtype=o.dtype)
    else:
        counted = target != ignore_index
        y = torch.nn.functional.one_hot(target.where(counted, torch.tensor(0)), D).to(o.dtype)
        importance = (y * w).sum(-1) * counted
    y = y * (1 - label_smoothing) + label_smoothing / D
    each = torch.where(counted, (y * w * losses(o)).sum(-1), 0.0)
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / importance.sum()
