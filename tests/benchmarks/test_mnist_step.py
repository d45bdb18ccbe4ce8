"""The MNIST benchmark compares the same network."""

from __future__ import annotations

import torch

from benchmarks import mnist_step
from spherical_loss.experiments.models import image_networks as models


def test_both_networks_are_the_same() -> None:
    torch.manual_seed(0)
    plain, engine = mnist_step.plain_network(), models.mnist_network(30, 10, "relu")
    with torch.no_grad():
        for a, b in zip(plain.parameters(), engine.parameters(), strict=True):
            a.copy_(b)
    x = torch.randn(3, 1, 28, 28)
    assert torch.allclose(plain(x), engine(x), atol=1e-5)


def test_it_measures() -> None:
    row = mnist_step.compare("taylor", repeats=1)
    assert row["loss"] == "taylor"
    assert row["ratio"].median == row["engine"].median / row["plain"].median > 0
    assert row["data_share"] == row["data"].median / row["engine"].median > 0
