"""The networks: a trunk that makes the hidden vector h, and an output layer o = W h + b."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spherical_loss import Loss
from spherical_loss.experiments.models.network import Network, activation


class Classifier(Network):
    """A trunk and an output layer."""

    def __init__(self, trunk: nn.Module, output: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        """The logits, ``(N, D)``."""
        return self.output(self.trunk(x))

    def objective(self, x: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(self(x), target)


def start(network: Classifier, loss: Loss, frequencies: Tensor) -> Classifier:
    """The paper's start: He's initialization of the hidden layers, zero biases, and zero output weights.

    Zero output weights with a zero bias are a saddle of every even loss: the spherical softmax and the softmax of ``|o|``
    would never get a gradient there. So the output bias is ``loss.prior_bias`` of ``frequencies``. With equal frequencies it
    is constant: all classes start equal, as in the paper, at a point where ``log g`` has a slope (``b = sqrt(eps)`` for
    the spherical softmax, ``0`` for the Taylor softmax, ``1`` for the softmax of ``|o|``). The Z-loss has no such bias
    and is not defined where all outputs are equal: its output weights start like the hidden ones.

    Convolutions are faster with channels last in memory, as :class:`~spherical_loss.experiments.data.images.Images` are.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if loss.has_prior_bias:
        with torch.no_grad():
            network.output.weight.zero_()
            network.output.bias.copy_(loss.prior_bias(frequencies))
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def pooled(pool: nn.MaxPool2d, modules: list[nn.Module]) -> list[nn.Module]:
    """``modules`` followed by max-pooling, with the pooling moved before the last module, the activation. The activation is
    non-decreasing, so the values are the same, and it is applied to fewer numbers."""
    return [*modules[:-1], pool, modules[-1]]


def perceptron(inputs: int, width: int, D: int, kind: str) -> Classifier:
    """Two hidden layers of ``width`` units."""
    trunk = nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, width),
        *activation(kind, width, spatial=False),
        nn.Linear(width, width),
        *activation(kind, width, spatial=False, last=True),
    )
    return Classifier(trunk, nn.Linear(width, D))


def mnist_network(width: int, D: int, kind: str) -> Classifier:
    """The paper's MNIST network: two conv-pooling layers, a fully connected layer of 500, the output.

    ``width`` and ``2 width`` feature maps (the paper: 30 and 60), filters of 5, max-pooling windows of 5.

    The paper leaves padding and pooling stride open. Here the convolutions keep the size, and the windows overlap, with a
    stride of 2 (28, 12, 4: 960 inputs to the layer of 500). Windows that do not overlap (stride 5) leave a single position,
    60 numbers, and cannot come near the paper's 0.8% error: 7.3% after four epochs with softmax at learning rate 0.01; stride
    3 has 4.0% after two; stride 2 has 2.3% after one.
    """
    maps = (width, 2 * width)
    trunk = nn.Sequential(
        nn.Conv2d(1, maps[0], 5, padding=2),
        *pooled(nn.MaxPool2d(5, stride=2), activation(kind, maps[0], spatial=True)),  # 28 -> 12
        nn.Conv2d(maps[0], maps[1], 5, padding=2),
        *pooled(nn.MaxPool2d(5, stride=2), activation(kind, maps[1], spatial=True)),  # 12 -> 4
        nn.Flatten(),
        nn.Linear(maps[1] * 4 * 4, 500),
        *activation(kind, 500, spatial=False, last=True),
    )
    return Classifier(trunk, nn.Linear(500, D))


def cifar_network(width: int, D: int, kind: str) -> Classifier:
    """The paper's CIFAR network: 14 layers with filters of 3, pooling windows of 3, and batch normalization.

    The paper says no more than that and "inspired from" VGG, so these are VGG's 13 convolutions and the output layer:
    blocks of 2, 2, 3, 3, 3 convolutions with 1, 2, 4, 8, 8 times ``width`` maps (VGG's width is 64), each block followed by
    max-pooling with stride 2 (padded by 1: 32, 16, 8, 4, 2, 1). Batch normalization precedes every activation.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for block, (depth, factor) in enumerate([(2, 1), (2, 2), (3, 4), (3, 8), (3, 8)]):
        for layer in range(depth):
            maps = factor * width
            last = block == 4 and layer == 2
            normalize = [] if kind == "exp" else [nn.BatchNorm2d(maps)]  # "exp" includes its own
            convolution = nn.Conv2d(inputs, maps, 3, padding=1, bias=False)
            layers += [convolution, *normalize, *activation(kind, maps, spatial=True, last=last)]
            inputs = maps
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return Classifier(nn.Sequential(*layers, nn.Flatten()), nn.Linear(inputs, D))


def sgd(network: nn.Module, settings: Any) -> torch.optim.Optimizer:
    """Nesterov's momentum, with weight decay on weights only."""
    weights = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, settings.lr, settings.momentum, nesterov=settings.momentum > 0)
