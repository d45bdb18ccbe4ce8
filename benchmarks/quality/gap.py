"""Where the adaptive spherical softmax and the sampled softmax differ: the nats of each, by the rank of the words.

``-log p(c | h) = -log P(k | h) - log p(c | k, h)`` for a word c of the range of ranks k, under the exact distribution of either
layer. ``python -m benchmarks.quality.gap`` trains both once more with all words of the IMDB reviews, at the rates and for the
steps of the study (five minutes and more, on two cores), and measures them on the validation set; ``python -m
benchmarks.publish`` writes the table into the docs. Needs the data of the task ``imdb``.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.contenders import Likelihood
from benchmarks.quality.training import BLOCK, Model, Session, Training, corpus
from benchmarks.timing import RESULTS
from spherical_loss.experiments.data.corpora import TextSet
from spherical_loss.experiments.table import Table, show

VOCABULARY = "all"
OURS, OTHER = "adaptive spherical softmax, Taylor", "sampled softmax"
SEED = 0  # none of those of the study
RANGES = (100, 500, 2_000, 8_000, 32_000)  # of ranks
WORDS = 10_000  # of the validation set, evenly spaced


def measured(training: Training, count: int) -> list[dict[str, Any]]:
    """The nats of a trained layer in each range of ranks: which range it is, and which word of it."""
    torch.set_num_threads(1)
    session = Session(training)
    for _ in range(training.steps):
        session.step()
    return nats_by_rank(session.model, corpus(training.vocabulary).valid, RANGES, count)


@torch.no_grad()
def nats_by_rank(model: Model, data: TextSet, cutoffs: tuple[int, ...], count: int) -> list[dict[str, Any]]:
    """Sums over the words of the range, divided by the number of all words: all of them add up to the loss."""
    assert isinstance(model.layer, Likelihood)
    model.eval()
    log_prob = model.layer.log_probabilities()
    bounds, count = [0, *(cut for cut in cutoffs if cut < data.D), data.D], min(count, len(data))
    words, range_nats, word_nats = (torch.zeros(len(bounds) - 1, dtype=torch.float64) for _ in range(3))
    for rows in (torch.arange(count) * len(data) // count).split(BLOCK):
        contexts, target = data.batch(rows)
        log_p = log_prob(model.hidden(contexts)).double()
        of_ranges = torch.stack([log_p[:, a:b].logsumexp(1) for a, b in itertools.pairwise(bounds)], 1)
        k = torch.bucketize(target, torch.tensor(bounds[1:-1]), right=True)
        of_range, of_target = (picked(x, i) for x, i in ((of_ranges, k), (log_p, target)))
        words.index_add_(0, k, torch.ones_like(of_range))
        range_nats.index_add_(0, k, -of_range)
        word_nats.index_add_(0, k, of_range - of_target)
    parts = zip(itertools.pairwise(bounds), *((x / count).tolist() for x in (words, range_nats, word_nats)), strict=True)
    return [{"from": a, "to": b, "share": n, "range": r, "word": w} for (a, b), n, r, w in parts]


def picked(x: Tensor, columns: Tensor) -> Tensor:
    """One column of each row."""
    return x.gather(1, columns.unsqueeze(1)).squeeze(1)


def as_in_study(study: dict[str, Any], contender: str) -> Training:
    """The training of the study, with another seed."""
    run = next(run for run in study[VOCABULARY]["runs"] if run["contender"] == contender)
    return Training(VOCABULARY, contender, SEED, run["steps"], run["lr"], run["output_lr"])


def table(found: dict[str, list[dict[str, Any]]]) -> Table:
    header = [
        "rank of the words",
        "of the text",
        "which range: ours",
        "sampled",
        "which word of it: ours",
        "sampled",
        "difference",
    ]
    rows = []
    for ours, other in zip(found[OURS], found[OTHER], strict=True):
        nats = [ours["range"], other["range"], ours["word"], other["word"]]
        rows.append([f"{ours['from'] + 1:,} to {ours['to']:,}", f"{ours['share']:.1%}", *map(three, nats), difference(nats)])
    total = [sum(row[key] for row in found[name]) for key in ("range", "word") for name in (OURS, OTHER)]
    return Table("", header, [*rows, ["all", "", *map(three, total), difference(total)]])


def three(nats: float) -> str:
    return f"{nats:.3f}"


def difference(nats: list[float]) -> str:
    """Ours and the other's, for the range and for the word: what ours has more.

    >>> difference([1.0, 0.9, 2.0, 2.05])
    '+0.050'
    """
    return f"{nats[0] - nats[1] + nats[2] - nats[3]:+.3f}"


def main() -> None:
    study = json.loads((RESULTS / "quality-time.json").read_text())
    trainings = [as_in_study(study, name) for name in (OURS, OTHER)]
    corpus(VOCABULARY)  # encoded once
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = dict(zip((OURS, OTHER), pool.map(measured, trainings, [WORDS] * 2), strict=True))
    (RESULTS / "quality-gap.json").write_text(json.dumps(found, indent=1) + "\n")
    show(table(found))


if __name__ == "__main__":
    main()
