r"""A learning rate to start from, for SGD on an output layer and a loss of the family: two limits, and a share of each.

Write :math:`g_q = \partial L / \partial q` and :math:`g_c = \partial L / \partial o_c`, x for a hidden vector with a one for
the bias, and N for the batch size. A step multiplies W by :math:`I - lr A`, with :math:`A = 2 E[g_q x x^T]`, and
adds :math:`-lr g_c x / N` to the row of each target.

**Stability.** All eigenvalues of :math:`I - lr A` are positive for :math:`lr < 1 / (2 E[g_q] |x|^2)`. For the Taylor softmax
with zero weights and biases that is :math:`D / |x|^2`. Where targets follow from the inputs, this is the only limit.

**Noise.** Where they do not, as with words, each occurrence of a target moves its row along the x of that example, and
the contraction shrinks it again. In equilibrium the row of class c, of probability :math:`p_c`, has the covariance
:math:`lr\, p_c g_c^2 / (4 N g_q)` in every direction, which adds to q and costs :math:`lr |x|^2 E[g_c^2] / (4 N)` nats.

**Tiers.** With a rate of its own for each tier, :math:`lr f_c` for the row of class c, stability limits the largest of them,
and noise costs :math:`lr |x|^2 E[f_c g_c^2] / (4 N)`.

With biases that match the frequencies :math:`E[g_c^2]` is about :math:`2 D \min(p)` for the Taylor softmax: it is the rarest
classes that limit the rate. For the spherical softmax both limits are those of the Taylor softmax times eps.

**Measured.** Language models with d = 128 and N = 250, trained on 300,000 words with a rate that falls to a tenth, and their
validation perplexity by the first rate of the output layer:

=========================================  =========  ================================================
text, head, loss                           suggested  measured
=========================================  =========  ================================================
Penn Treebank, factored, Taylor            150        15: 614, 50: 544, 150: 511, 500: 512
Penn Treebank, factored, spherical 0.0198  3.0        0.3: 614, 1: 544, 3: 511, 10: 513
IMDB reviews, tail of 113,519 of the       55         3: 729, 30: 729, 300: 748, 3,000: 860
115,519 words, Taylor
=========================================  =========  ================================================

With a trunk that learns faster the best rate is lower. The task ``ptb`` with two layers of 400, normalized hidden vectors and
``--lr 1 --embedding-rate 150 --embedding-std 0.1``, after 400,000 words (``--output-rate``):

=========================================  =========  ================================================
Penn Treebank, factored, Taylor            48         4: 379, 10: 334, 48: 386
Penn Treebank, tiered, Taylor              12         0.4: 392, 1: 337, 3: 302, 12: 403
=========================================  =========  ================================================

A single head over all 115,519 words of the IMDB reviews (suggested: 323) has learned almost nothing after 300,000 words, at
rates from 30 to 1,000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spherical_loss.base import SphericalLoss
from spherical_loss.heads.base import Head
from spherical_loss.heads.factored import FactoredHead
from spherical_loss.heads.tiered import TieredHead
from spherical_loss.heads.tiered.sgd import POWER
from spherical_loss.statistics import statistics_dtype

STABLE_SHARE = 0.2  # of the largest rate that is stable at the start; above 0.25 steps of a factored head get expensive
NOISE = 0.4  # nats


def suggested_lr(
    head: Head,
    loss: SphericalLoss,
    batch_size: int,
    hidden_square: float | None = None,
    noise: float | None = NOISE,
    power: float = POWER,
) -> float:
    """A learning rate for SGD on a head that has not been trained: right within a factor of some 5, to be refined by a search.

    Args:
        head: with zero weights and the biases it starts from, such as ``loss.prior_bias(frequencies)``. For a
            :class:`TieredHead`, the rate is that of its rarest tier, as ``TieredSGD`` takes it; for an
            :class:`AdaptiveSphericalSoftmax`, give its ``tail``, or each of its ``tails``.
        loss: of the family, reduced by its mean.
        batch_size: N, the examples of a step; for the tail of an :class:`AdaptiveSphericalSoftmax`, those of the whole batch.
        hidden_square: the mean squared norm of a hidden vector; d if None, as after a layer normalization.
        noise: nats of the loss that may be noise at this rate, which should fall from there. None if the targets follow from
            the inputs: then stability alone decides.
        power: that of ``TieredSGD``; without meaning for other heads.

    >>> from spherical_loss import FactoredHead, TaylorSoftmaxLoss
    >>> head, loss = FactoredHead(63, 1_000_000, init="zero"), TaylorSoftmaxLoss()
    >>> round(suggested_lr(head, loss, batch_size=512, noise=None))  # 0.2 D / (d + 1)
    3125
    """
    _check_kinds(head, loss)
    if batch_size < 1 or (hidden_square is not None and not hidden_square > 0) or (noise is not None and not noise > 0):
        raise ValueError(
            f"batch_size is {batch_size}, hidden_square {hidden_square} and noise {noise}, but those given must be positive"
        )
    square = (head.in_features if hidden_square is None else hidden_square) + head.has_bias
    # With zero weights the outputs are the biases.
    outputs = head.bias.detach() if head.has_bias else torch.zeros(head.num_classes)
    factors = _factors(head, power).to(outputs.device)
    g_q, g_c_squared = _slopes(loss, outputs, factors)
    if not g_q > 0:
        raise ValueError(
            f"{loss} does not depend on q where this head starts, so no learning rate follows from it: "
            "start from loss.prior_bias(frequencies), or search over several decades"
        )
    stable = STABLE_SHARE / (2 * g_q * square * float(factors.max()))
    return stable if noise is None else min(stable, 4 * noise * batch_size / (square * g_c_squared))


def _check_kinds(head: Head, loss: SphericalLoss) -> None:
    if not isinstance(head, Head):
        raise TypeError(
            f"head is {type(head).__name__}, but the rate is that of a Head: of an AdaptiveSphericalSoftmax give layer.tail, "
            "or each of layer.tails"
        )
    if not isinstance(loss, SphericalLoss):
        raise TypeError(f"loss is {type(loss).__name__}, but must be of the spherical family, such as TaylorSoftmaxLoss()")


def _factors(head: Head, power: float) -> Tensor:
    """The rate of each class, (D,), in that of the rarest tier; (1,) where all have one rate."""
    if not isinstance(head, TieredHead):
        return torch.ones(1)
    sizes = torch.tensor([stop - start for _, start, stop in head.ranges])
    return torch.tensor(head.tier_factors(power)).repeat_interleave(sizes)[head.place.cpu()]


def _slopes(loss: SphericalLoss, outputs: Tensor, factors: Tensor) -> tuple[float, float]:
    """``E[g_q]`` and ``E[f_c g_c^2]`` where all examples have these outputs (D,), and targets as probable as they say."""
    o = outputs.to(statistics_dtype(outputs.device)).requires_grad_()
    s, q = o.detach().sum().requires_grad_(), o.detach().square().sum().requires_grad_()
    p = loss.probabilities(o.detach()) if loss.is_likelihood else torch.full_like(o, 1 / len(o)).detach()
    mean = (p * loss.formula(s, q, o, len(o))).sum()
    g_q, g_c = torch.autograd.grad(mean, [q, o], materialize_grads=True)
    return float(g_q), float((factors.to(o.dtype) * g_c.square() / p).sum())


def stable_lr(head: FactoredHead | TieredHead) -> float:
    """The largest learning rate that is certainly stable, ``1 / trace(A)``, as the last backward pass found it.

    It is the limit of :func:`spherical_loss.suggested_lr` where the head is now, instead of where it started; for the most
    frequent tier of a :class:`TieredHead`.
    """
    trace = sum(float((2 * b.g_q.abs() * b.H.square().sum(1)).sum()) for b in head.gradients)
    return 1 / trace if trace > 0 else 0.0
