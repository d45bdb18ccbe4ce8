"""Approximate search of the best classes, beside the exact one: ``python -m benchmarks.search``; some minutes.

"Tuned" is for a recall of 95% of the exact ten best classes, on some hidden vectors; the recall is measured on others. Times
are ratios to ``head.topk``, in turns (A B A B ...), of the processor time of one thread. The figures go to results/search.json,
and ``python -m benchmarks.publish`` writes them into the documentation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import faiss
import torch
from torch import Tensor, nn

from benchmarks.timing import RESULTS, ratio_cells, spread
from spherical_loss import DenseHead, FactoredHead, FactoredSGD, FaissIndex, Head, TaylorSoftmaxLoss
from spherical_loss.experiments.table import Table, show
from spherical_loss.heads import TopK
from spherical_loss.learning_rate import suggested_lr

D, d, K = 200_000, 64, 10
RECALL = 0.95
INDEXES: dict[str, tuple[str | None, bool]] = {  # the factory, and whether it is tuned
    "default": (None, False),
    "default, tuned": (None, True),
    "IVF1024,Flat, 32 of the clusters": ("IVF1024,Flat", False),
    "IVF1024,Flat, tuned": ("IVF1024,Flat", True),
}
HEADER = [
    "rows",
    "index",
    "bytes of a row",
    "candidates",
    "clusters",
    "recall",
    "one query",
    "quartiles",
    "64 queries",
    "quartiles",
]


class Rows(NamedTuple):
    name: str
    head: Head
    tuning: Tensor
    queries: Tensor


def random_rows() -> Rows:
    """Nothing to find: the hardest case."""
    return Rows("random", DenseHead(d, D), torch.randn(256, d), torch.randn(256, d))


def trained_rows(steps: int = 2_000, N: int = 256) -> Rows:
    """Classes of Zipf's frequencies, each with a code of its own; an example is a noisy code. Trained by the Taylor softmax."""
    frequencies, codes = 1 / torch.arange(1.0, D + 1), torch.randn(D, 32)
    trunk = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, d), nn.LayerNorm(d))
    head, loss = FactoredHead(d, D, init="zero"), TaylorSoftmaxLoss()
    head.set_bias(loss.prior_bias(frequencies))
    optimizers = torch.optim.AdamW(trunk.parameters(), lr=1e-3), FactoredSGD(head, suggested_lr(head, loss, N, noise=None))

    def examples(n: int) -> tuple[Tensor, Tensor]:
        target = torch.multinomial(frequencies, n, replacement=True)
        return trunk(codes[target] + 0.3 * torch.randn(n, 32)), target

    for _ in range(steps):
        value = loss(head(*examples(N)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
    head.refactor()
    hidden, target = examples(512)
    right = (head.eval().topk(hidden, 1, loss).classes[:, 0] == target).float().mean()
    print(f"trained head: {right:.0%} of its first classes are right")
    return Rows("trained", head, *hidden.detach().split(256))


def measured(rows: Rows, repeats: int) -> list[dict[str, Any]]:
    loss, found = TaylorSoftmaxLoss(), []
    for name, (factory, tuned) in INDEXES.items():
        index = FaissIndex(rows.head, factory)
        if tuned:
            index.tune(rows.tuning, K, loss, RECALL)
        clusters = faiss.try_extract_index_ivf(index.index)
        row: dict[str, Any] = {
            "rows": rows.name,
            "index": name,
            "bytes": len(faiss.serialize_index(index.index)) / D,
            "candidates": index.candidates,
            "nprobe": None if clusters is None else clusters.nprobe,
            "recall": index.recall(rows.queries, K, loss),
        }
        for n in (1, 64):
            queries = rows.queries[:n]
            times = [(seconds(rows.head.topk, queries, K, loss), seconds(index.topk, queries, K, loss)) for _ in range(repeats)]
            row[f"ratio {n}"] = spread([exact / ours for exact, ours in times[1:]])  # without the first, which warms up
        found.append(row)
    return found


def seconds(search: Callable[..., TopK], *arguments: Any) -> float:
    """Of the processor, which does not count what other processes do."""
    start = time.process_time()
    search(*arguments)
    return time.process_time() - start


def table(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [
            row["rows"],
            row["index"],
            f"{row['bytes']:.0f}",
            f"{row['candidates']}",
            "-" if row["nprobe"] is None else f"{row['nprobe']}",
            f"{row['recall']:.1%}",
            *(cell for n in (1, 64) for cell in ratio_cells(row[f"ratio {n}"])),
        ]
        for row in rows
    ]
    return Table(f"The {K} best of {D:,} classes, d={d}", HEADER, cells)


def main(repeats: int = 16) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for make in (random_rows, trained_rows):
        rows += measured(make(), repeats)
        (RESULTS / "search.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(table(rows))


if __name__ == "__main__":
    main()
