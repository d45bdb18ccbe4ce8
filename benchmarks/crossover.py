"""The number of classes from which a head is the fastest: ``python -m benchmarks.crossover``.

A training step of each head (forward, backward, SGD), interleaved (A B C A B C ...), for growing D. The figures go to
results/crossover.json, and ``python -m benchmarks.publish`` writes them into the documentation.
"""

from __future__ import annotations

import argparse
import json
import math

import torch

from benchmarks.steps import FactoredStep, Row, batches, learning_rate, parameter_step
from benchmarks.timing import RESULTS, Work, interleaved, readable
from spherical_loss import DenseHead, GramHead
from spherical_loss.experiments.table import Table, show
from spherical_loss.heads.dense import ParameterHead

SIZES = [(N, d) for N in (250, 2048) for d in (64, 128, 256, 512)]
CLASSES = [250 * 2**k for k in range(10)]  # up to 128,000
NAMES = {"dense": "DenseHead", "gram": "GramHead", "factored": "FactoredHead"}
PAIRS = [("dense", "gram"), ("dense", "factored"), ("gram", "factored")]
CLEAR = 3.0  # once the factored head is this many times faster than both others, a larger D tells nothing new


def measure(N: int, d: int, D: int, repeats: int) -> Row:
    def on_batches(head: ParameterHead) -> Work:
        step, data = parameter_step(head, learning_rate(d, D)), batches(N, d, D)
        return lambda: step(*next(data))

    steps: dict[str, Work] = {
        "dense": on_batches(DenseHead(d, D, init="zero")),
        "gram": on_batches(GramHead(d, D, init="zero")),
        "factored": FactoredStep(N, d, D),
    }
    times = {name: t.spread for name, t in interleaved(steps, repeats, warmup=2).items()}
    return {"threads": torch.get_num_threads(), "N": N, "d": d, "D": D, **times}


def sweep(N: int, d: int, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for D in CLASSES:
        row = measure(N, d, D, repeats)
        rows.append(row)
        if min(row["dense"].median, row["gram"].median) > CLEAR * row["factored"].median:
            break
    cells = [[f"{r['D']:,}", *(readable(r[name].median) for name in NAMES)] for r in rows]
    show(Table(f"A training step at N={N:,}, d={d}", ["D", *NAMES.values()], cells))
    return rows


def crossover(rows: list[Row], slow: str, fast: str) -> float | None:
    """The D from which ``fast`` is faster than ``slow``, interpolated between two measured D on log scales.

    0 if it is faster at every measured D, None if it is slower at the largest.
    """
    gains = [(math.log(row["D"]), math.log(row[slow][0] / row[fast][0])) for row in rows]
    behind = [i for i, (_, gain) in enumerate(gains) if gain <= 0]
    if not behind:
        return 0.0
    if behind[-1] == len(gains) - 1:
        return None
    (x0, y0), (x1, y1) = gains[behind[-1] : behind[-1] + 2]
    return math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0))


def two_digits(D: float | None) -> str:
    """D, with two digits: more would be noise."""
    if D is None:
        return "none measured"
    if D == 0:
        return "any D"
    digits = 1 - math.floor(math.log10(D))
    return f"{round(D, digits):,.0f}"


def by_size(rows: list[Row]) -> dict[tuple[int, int], list[Row]]:
    sizes: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        sizes.setdefault((row["N"], row["d"]), []).append(row)
    return sizes


HEADER = ["N", "d", *(f"{NAMES[fast]} beats {NAMES[slow]} from D =" for slow, fast in PAIRS), "largest D measured"]


def table(rows: list[Row]) -> Table:
    cells = [
        [f"{N:,}", str(d), *(two_digits(crossover(part, *pair)) for pair in PAIRS), f"{part[-1]['D']:,}"]
        for (N, d), part in by_size(rows).items()
    ]
    return Table("Crossovers", HEADER, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="The number of classes from which a head is the fastest.")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each step, of which the median counts")
    repeats: int = parser.parse_args().repeats
    rows: list[Row] = []
    for N, d in SIZES:
        rows += sweep(N, d, repeats)
        (RESULTS / "crossover.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(table(rows))


if __name__ == "__main__":
    main()
