"""The adaptive softmax of torch, which people use to make the softmax affordable at many classes, as a likelihood layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spherical_loss.heads import LikelihoodLayer, TopK
from spherical_loss.heads.base import CHUNK

CUTOFFS = (2_000, 20_000, 200_000)  # classes where the next, smaller matrix begins


class AdaptiveSoftmax(LikelihoodLayer):
    """``nn.AdaptiveLogSoftmaxWithLoss``: exact for what it is, another model, with smaller matrices for rarer classes.

    Classes come in the order of their frequency, the most frequent first. Reference: E. Grave, A. Joulin, M. Cisse,
    D. Grangier, H. Jegou, Efficient softmax approximation for GPUs, 2016.
    """

    def __init__(self, in_features: int, n_classes: int) -> None:
        super().__init__(in_features, n_classes)
        cutoffs = [c for c in CUTOFFS if c < n_classes] or [max(1, n_classes // 2)]
        self.layers = nn.AdaptiveLogSoftmaxWithLoss(in_features, n_classes, cutoffs)

    def training_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        return self.target_log_prob(H, classes)

    def target_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        return self.layers(H, classes).output

    @torch.no_grad()
    def all_log_prob(self, H: Tensor) -> Tensor:
        return self.layers.log_prob(H)

    @torch.no_grad()
    def best(self, H: Tensor, k: int) -> TopK:
        """Some examples at a time, since all classes of one come together."""
        blocks = H.split(max(1, CHUNK // self.n_classes))
        best = [self.all_log_prob(block).topk(k) for block in blocks]
        return TopK(torch.cat([b.values for b in best]), torch.cat([b.indices for b in best]))
