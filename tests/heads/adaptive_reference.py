"""The dense float64 computation that AdaptiveSphericalSoftmax is compared with, and what its tests share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spherical_loss import AdaptiveSphericalSoftmax, FactoredHead, FactoredSGD, TieredHead, TieredSGD
from tests.support.cases import CASES

LIKELIHOODS = {name: CASES[name] for name in ("taylor", "spherical", "quadratic")}
every_likelihood = pytest.mark.parametrize("case", LIKELIHOODS.values(), ids=LIKELIHOODS)


class Reference:
    """Dense layers in float64: of the frequent classes and the clusters, and one for each cluster."""

    def __init__(self, layer: AdaptiveSphericalSoftmax, losses, frequencies: Tensor | None) -> None:
        self.losses, self.cuts, D = losses, layer.cutoffs, layer.n_classes
        layers = [layer, *layer.softmaxes, *layer.tails]
        self.softmaxes = len(layer.softmaxes)
        found = [x for each in layers for x in (each.weight, torch.zeros(()) if each.bias is None else each.bias)]
        self.parameters = [x.detach().double().clone().requires_grad_() for x in found]
        self.a = layer.scale[self.cuts[0] :]
        ranked = range(D) if frequencies is None else sorted(range(D), key=lambda c: -float(frequencies[c]))
        self.rank = {c: r for r, c in enumerate(ranked)}

    def log_prob(self, H: Tensor) -> Tensor:
        """Of all classes, (N, D)."""
        o, *others = [H @ W.T + b for W, b in zip(self.parameters[::2], self.parameters[1::2], strict=True)]
        M = self.cuts[0]
        first = torch.cat([o[:, :M], self.a * o[:, M:]], 1).log_softmax(1)
        by_rank = [first[:, :M]]
        for k, outputs in enumerate(others):
            inside = outputs.log_softmax(1) if k < self.softmaxes else -self.losses(outputs)
            by_rank.append(first[:, M + k, None] + inside)
        return torch.cat(by_rank, 1)[:, [self.rank[c] for c in range(len(self.rank))]]

    def gradients(self, hidden: Tensor, target: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor, list[Tensor]]:
        H = hidden.detach().double().reshape(-1, hidden.shape[-1]).requires_grad_()
        target = target.reshape(-1)
        counted = (target != -100).nonzero().flatten()
        picked = -self.log_prob(H)[counted].gather(1, target[counted].unsqueeze(1))
        value = picked.mean() if reduction == "mean" else picked.sum()
        grad_H, *grads = torch.autograd.grad(value, [H, *self.parameters])
        return value.detach(), grad_H.reshape(hidden.shape), grads

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float, tail_lr: float, weight_decay: float = 0.0) -> None:
        for i, (p, g) in enumerate(zip(self.parameters, grads, strict=True)):
            p -= (lr if i < 2 + 2 * self.softmaxes else tail_lr) * (g + weight_decay * p)


def optimizers_of(layer: AdaptiveSphericalSoftmax, lr: float, tail_lr: float, weight_decay: float = 0.0):
    softmaxes = [p for each in (layer, *layer.softmaxes) for p in (each.weight, each.bias)]
    return torch.optim.SGD(softmaxes, lr, weight_decay=weight_decay), *(
        optimizer_of(tail, tail_lr, weight_decay) for tail in layer.tails
    )


def optimizer_of(tail, lr: float, weight_decay: float):
    if isinstance(tail, FactoredHead):
        return FactoredSGD(tail, lr, weight_decay)
    if isinstance(tail, TieredHead):
        return TieredSGD(tail, lr, power=0.0, weight_decay=weight_decay)
    return torch.optim.SGD(tail.parameters(), lr, weight_decay=weight_decay)


def train_step(layer, optimizers, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    H = hidden.clone().requires_grad_()
    for optimizer in optimizers:
        optimizer.zero_grad()
    value = layer(H, target).loss
    value.backward()
    for optimizer in optimizers:
        optimizer.step()
    return value.detach(), H.grad


def assert_same_weights(layer, reference: Reference, **tolerance: float) -> None:
    layers = (layer, *layer.softmaxes, *layer.tails)
    for found, expected in zip((x for each in layers for x in (each.weight, each.bias)), reference.parameters, strict=True):
        torch.testing.assert_close(found.detach().double(), expected.detach(), **tolerance)


def randomized(layer: AdaptiveSphericalSoftmax, seed: int = 0) -> AdaptiveSphericalSoftmax:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

    for each in (layer, *layer.softmaxes):
        with torch.no_grad():
            each.weight.copy_(drawn(*each.weight.shape))
            each.bias.copy_(drawn(*each.bias.shape))
    for tail in layer.tails:
        tail.set_weight(drawn(tail.num_classes, layer.in_features))
        tail.set_bias(1 + drawn(tail.num_classes))
    return layer


def shuffled_frequencies(D: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1 / torch.arange(1.0, D + 1))[torch.randperm(D, generator=generator)]


def check_training(layer: AdaptiveSphericalSoftmax, reference: Reference, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizers = optimizers_of(layer, 0.05, 0.1)
    for hidden, target in batches:
        expected, grad_H, grads = reference.gradients(hidden, target)
        output = layer(hidden, target).output
        counted = target >= 0
        log_p = reference.log_prob(hidden)[counted].gather(1, target[counted].unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(output[counted], log_p, rtol=1e-8, atol=1e-10)
        assert not output[~counted].any()
        value, grad = train_step(layer, optimizers, hidden, target)
        reference.step(grads, 0.05, 0.1)
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(grad, grad_H, rtol=1e-7, atol=1e-9)
    assert_same_weights(layer, reference, rtol=1e-7, atol=1e-9)
