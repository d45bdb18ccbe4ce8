"""The neural language model of the paper: a context of 6 words, embeddings, ReLU layers, and an output layer.

Reference: Y. Bengio, R. Ducharme, P. Vincent, A Neural Probabilistic Language Model, 2001.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spherical_loss import AdaptiveSphericalSoftmax, Loss, SampledSoftmax, SphericalLoss
from spherical_loss.experiments.data.corpora import TextSet
from spherical_loss.experiments.data.simlex import agreement
from spherical_loss.experiments.models.network import Network, activation
from spherical_loss.experiments.models.softmax_heads import AdaptiveSoftmax
from spherical_loss.experiments.training.metrics import as_in_paper
from spherical_loss.experiments.training.settings import LanguageSettings
from spherical_loss.heads import (
    DenseHead,
    FactoredHead,
    FactoredSGD,
    GramHead,
    Head,
    LikelihoodLayer,
    TieredHead,
    TieredSGD,
    TopK,
)
from spherical_loss.heads.tiered.sgd import POWER
from spherical_loss.learning_rate import suggested_lr

HEADS: dict[str, type[Head]] = {"dense": DenseHead, "gram": GramHead, "factored": FactoredHead}
FREQUENT = 2_000  # classes of the softmax of the adaptive spherical softmax, and half of the classes at most
MANY_CLASSES = 32_000  # from here on it has several softmaxes and two tails, as in benchmarks.quality:
FREQUENT_OF_MANY, TAIL_CUTOFFS = (100, 300, 700, 1_500, 3_000), (12_000,)
BATCH = 500  # examples that are evaluated at once
RANKED_BATCH = 10_000  # examples that are ranked at once: the factored head computes its dense rows again for each batch


class LanguageModel(Network):
    """The concatenated embeddings of the context, hidden layers, and a head.

    The gradient of the embeddings is sparse: a step touches the words of the batch only, whatever the vocabulary. With the
    gram and the factored head neither :meth:`objective` nor its gradient computes the logits.
    """

    def __init__(self, D: int, settings: LanguageSettings, make_head: Callable[[int, int], Head | LikelihoodLayer]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(D, settings.embedding, sparse=True)
        layers: list[nn.Module] = []
        inputs = settings.context * settings.embedding
        for layer in range(settings.layers or 0):
            width = settings.width or 0
            last = layer + 1 == settings.layers
            layers += [nn.Linear(inputs, width), *activation(settings.activation, width, spatial=False, last=last)]
            inputs = width
        if settings.normalize == "rms":
            layers.append(nn.RMSNorm(inputs, elementwise_affine=False))
        self.trunk = nn.Sequential(*layers)
        self.head: Any = make_head(inputs, D)
        self.suggested_rates: list[float] = []
        """Of the head, or of the tails of an adaptive spherical softmax; found before they are trained."""

    def hidden(self, x: Tensor) -> Tensor:
        """``(N, d)`` for contexts ``(N, context)``."""
        return self.trunk(self.embedding(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        """The logits, ``(N, D)``, or log-probabilities, which are their own logits: ``softmax(log p) = p``."""
        hidden = self.hidden(x)
        return self.head.log_prob(hidden) if isinstance(self.head, LikelihoodLayer) else self.head.logits(hidden)

    def objective(self, x: Tensor, target: Tensor, loss: Loss) -> Tensor:
        hidden = self.hidden(x)
        if isinstance(self.head, LikelihoodLayer):
            return self.head(hidden, target).loss
        if isinstance(loss, SphericalLoss):
            return loss(self.head(hidden, target))
        return loss(self.head.logits(hidden), target)

    def topk(self, hidden: Tensor, k: int, loss: Loss) -> TopK:
        """The ``k`` most probable words after hidden vectors ``(N, d)``."""
        return self.head.topk(hidden, k) if isinstance(self.head, LikelihoodLayer) else self.head.topk(hidden, k, loss)

    def output_weights(self, classes: Tensor) -> Tensor | None:
        """Rows of W, ``(n, d)``; the adaptive layers have none that could be compared."""
        head = self.head.head if isinstance(self.head, SampledSoftmax) else self.head
        if isinstance(head, LikelihoodLayer):
            return None
        if isinstance(head, FactoredHead):
            return head.rows(classes)[:, : head.in_features]
        return head.weight.detach()[classes]


def language_model(settings: LanguageSettings, train: TextSet, loss: Loss) -> LanguageModel:
    """The paper's start: He's initialization of the hidden layers, zero output weights, output biases that match the word
    frequencies. The Z-loss has no such bias, and is flat where all outputs are equal: its output weights start with He's
    standard deviation, ``sqrt(2 / d)``. Embeddings start with a standard deviation of ``settings.embedding_std``. All heads
    start with the same values.
    """
    network = LanguageModel(train.D, settings, lambda d, D: made_head(settings.head, d, train, loss))
    with torch.no_grad():
        network.embedding.weight.mul_(settings.embedding_std or 1.0)
    for module in network.trunk:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    head = network.head
    if not isinstance(head, LikelihoodLayer):  # which has started already
        if loss.has_prior_bias:
            head.set_bias(loss.prior_bias(train.frequencies.float()))
        else:
            head.set_weight(torch.randn(train.D, head.in_features) * math.sqrt(2 / head.in_features))
    network.suggested_rates = suggested_rates(head, loss, settings.batch_size, tier_power(settings))
    return network


def suggested_rates(head: Head | LikelihoodLayer, loss: Loss, batch_size: int, power: float = POWER) -> list[float]:
    if isinstance(head, AdaptiveSphericalSoftmax):
        return [suggested_lr(tail, head.loss, batch_size) for tail in head.tails]
    if isinstance(head, Head) and isinstance(loss, SphericalLoss) and loss.is_likelihood:
        return [suggested_lr(head, loss, batch_size, power=power)]
    return []


def tier_power(settings: LanguageSettings) -> float:
    return POWER if settings.tier_power is None else settings.tier_power


def made_head(name: str, d: int, train: TextSet, loss: Loss) -> Head | LikelihoodLayer:
    """An output layer: a likelihood at its start, a head with zero weights and biases."""
    D, frequencies = train.D, train.frequencies
    if name == "sampled":
        return SampledSoftmax(d, D, frequencies=frequencies, proposal="log-uniform")
    if name == "adaptive":  # starts as torch starts it
        return AdaptiveSoftmax(d, D)
    if name == "adaptive-spherical":
        assert isinstance(loss, SphericalLoss)
        if D < MANY_CLASSES:
            return AdaptiveSphericalSoftmax(d, D, min(FREQUENT, D // 2), loss, frequencies)
        cutoffs = [cutoff for cutoff in TAIL_CUTOFFS if 2 * cutoff <= D]
        return AdaptiveSphericalSoftmax(d, D, FREQUENT_OF_MANY, loss, frequencies, tail_cutoffs=cutoffs)
    if name == "tiered":
        return TieredHead(d, D, init="zero", frequencies=frequencies)
    return HEADS[name](d, D, init="zero")


class SGDBesideFactored(torch.optim.SGD):
    """Plain SGD of parameters, and the exact SGD of factored or tiered heads, at fixed multiples of the first rate."""

    def __init__(self, groups: Any, lr: float, *factored: FactoredSGD | TieredSGD) -> None:
        super().__init__(groups, lr)
        self.factored = factored
        self.multiples = [group["lr"] / lr for group in self.factored_groups()]

    def factored_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.factored for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for each in self.factored:
            each.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = super().step(closure)  # a closure makes the gradients of both
        for group, multiple in zip(self.factored_groups(), self.multiples, strict=True):
            group["lr"] = self.param_groups[0]["lr"] * multiple
        try:
            for each in self.factored:
                each.step()
        except ValueError as error:  # a step so large that it erases a direction of W
            raise FloatingPointError(str(error)) from error
        return value


def language_optimizer(network: LanguageModel, settings: LanguageSettings) -> torch.optim.Optimizer:
    """Plain SGD, with learning rates of their own for the embeddings and the output layer.

    The gradient of an embedding is a mean over the batch, in which its word occurs once or twice: at the rate of the hidden
    layers it hardly moves.
    """
    assert settings.lr is not None
    head = network.head
    trunk: list[dict[str, Any]] = [
        {"params": network.trunk.parameters()},  # none without hidden layers; the rates of factored heads follow this group's
        {"params": network.embedding.parameters(), "lr": settings.lr * (settings.embedding_rate or 1.0)},
    ]
    rate = network.suggested_rates[0] if settings.output_rate is None else settings.lr * settings.output_rate
    if isinstance(head, TieredHead):
        return SGDBesideFactored(trunk, settings.lr, TieredSGD(head, rate, tier_power(settings)))
    if isinstance(head, FactoredHead):
        return SGDBesideFactored(trunk, settings.lr, FactoredSGD(head, rate))
    groups = [*trunk, {"params": head.parameters(), "lr": rate}]
    if isinstance(head, AdaptiveSphericalSoftmax):
        given = None if settings.tail_rate is None else settings.lr * settings.tail_rate
        rates = [given or suggested for suggested in network.suggested_rates]
        tails = [FactoredSGD(tail, rate) for tail, rate in zip(head.tails, rates, strict=True)]
        return SGDBesideFactored(groups, settings.lr, *tails)
    return torch.optim.SGD(groups, settings.lr)


@torch.no_grad()
def evaluate_language(network: LanguageModel, loss: Loss, data: TextSet) -> dict[str, float | None]:
    """Metrics of ``network`` on ``data``.

    - ``loss``: the training loss, from the statistics for the losses of the family; for the others, of ``measured`` examples,
      which are all of them unless that takes too many outputs.
    - ``nll`` and ``perplexity``, its exponential: under the loss's own distribution, where it has one. For the bounds that is
      the softmax, which needs the logits, so it is measured on the ranked examples alone.
    - ``error``, ``top10``: how often the target is not the most probable word, or not among the ten most probable; of
      ``ranked`` examples, which are all of them unless that takes too many outputs.
    - ``simlex_input``, ``simlex_output``, ``simlex_pairs``: see :func:`spherical_loss.experiments.data.simlex.agreement`.
    """
    was_training = network.training
    network.eval()
    device = network.embedding.weight.device
    total = 0.0
    measured = torch.arange(len(data)) if isinstance(loss, SphericalLoss) else data.with_logits
    for rows in measured.split(BATCH):
        total += float(network.objective(*data.batch(rows.to(device)), loss)) * len(rows)
    value = as_in_paper(total / len(measured), loss, data.D)
    nll: float | None = value
    if isinstance(loss, SphericalLoss) and not loss.is_likelihood:
        nll = sampled_nll(network, loss, data)
    metrics: dict[str, float | None] = {"loss": value, "nll": nll, "measured": len(measured)}
    metrics["perplexity"] = None if nll is None else math.exp(min(nll, 700.0))
    metrics.update(ranking(network, loss, data))
    first, second = data.pairs.words.to(device).unbind(1)
    scores = data.pairs.scores
    embedding = network.embedding.weight
    metrics["simlex_input"] = agreement(embedding[first], embedding[second], scores)
    W_first, W_second = network.output_weights(first), network.output_weights(second)
    metrics["simlex_output"] = None if W_first is None or W_second is None else agreement(W_first, W_second, scores)
    metrics["simlex_pairs"] = len(scores) or None
    network.train(was_training)
    return metrics


def ranking(network: LanguageModel, loss: Loss, data: TextSet) -> dict[str, float | None]:
    """``error``, ``top10`` and ``ranked``, by an exact search that never holds all the logits in memory."""
    device = network.embedding.weight.device
    hits = torch.zeros(2, dtype=torch.int64, device=device)
    for rows in data.ranked.split(RANKED_BATCH):
        hidden, targets = [], []
        for part in rows.split(BATCH):
            x, target = data.batch(part.to(device))
            hidden.append(network.hidden(x))
            targets.append(target)
        best = network.topk(torch.cat(hidden), min(10, data.D), loss).classes
        hit = best == torch.cat(targets).unsqueeze(1)
        hits += torch.stack([hit[:, 0].sum(), hit.sum()])
    top1, top10 = (1 - hits.double() / len(data.ranked)).tolist()
    return {"error": top1, "top10": top10, "ranked": len(data.ranked)}


def sampled_nll(network: LanguageModel, loss: Loss, data: TextSet) -> float | None:
    """The mean negative log-likelihood of the ranked examples, from the logits; None for a loss without probabilities."""
    if not loss.has_probabilities:
        return None
    device = network.embedding.weight.device
    total = 0.0
    for rows in data.ranked.split(BATCH):
        x, target = data.batch(rows.to(device))
        log_p = loss.log_probabilities(network(x))
        total -= float(log_p.gather(1, target.unsqueeze(1)).double().sum())
    return total / len(data.ranked)
