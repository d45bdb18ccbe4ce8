"""How the step of the factored head grows with D, N and d."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks import peers
from benchmarks.steps import FactoredStep, Row, batches
from benchmarks.timing import RESULTS, Work, interleaved, time_cells
from spherical_loss.experiments.table import Table, show

SWEEPS = {"D": [10**4, 10**5, 10**6, 10**7], "N": [16, 64, 256, 1024, 4096], "d": [64, 128, 256, 512, 1024]}
BASE = {"N": 250, "d": 300, "D": 100_000}


def run(results: Path = RESULTS) -> list[Row]:
    """Step time against D, N and d, with the fitted exponents; the picture goes to ``results``."""
    rows = [row for name, values in SWEEPS.items() for row in sweep(name, values)]
    draw(rows, {D: dense_seconds(D) for D in (10**4, 10**5, 10**6)}, results / "step_time.svg")
    return rows


def sweep(name: str, values: list[int]) -> list[Row]:
    steps: dict[str, Work] = {str(value): FactoredStep(**{**BASE, name: value}) for value in values}
    times = {int(value): t.spread for value, t in interleaved(steps, repeats=100, warmup=20).items()}
    exponent = statistics.linear_regression([math.log(v) for v in times], [math.log(t.median) for t in times.values()]).slope
    title = f"FactoredHead: step time against {name} ({others(name)}); fitted exponent {exponent:.2f}"
    least = min(t.median for t in times.values())
    table = [[f"{v:,}", *time_cells(t), f"{t.median / least:.2f}x"] for v, t in times.items()]
    show(Table(title, [name, "median", "quartiles", "of the least"], table))
    return [{"sweep": name, **BASE, name: v, "seconds": t, "exponent": exponent} for v, t in times.items()]


def others(name: str) -> str:
    return ", ".join(f"{k}={v:,}" for k, v in BASE.items() if k != name)


def dense_seconds(D: int) -> float:
    step, data = peers.dense_softmax(BASE["d"], D), batches(BASE["N"], BASE["d"], D)
    return interleaved({"dense": lambda: step(*next(data))}, repeats=3)["dense"].spread.median


def draw(rows: list[Row], dense: dict[int, float], path: Path) -> None:
    """Step time against D, N and d on log-log axes, and the dense step against D."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), SWEEPS, strict=True):
        found = [row for row in rows if row["sweep"] == name]
        label = f"FactoredHead, exponent {found[0]['exponent']:.2f}"
        axes.loglog(
            [row[name] for row in found], [1e3 * row["seconds"].median for row in found], "o-", color="#2f6fc1", label=label
        )
        if name == "D":
            times = [1e3 * t for t in dense.values()]
            axes.loglog(list(dense), times, "o-", color="#c1662f", label="dense + cross-entropy + SGD")
            axes.set_ylabel("milliseconds per exact training step")
        axes.set(xlabel=name, title=others(name))
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "spherical-loss"}):  # the same figures give the same file
        figure.savefig(path, metadata={"Date": None})
    print(f"  picture: {path}")
