"""The networks and how they start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spherical_loss.experiments.models import image_networks as models
from spherical_loss.experiments.models.loss_names import LOSSES, make_loss
from spherical_loss.experiments.models.network import TruncatedExp

NETWORKS = {
    "perceptron": (lambda kind: models.perceptron(64, 16, 10, kind), (6, 1, 8, 8)),
    "mnist": (lambda kind: models.mnist_network(3, 10, kind), (6, 1, 28, 28)),
    "cifar": (lambda kind: models.cifar_network(4, 10, kind), (6, 3, 32, 32)),
}


@pytest.mark.parametrize("kind", ["relu", "softmax", "exp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_shapes_and_gradients(name: str, kind: str) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = models.start(make(kind), make_loss("z", {}), torch.ones(10))
    o = network(torch.randn(shape))
    assert o.shape == (6, 10)
    network.objective(torch.randn(shape), torch.arange(6), make_loss("taylor", {})).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())
    first = next(network.parameters())
    assert float(first.grad.abs().max()) > 0


def test_the_paper_mnist_network() -> None:
    network = models.mnist_network(30, 10, "relu")
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size) for c in convolutions] == [(30, (5, 5)), (60, (5, 5))]
    assert all(m.kernel_size == 5 for m in network.modules() if isinstance(m, nn.MaxPool2d))
    assert network.output.in_features == 500


def test_the_paper_cifar_network_has_14_layers() -> None:
    network = models.cifar_network(64, 100, "relu")
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 1 == 14
    assert all(c.kernel_size == (3, 3) for c in convolutions)
    assert all(m.kernel_size == 3 for m in network.modules() if isinstance(m, nn.MaxPool2d))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == 13
    assert convolutions[0].out_channels == 64


def test_he_initialization() -> None:
    torch.manual_seed(0)
    network = models.start(models.mnist_network(30, 10, "relu"), make_loss("taylor", {}), torch.ones(10))
    for module in network.trunk.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            assert float(module.weight.detach().std()) == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
            assert float(module.bias.detach().abs().max()) == 0


@pytest.mark.parametrize("loss_name", LOSSES)
def test_every_loss_moves_from_its_start(loss_name: str) -> None:
    torch.manual_seed(0)
    loss = make_loss(loss_name, {})
    network = models.start(models.perceptron(64, 16, 10, "relu"), loss, torch.ones(10))
    if loss_name != "z":
        assert float(network.output.weight.detach().abs().max()) == 0
    o = network(torch.randn(50, 1, 8, 8))
    if loss_name not in ("z", "mse"):
        assert torch.allclose(loss.probabilities(o), torch.full((50, 10), 0.1), atol=1e-6)
    network.objective(torch.randn(50, 1, 8, 8), torch.arange(50) % 10, loss).backward()
    assert float(network.output.weight.grad.abs().max()) > 1e-3


def test_pooling_before_the_activation_gives_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    pool = nn.MaxPool2d(5, stride=2)
    for kind in ("relu", "exp"):
        modules = models.activation(kind, 3, spatial=True)
        ours, theirs = nn.Sequential(*models.pooled(pool, modules)), nn.Sequential(*modules, pool)
        assert torch.equal(ours(x), theirs(x))


def test_truncated_exponential() -> None:
    x = torch.tensor([-1.0, 2.0, 50.0])
    assert torch.allclose(TruncatedExp()(x), torch.tensor([-1.0, 2.0, 2.0]).exp())


def test_softmax_is_in_the_last_hidden_layer_only() -> None:
    network = models.perceptron(64, 16, 10, "softmax")
    kinds = [type(m) for m in network.trunk]
    assert kinds.count(nn.Softmax) == 1
    assert kinds[-1] is nn.Softmax
    assert nn.ReLU in kinds
    assert torch.allclose(network.trunk(torch.randn(3, 1, 8, 8)).sum(1), torch.ones(3))


def test_weight_decay_is_for_weights_only() -> None:
    from spherical_loss.experiments.training.settings import Settings

    network = models.cifar_network(4, 10, "relu")
    optimizer = models.sgd(network, Settings(lr=0.1, weight_decay=0.5))
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decayed[id(p)] for p in network.parameters() if p.dim() > 1} == {0.5}
    assert {decayed[id(p)] for p in network.parameters() if p.dim() == 1} == {0.0}
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)
