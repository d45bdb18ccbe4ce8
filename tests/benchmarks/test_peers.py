"""The peers compute what their names say."""

from __future__ import annotations

import math

import torch

from benchmarks import peers


def test_noise_contrastive_loss_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    D, d, N = 40, 6, 12
    layer = peers.NoiseContrastive(d, D, negatives=9)
    layer.head.set_weight(torch.randn(D, d))
    layer.head.set_bias(torch.randn(D))
    hidden, target = torch.randn(N, d), torch.randint(D, (N,))
    torch.manual_seed(3)
    value = layer(hidden, target).loss.item()
    torch.manual_seed(3)
    noise = [min(D - 1, int(math.exp(u * math.log(D + 1)) - 1)) for u in torch.rand(9, dtype=torch.float64).tolist()]
    o = layer.head.double().logits(hidden.double()).tolist()

    def posterior(n: int, c: int) -> float:
        """The probability that c is the target of example n, and not one of the 9 draws from the noise."""
        odds = math.exp(o[n][c]) / (9 * math.log((c + 2) / (c + 1)) / math.log(D + 1))
        return odds / (1 + odds)

    total = sum(
        -math.log(posterior(n, c)) - sum(math.log(1 - posterior(n, k)) for k in noise) for n, c in enumerate(target.tolist())
    )
    assert math.isclose(value, total / N, rel_tol=1e-5)
