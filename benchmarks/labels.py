"""Several true classes per example: precision of the first k, beside sigmoid cross-entropy. ``python -m benchmarks.labels``

A generated set: documents of words, with one or more of 2,000 labels of Zipf's frequencies. Every label has some words of its
own, and a document has some of those of each of its labels, among others that say nothing. All contenders have the same trunk
and the same search for the learning rate, by the precision on validation documents. The times are medians of the processor time
of one step, on one thread. The figures go to results/labels.json, and ``python -m benchmarks.publish`` writes them into the
documentation; some minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import RESULTS, readable
from spherical_loss import DenseHead, FactoredHead, FactoredSGD, GramHead, Head, SphericalSoftmaxLoss, TaylorSoftmaxLoss
from spherical_loss.base import Loss
from spherical_loss.experiments.table import Table, show
from spherical_loss.heads.base import TopK
from spherical_loss.learning_rate import suggested_lr
from spherical_loss.losses import SoftmaxLoss

IGNORED = -100
N, d = 256, 64
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of Adam; that of a factored head is the suggested one, times 100 of these
FIRST = (1, 3, 5)
HEADER = ["loss", "output layer", "rate", *(f"precision@{k}" for k in FIRST), "time of a step"]


class Documents(NamedTuple):
    words: Tensor
    """(n, W), padded with 0, which is no word."""
    labels: Tensor
    """(n, K), padded with ``IGNORED``."""


class Corpus:
    """What labels mean, and documents drawn from it."""

    def __init__(self, labels: int = 2_000, vocabulary: int = 10_000, own: int = 6) -> None:
        self.labels, self.vocabulary = labels, vocabulary
        self.own = 1 + torch.randint(vocabulary, (labels, own))
        self.frequencies = 1 / torch.arange(1.0, labels + 1)

    def draw(self, n: int, most: int = 6, noise: int = 8) -> Documents:
        count = 1 + torch.poisson(torch.full((n, 1), 1.5)).clamp_max(most - 1)
        labels = torch.multinomial(self.frequencies.expand(n, -1), most)  # different ones
        labels = labels.masked_fill(torch.arange(most) >= count, IGNORED)
        some = torch.rand(n, most, self.own.shape[1]) < 0.5
        words = self.own[labels.clamp_min(0)] * (some & (labels != IGNORED).unsqueeze(2))
        others = 1 + (self.vocabulary * torch.rand(n, noise) ** 3).long()  # some more often than others
        return Documents(torch.cat([words.flatten(1), others], 1), labels)


class Model(nn.Module):
    def __init__(self, corpus: Corpus, head: Head) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(corpus.vocabulary + 1, d, mode="sum", padding_idx=0)
        self.norm, self.head = nn.LayerNorm(d), head

    def hidden(self, words: Tensor) -> Tensor:
        return self.norm(self.embedding(words))


def sigmoid_cross_entropy(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    """The sum over all classes, the mean over the examples."""
    o = head.logits(hidden)
    return F.binary_cross_entropy_with_logits(o, indicators(labels, o), reduction="sum") / len(o)


def of_logits(loss: Loss) -> Callable[[Head, Tensor, Tensor], Tensor]:
    """Losses that need logits take the true classes as class probabilities."""
    return lambda head, hidden, labels: loss(o := head.logits(hidden), indicators(labels, o))


def of_statistics(loss: Loss) -> Callable[[Head, Tensor, Tensor], Tensor]:
    return lambda head, hidden, labels: loss(head(hidden, labels, (labels != IGNORED).to(hidden.dtype)))


def indicators(labels: Tensor, o: Tensor) -> Tensor:
    true = labels != IGNORED
    return torch.zeros_like(o).scatter_add(1, labels.clamp_min(0), true.to(o.dtype))


class Contender(NamedTuple):
    name: str
    Kind: type[Head]
    ranking: Loss
    objective: Callable[[Head, Tensor, Tensor], Tensor]

    def made(self, corpus: Corpus) -> Head:
        """Zero weights, and biases that say the frequencies of the labels."""
        head = self.Kind(d, corpus.labels, init="zero")
        p = corpus.frequencies / corpus.frequencies.sum()
        head.set_bias(torch.logit(p) if self.name == "sigmoid cross-entropy" else self.ranking.prior_bias(p))
        return head


def contenders() -> list[Contender]:
    taylor, spherical, softmax = TaylorSoftmaxLoss(), SphericalSoftmaxLoss(), SoftmaxLoss()
    return [
        Contender("sigmoid cross-entropy", DenseHead, softmax, sigmoid_cross_entropy),
        Contender("softmax", DenseHead, softmax, of_logits(softmax)),
        Contender("Taylor softmax", GramHead, taylor, of_statistics(taylor)),
        Contender("Taylor softmax", FactoredHead, taylor, of_statistics(taylor)),
        Contender("spherical softmax", GramHead, spherical, of_statistics(spherical)),
    ]


def trained(contender: Contender, corpus: Corpus, train: Documents, rate: float, epochs: int) -> tuple[Model, list[float]]:
    torch.manual_seed(1)
    model = Model(corpus, contender.made(corpus))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(model.parameters(), lr=rate)]
    if isinstance(head := model.head, FactoredHead):
        assert isinstance(contender.ranking, TaylorSoftmaxLoss | SphericalSoftmaxLoss)
        optimizers.append(FactoredSGD(head, 100 * rate * suggested_lr(head, contender.ranking, N, noise=None)))
    steps, seconds = epochs * (len(train.words) // N), []
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.05, steps) for o in optimizers]
    for _ in range(epochs):
        for part in torch.randperm(len(train.words)).split(N)[: len(train.words) // N]:
            start = time.process_time()
            value = contender.objective(model.head, model.hidden(train.words[part]), train.labels[part])
            for optimizer in optimizers:
                optimizer.zero_grad()
            value.backward()
            for optimizer in optimizers:
                optimizer.step()
            seconds.append(time.process_time() - start)
            for scheduler in schedulers:
                scheduler.step()
    return model.eval(), seconds


@torch.no_grad()
def precision(model: Model, ranking: Loss, documents: Documents) -> dict[int, float]:
    """The share of true labels among the first k."""
    best: TopK = model.head.topk(model.hidden(documents.words), max(FIRST), ranking)
    right = (best.classes.unsqueeze(2) == documents.labels.unsqueeze(1)).any(2).float()
    return {k: float(right[:, :k].mean()) for k in FIRST}


def measured(
    corpus: Corpus, sizes: tuple[int, int, int], epochs: int, rates: tuple[float, ...] = RATES
) -> list[dict[str, Any]]:
    train, valid, test = (corpus.draw(n) for n in sizes)
    rows = []
    for contender in contenders():
        models = {rate: trained(contender, corpus, train, rate, epochs) for rate in rates}
        best = max(rates, key=lambda rate: sum(precision(models[rate][0], contender.ranking, valid).values()))
        model, seconds = models[best]
        row = {
            "loss": contender.name,
            "head": contender.Kind.__name__,
            "rate": best,
            "precision": {str(k): p for k, p in precision(model, contender.ranking, test).items()},
            "seconds": statistics.median(seconds),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [
            row["loss"],
            f"`{row['head']}`",
            f"{row['rate']:g}",
            *(f"{row['precision'][str(k)]:.1%}" for k in FIRST),
            readable(row["seconds"]),
        ]
        for row in rows
    ]
    return Table("Several true classes", HEADER, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Precision of the first k labels, beside sigmoid cross-entropy.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training documents")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = measured(Corpus(), (12_000, 1_000, 3_000), options.epochs)
    (RESULTS / "labels.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(table(rows))


if __name__ == "__main__":
    main()
