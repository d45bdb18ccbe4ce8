"""The leverages of a trained layer: how the family spends the capacity that the bound leaves it, by the rank of the words.

``python -m benchmarks.quality.leverages`` trains the Taylor softmax with tiers on the 10,000 most frequent words of the IMDB
reviews (about two minutes), ``python -m benchmarks.publish`` writes the table into the docs. Needs the
data of the task ``imdb``.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.quality.training import BLOCK, HIDDEN, Session, Training, corpus
from benchmarks.timing import RESULTS
from spherical_loss import TaylorSoftmaxLoss
from spherical_loss.capacity import leverages
from spherical_loss.experiments.table import Table, show

TRAINING = Training("10,000", "Taylor, tiers", seed=1, steps=4_000, lr=0.003, output_lr=10.0)
CONTEXTS = 20_000  # of the test set
RANKS = (0, 10, 100, 1_000, 10_000)


def measured(training: Training, contexts: int) -> list[dict[str, Any]]:
    """The leverages and the largest probabilities of the words between these ranks."""
    torch.set_num_threads(1)
    session = Session(training)
    for _ in tqdm(range(training.steps), "training"):
        session.step()
    linear = session.model.layer.head.to_linear()  # type: ignore[union-attr,operator]
    leverage = leverages(linear.weight.detach(), linear.bias.detach())
    largest = largest_probabilities(session, linear, contexts)
    return [
        {"from": a, "to": b, "leverage": float(leverage[a:b].sum()), "largest": float(largest[a:b].sum())}
        for a, b in itertools.pairwise(rank for rank in RANKS if rank <= len(leverage))
    ]


@torch.no_grad()
def largest_probabilities(session: Session, linear: nn.Linear, contexts: int) -> Tensor:
    """Of every word, in any of so many contexts of the test set, (D,)."""
    data, largest = corpus(session.vocabulary).test, torch.zeros(linear.out_features)
    contexts = min(contexts, len(data))
    for rows in (torch.arange(contexts) * len(data) // contexts).split(BLOCK):
        p = TaylorSoftmaxLoss().probabilities(linear(session.model.hidden(data.batch(rows)[0])))
        largest = torch.maximum(largest, p.amax(0))
    return largest


def table(rows: list[dict[str, Any]]) -> Table:
    cells = [[f"{row['from'] + 1:,} to {row['to']:,}", f"{row['leverage']:.1f}", f"{row['largest']:.1f}"] for row in rows]
    total = [f"{sum(row[key] for row in rows):.1f}" for key in ("leverage", "largest")]
    title = f"{TRAINING.vocabulary} words, d = {HIDDEN}, {TRAINING.contender}, {TRAINING.steps:,} steps"
    header = ["rank of the words", "sum of leverages", f"sum of the largest probabilities in {CONTEXTS:,} contexts"]
    return Table(title, header, [*cells, ["all", *total]])


def main() -> None:
    rows = measured(TRAINING, CONTEXTS)
    (RESULTS / "leverages.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(table(rows))


if __name__ == "__main__":
    main()
