"""What the training loop knows about a network, and the activations."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spherical_loss import Loss


class Network(nn.Module):
    """A network that can be trained. Where its head makes statistics, :meth:`objective` is ``loss(head(hidden, target))``."""

    @abstractmethod
    def objective(self, x: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """What is minimized: the mean loss of a batch."""

    @property
    def smallest_batch(self) -> int:
        """The smallest number of examples in a training batch: batch normalization needs two."""
        return 2 if any(isinstance(module, _BatchNorm) for module in self.modules()) else 1


class TruncatedExp(nn.Module):
    """``exp(min(x, 2))``: the paper truncates its exponential and does not say where. 2 is two standard deviations above
    the mean of the batch-normalized input, so that the output stays below 7.4."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_max(2.0).exp()


def activation(kind: str, features: int, spatial: bool, last: bool = False) -> list[nn.Module]:
    """The modules that follow a hidden layer of ``features`` units (maps, if ``spatial``).

    ``softmax`` is for the ``last`` hidden layer only, as in the paper; the others stay ReLU.
    """
    if kind == "exp":
        return [nn.BatchNorm2d(features) if spatial else nn.BatchNorm1d(features), TruncatedExp()]
    if kind == "softmax" and last:
        return [nn.Softmax(dim=1)]
    return [nn.ReLU()]
