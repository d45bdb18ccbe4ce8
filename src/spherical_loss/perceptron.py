"""The network of :class:`spherical_loss.sklearn.SphericalClassifier`, for dense and sparse rows (the ``sklearn`` extra)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from torch import Tensor, nn

from spherical_loss.base import Loss
from spherical_loss.heads import DenseHead, Head, LikelihoodLayer

Rows = Any  # a numpy array or a scipy CSR array


class Perceptron(nn.Module):
    """Standardized features, hidden ReLU layers, and a head."""

    shift: Tensor
    scale: Tensor
    sparse_weight: nn.Parameter | None
    sparse_bias: nn.Parameter | None

    def __init__(self, features: int, sizes: tuple[int, ...], sparse: bool, head: Head | LikelihoodLayer) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))
        layers = [_relu_layer(i, size) for i, size in zip((features, *sizes), sizes, strict=False)]
        self.sparse_weight = self.sparse_bias = None
        if sparse and sizes:  # a row for each feature, so that a step updates only the features that occur
            first = layers.pop(0)
            self.sparse_weight, self.sparse_bias = nn.Parameter(first.weight.detach().T.contiguous()), first.bias
        self.layers = nn.ModuleList(layers)
        self.head = head

    def hidden(self, X: Rows) -> Tensor:
        x = self._dense(X) if self.sparse_weight is None else self._first_layer(X, self.sparse_weight).relu()
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def losses(self, X: Rows, target: Any, loss: Loss) -> Tensor:
        """The loss of each row. The target is a class, (n,), or a CSR array (n, D) of weights of the true classes of a row."""
        hidden = self.hidden(X)
        if issparse(target):
            return self._losses_of_labels(hidden, target, loss)
        classes = torch.from_numpy(target)
        if isinstance(self.head, LikelihoodLayer):
            return -self.head(hidden, classes).output
        if isinstance(self.head, DenseHead):  # every loss takes logits, with every option
            return loss(self.head.logits(hidden), classes)
        return loss(self.head(hidden, classes))

    def _losses_of_labels(self, hidden: Tensor, labels: Any, loss: Loss) -> Tensor:
        """The sum over the true classes of a row of their weights times their losses."""
        if isinstance(self.head, DenseHead):
            return loss(self.head.logits(hidden), torch.from_numpy(labels.toarray()).to(hidden.dtype))
        if isinstance(self.head, LikelihoodLayer):  # one class at a time
            rows = torch.repeat_interleave(torch.arange(len(hidden)), torch.from_numpy(np.diff(labels.indptr)).long())
            log_p = self.head(hidden[rows], torch.from_numpy(labels.indices).long()).output
            return -hidden.new_zeros(len(hidden)).index_add(0, rows, log_p.to(hidden.dtype) * torch.from_numpy(labels.data))
        return loss(self.head(hidden, *padded(labels, self.head.ignore_index)))

    def outputs(self, hidden: Tensor) -> Tensor:
        """The logits of all classes, or their log-probabilities."""
        return self.head.log_prob(hidden) if isinstance(self.head, LikelihoodLayer) else self.head.logits(hidden)

    def topk(self, hidden: Tensor, k: int, loss: Loss) -> Tensor:
        """The ``k`` most probable classes."""
        found = self.head.topk(hidden, k) if isinstance(self.head, LikelihoodLayer) else self.head.topk(hidden, k, loss)
        return found.classes

    def standardize(self, X: Rows, weight: Any) -> None:
        """Centre and scale the features; a sparse X is only divided by the root mean square of the norms of its rows."""
        if issparse(X):
            squares = X.power(2).sum(1)
            shift, scale = np.zeros(1), np.atleast_1d(np.sqrt(np.average(squares, weights=weight)))
        else:
            shift = np.average(X, axis=0, weights=weight)
            scale = np.sqrt(np.average((X - shift) ** 2, axis=0, weights=weight))
            scale[scale <= 1e-6 * np.abs(shift)] = 0  # constant, up to rounding
        scale[scale == 0] = 1
        self.shift, self.scale = (torch.from_numpy(x).to(self.scale.dtype) for x in (shift, scale))

    def _dense(self, X: Rows) -> Tensor:
        x = torch.tensor(X.toarray() if issparse(X) else X, dtype=self.scale.dtype)
        return (x - self.shift) / self.scale

    def _first_layer(self, X: Rows, weight: Tensor) -> Tensor:
        X = csr_array(X)
        indices, starts = (torch.tensor(x, dtype=torch.long) for x in (X.indices, X.indptr[:-1]))
        values = torch.tensor(X.data, dtype=self.scale.dtype) / self.scale
        bag = nn.functional.embedding_bag(indices, weight, starts, mode="sum", sparse=True, per_sample_weights=values)
        return bag if self.sparse_bias is None else bag + self.sparse_bias


def padded(labels: Any, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The true classes of each row of a CSR array and their weights, (n, K) each; shorter rows end in ``ignore_index``."""
    counts = np.diff(labels.indptr)
    used = np.arange(max(1, counts.max(initial=0))) < counts[:, None]
    classes, weights = np.full(used.shape, ignore_index, dtype=np.int64), np.zeros(used.shape, dtype=labels.dtype)
    classes[used], weights[used] = labels.indices, labels.data
    return torch.from_numpy(classes), torch.from_numpy(weights)


def _relu_layer(inputs: int, size: int) -> nn.Linear:
    layer = nn.Linear(inputs, size)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer
