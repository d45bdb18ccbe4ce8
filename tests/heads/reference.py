"""The oracle of the heads: a dense layer in float64, its losses from the oracle of the losses, its gradients from autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.oracle import Oracle, expected


class DenseReference:
    """W (D, d) and b (D,), trained by plain SGD."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.W = weight.detach().double().clone()
        self.b = None if bias is None else bias.detach().double().clone()

    def parameters(self) -> list[Tensor]:
        return [self.W] if self.b is None else [self.W, self.b]

    def logits(self, hidden: Tensor) -> Tensor:
        o = hidden @ self.W.T
        return o if self.b is None else o + self.b

    def gradients(
        self, losses: Oracle, hidden: Tensor, target: Tensor, target_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The mean loss, and its gradients for the hidden vectors and for the parameters."""
        H = hidden.detach().double().requires_grad_()
        for p in self.parameters():
            p.requires_grad_()
        o = self.logits(H).reshape(-1, len(self.W))
        if target_weight is None:
            value = expected(losses, o, target.reshape(-1))
        else:
            y = torch.zeros_like(o).scatter_add(1, target.reshape(len(o), -1), target_weight.reshape(len(o), -1).double())
            value = expected(losses, o, y)
        value = value + 0 * o.sum()  # a loss may be constant, as with one class
        grad_H, *grads = torch.autograd.grad(value, [H, *self.parameters()])
        for p in self.parameters():
            p.requires_grad_(False)
        return value.detach(), grad_H, grads

    def step(self, grads: list[Tensor], lr: float, weight_decay: float = 0.0, max_grad_norm: float | None = None) -> None:
        norm = torch.stack([g.norm() for g in grads]).norm()
        scale = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (float(norm) + 1e-6))
        for p, g in zip(self.parameters(), grads, strict=True):
            p -= lr * (scale * g + weight_decay * p)


def random_batch(N: int, d: int, D: int, seed: int, K: int | None = None, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors that are mostly positive, as after a ReLU; Zipf targets, so that some repeat; K weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (0.3 + torch.randn(N, d, generator=generator, dtype=torch.float64)).relu()
    frequencies = 1 / torch.arange(1, D + 1, dtype=torch.float64)
    target = torch.multinomial(frequencies, N * (K or 1), replacement=True, generator=generator)
    target = target.reshape((N,) if K is None else (N, K))
    if ignored:
        target[:ignored] = -100
    return hidden, target, torch.rand(target.shape, generator=generator, dtype=torch.float64)
