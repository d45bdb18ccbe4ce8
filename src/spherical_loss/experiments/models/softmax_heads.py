"""What people use to make the softmax affordable at many classes, as output layers of the language model.

Both take classes in the order of their frequency, the most frequent first.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss import DenseHead, Loss
from spherical_loss.heads.base import CHUNK, TopK

NEGATIVES = 1024
CUTOFFS = (2_000, 20_000, 200_000)  # classes where the next, smaller matrix of the adaptive softmax begins


class SampledSoftmaxHead(DenseHead):
    """A linear layer that is trained on the targets and some negatives, which all examples of a batch share.

    The negatives come from a log-uniform distribution over the ranks, ``P(c) = log((c + 2) / (c + 1)) / log(D + 1)``. Those
    that are not the target, each divided by how often it is expected, and the target give an unbiased estimate of the
    normalizer of the softmax. Its logarithm is biased, and so is the gradient: an approximation. The gradient of the weights
    is sparse. Reference: Y. Bengio, J.-S. Senecal, Adaptive Importance Sampling to Accelerate Training of a Neural
    Probabilistic Language Model, 2008.
    """

    def __init__(self, in_features: int, num_classes: int, init: str = "he", negatives: int = NEGATIVES) -> None:
        super().__init__(in_features, num_classes, init=init)
        self.negatives = negatives

    def noise(self, device: torch.device) -> Tensor:
        """Classes of the negatives of a batch."""
        u = torch.rand(self.negatives, device=device)
        return (torch.exp(u * math.log(self.num_classes + 1)).long() - 1).clamp_(0, self.num_classes - 1)

    def log_expected_count(self, classes: Tensor) -> Tensor:
        return torch.log(torch.log1p(1 / (classes.float() + 1)) * (self.negatives / math.log(self.num_classes + 1)))

    def training_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The mean of ``log(exp(o_c) + sum over the negatives k != c of exp(o_k) / E_k) - o_c``."""
        N, noise = len(target), self.noise(target.device)
        classes = torch.cat([target, noise])
        W, b = F.embedding(classes, self.weight, sparse=True), self.bias[classes]
        positive = (hidden * W[:N]).sum(1) + b[:N]
        negative = torch.addmm(b[N:] - self.log_expected_count(noise), hidden, W[N:].T)
        negative = negative.masked_fill(target.unsqueeze(1) == noise, -math.inf)  # a target that was drawn as noise
        return F.cross_entropy(torch.cat([positive.unsqueeze(1), negative], 1), torch.zeros_like(target))


class AdaptiveSoftmaxHead(nn.Module):
    """``nn.AdaptiveLogSoftmaxWithLoss``: exact for what it is, another model, with smaller matrices for rarer classes.

    Reference: E. Grave, A. Joulin, M. Cisse, D. Grangier, H. Jegou, Efficient softmax approximation for GPUs, 2016.
    """

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        cutoffs = [c for c in CUTOFFS if c < num_classes] or [max(1, num_classes // 2)]
        self.layers = nn.AdaptiveLogSoftmaxWithLoss(in_features, num_classes, cutoffs)

    def training_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.layers(hidden, target).loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Log-probabilities, which are their own logits: ``softmax(log p) = p``."""
        return self.layers.log_prob(hidden)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        """The ``k`` most probable classes; some examples at a time, since all classes of one come together."""
        blocks = hidden.split(max(1, CHUNK // self.num_classes))
        best = [self.logits(block).topk(k) for block in blocks]
        return TopK(torch.cat([b.values for b in best]), torch.cat([b.indices for b in best]))
