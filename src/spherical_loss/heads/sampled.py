"""The sampled softmax: a softmax over all classes, trained on the targets and some negatives. An approximation.

References: Y. Bengio, J.-S. Senecal, Adaptive Importance Sampling to Accelerate Training of a Neural Probabilistic Language
Model, 2008; S. Jean, K. Cho, R. Memisevic, Y. Bengio, On Using Very Large Target Vocabulary for Neural Machine Translation,
2015, arXiv 1412.2007.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss.heads.base import TopK, chunk_rows
from spherical_loss.heads.dense import DenseHead
from spherical_loss.heads.likelihood import LikelihoodLayer, checked_frequencies, zipf
from spherical_loss.losses import SoftmaxLoss
from spherical_loss.statistics import widened

PROPOSALS = ("log-uniform", "frequencies")


class SampledSoftmax(LikelihoodLayer):
    """A softmax over D classes, trained on a sample of them: O(d (N m + N + m)) a step with m negatives.

    In ``train()`` mode, ``layer(hidden, target)`` draws m classes from a proposal distribution P, with replacement, which all
    examples of the batch share, and estimates the normalizer of the softmax by

        Z' = exp(o_c) + sum over the drawn k != c of exp(o_k) / (m P(k))

    Z' is unbiased, its logarithm is not (by Jensen's inequality it is too small on average), and so the gradient is that of
    another objective: an approximation, which more negatives improve. In ``eval()`` mode the same call is exact and costs
    O(N d D), as :meth:`log_prob`, :meth:`predict` and :meth:`topk` always do.

    The weights are those of ``layer.head``, a :class:`DenseHead`. Their gradient is sparse, for ``torch.optim.SGD`` and
    ``torch.optim.SparseAdam``; with ``sparse=False`` it is dense, for any optimizer, at O(D d) a step.

    Start: zero weights, and the bias that matches the class frequencies.

    Args:
        in_features: d, the size of a hidden vector.
        n_classes: D, the number of classes.
        negatives: m, classes drawn for each batch.
        frequencies: one positive number per class, ``(D,)``, such as counts + 1. Without them, classes must come in the order
            of their frequency, the most frequent first, and start with the frequencies of Zipf's law.
        proposal: ``"frequencies"`` draws classes in proportion to them, ``"log-uniform"`` by Zipf's law, for classes in the
            order of their frequency, ``P(c) = log((c + 2) / (c + 1)) / log(D + 1)``. By default the first if there are
            frequencies.
        sparse: whether the gradient of the weights is sparse.
        ignore_index: examples with this target are ignored.
        reduction: ``"mean"`` over the examples that count, ``"sum"``, or ``"none"``.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> layer, hidden, target = SampledSoftmax(8, 1000, negatives=100), torch.randn(16, 8), torch.arange(16)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    >>> for step in range(50):
    ...     optimizer.zero_grad()
    ...     layer(hidden, target).loss.backward()
    ...     optimizer.step()
    >>> bool(layer.eval()(hidden, target).loss < 1)  # exact
    True
    """

    cumulative: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        negatives: int = 1024,
        frequencies: Tensor | Sequence[float] | None = None,
        proposal: str | None = None,
        sparse: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(in_features, n_classes, ignore_index, reduction)
        if negatives < 1:
            raise ValueError(f"negatives is {negatives}, but at least one class must be drawn for each batch")
        proposal = proposal or ("log-uniform" if frequencies is None else "frequencies")
        if proposal not in PROPOSALS:
            raise ValueError(f"proposal {proposal!r} is not known; use one of {', '.join(PROPOSALS)}")
        if proposal == "frequencies" and frequencies is None:
            raise ValueError('proposal "frequencies" needs them: give frequencies, or use "log-uniform"')
        with torch.device("cpu"):  # these are read here, also where the layer is made on the meta device
            p = zipf(n_classes) if frequencies is None else checked_frequencies(frequencies, n_classes).cpu()
        self.negatives, self.proposal, self.sparse = negatives, proposal, sparse
        self.head = DenseHead(in_features, n_classes, init="zero")
        self.head.set_bias(SoftmaxLoss().prior_bias(p))
        cumulative = p.cumsum(0) if proposal == "frequencies" else p.new_empty(0)
        self.register_buffer("cumulative", (cumulative / cumulative[-1:]).to(self.head.weight.device))

    def draw(self) -> Tensor:
        """The negatives of a batch, (m,)."""
        u = torch.rand(
            self.negatives, dtype=torch.float64, device=self.head.weight.device
        )  # float32 skips classes from 2^23 on
        if self.proposal == "frequencies":
            classes = torch.searchsorted(self.cumulative, u, right=True)
        else:
            classes = torch.exp(u * math.log(self.n_classes + 1)).long() - 1
        return classes.clamp_(0, self.n_classes - 1)

    def log_expected_count(self, classes: Tensor) -> Tensor:
        """The logarithm of ``m P(c)``, how often a class is drawn on average."""
        if self.proposal == "frequencies":
            before = torch.where(classes > 0, self.cumulative[classes - 1], 0.0)
            return torch.log(self.negatives * (self.cumulative[classes] - before))
        return torch.log(torch.log1p(1 / (classes.double() + 1)) * (self.negatives / math.log(self.n_classes + 1)))

    def training_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        drawn = self.draw()
        positive, negative = self._outputs(H, classes, drawn)
        negative = negative - self.log_expected_count(drawn).to(negative.dtype)
        negative = negative.masked_fill(classes.unsqueeze(1) == drawn, -math.inf)  # a target that was drawn
        outputs = torch.cat([positive.unsqueeze(1), negative], 1)
        return -F.cross_entropy(outputs, torch.zeros_like(classes), reduction="none")

    def target_log_prob(self, H: Tensor, classes: Tensor) -> Tensor:
        o = self.head.logits(H)
        return -F.cross_entropy(o.to(widened(o.dtype)), classes, reduction="none")

    @torch.no_grad()
    def all_log_prob(self, H: Tensor) -> Tensor:
        o = self.head.logits(H)
        return F.log_softmax(o.to(widened(o.dtype)), 1)

    @torch.no_grad()
    def best(self, H: Tensor, k: int) -> TopK:
        outputs, classes = self.head.topk(H, k, SoftmaxLoss())
        log_Z = outputs.new_full((H.shape[0],), -math.inf)
        for _, o in self.head.logit_chunks(H, rows=chunk_rows(H.shape[0])):
            log_Z = torch.logaddexp(log_Z, o.to(log_Z.dtype).logsumexp(1))
        return TopK(outputs - log_Z.unsqueeze(1), classes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, negatives={self.negatives}, proposal={self.proposal!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``.to(dtype)`` keeps the precision of the proposal: the differences of neighbours are probabilities."""
        cumulative = self.cumulative
        super()._apply(fn, recurse)
        if not cumulative.is_meta:
            self.cumulative = cumulative.to(self.cumulative.device)
        elif self.cumulative.dtype != cumulative.dtype:
            self.cumulative = torch.empty_like(cumulative, device=self.cumulative.device)
        return self

    def _outputs(self, H: Tensor, classes: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of each example's own class, (N,), and of the drawn ones, (N, m); float32 at least."""
        N, both = len(classes), torch.cat([classes, drawn])
        W, b = _Rows.apply(self.head.weight, self.head.bias, both, self.sparse)
        positive = (H * W[:N]).sum(1) + b[:N]
        negative = F.linear(H, W[N:], b[N:])
        return positive.to(widened(positive.dtype)), negative.to(widened(negative.dtype))


class _Rows(torch.autograd.Function):
    """Rows of W and b, with sparse gradients for both: indexing has dense ones, and ``F.embedding`` takes matrices only."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, b: Tensor, classes: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(classes)
        ctx.shapes, ctx.sparse = (W.shape, b.shape), sparse
        return W.index_select(0, classes), b.index_select(0, classes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (classes,) = ctx.saved_tensors
        rows = zip(grads, ctx.shapes, strict=True)
        if ctx.sparse:
            W, b = (torch.sparse_coo_tensor(classes.unsqueeze(0), g, s, check_invariants=False) for g, s in rows)
        else:
            W, b = (g.new_zeros(s).index_add_(0, classes, g) for g, s in rows)
        return W, b, None, None
