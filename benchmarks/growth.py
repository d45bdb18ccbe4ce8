"""How the step of the factored head grows with D, N and d, beside the dense step against D."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.steps import FactoredStep, Row, batches
from benchmarks.timing import Spread, Work, interleaved, time_cells
from spherical_loss.experiments.table import Table, show

SWEEPS = {"D": [10**4, 10**5, 10**6, 10**7], "N": [16, 64, 256, 1024, 4096], "d": [64, 128, 256, 512, 1024]}
BASE = {"N": 250, "d": 300, "D": 100_000}
DENSE = (10**4, 10**5, 10**6)
OURS_COLOR, DENSE_COLOR = "#2f6fc1", "#c1662f"


def run(quick: bool = False) -> list[Row]:
    """Step time against D, N and d, with the fitted exponents, and of the dense step; if ``quick``, against D up to 10^6."""
    if quick:
        return sweep("D", SWEEPS["D"][:-1], repeats=30)
    rows = [row for name, values in SWEEPS.items() for row in sweep(name, values)]
    return [*rows, *({"sweep": "dense", **BASE, "D": D, "seconds": dense_seconds(D)} for D in DENSE)]


def sweep(name: str, values: list[int], repeats: int = 100) -> list[Row]:
    steps: dict[str, Work] = {str(value): FactoredStep(**{**BASE, name: value}) for value in values}
    times = {int(value): t.spread for value, t in interleaved(steps, repeats, warmup=repeats // 5).items()}
    exponent = statistics.linear_regression([math.log(v) for v in times], [math.log(t.median) for t in times.values()]).slope
    title = f"FactoredHead: step time against {name} ({others(name)}); fitted exponent {exponent:.2f}"
    least = min(t.median for t in times.values())
    table = [[f"{v:,}", *time_cells(t), f"{t.median / least:.2f}x"] for v, t in times.items()]
    show(Table(title, [name, "median", "quartiles", "of the least"], table))
    return [{"sweep": name, **BASE, name: v, "seconds": t, "exponent": exponent} for v, t in times.items()]


def others(name: str) -> str:
    return ", ".join(f"{k}={v:,}" for k, v in BASE.items() if k != name)


def dense_seconds(D: int) -> Spread:
    step, data = peers.dense_softmax(BASE["d"], D), batches(BASE["N"], BASE["d"], D)
    return interleaved({"dense": lambda: step(*next(data))}, repeats=3)["dense"].spread


def draw(rows: list[Row], results: Path) -> None:
    """From the stored rows: step_time.svg, the step against D beside the dense one, and growth.svg, against N and d."""
    import matplotlib
    from matplotlib.figure import Figure

    from spherical_loss.experiments.report.any_page import STYLE, write

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.5), layout="constrained")
        axes = figure.add_subplot(title=f"An exact training step, {others('D')}")
        plot(axes, rows, "dense", "dense layer + cross-entropy + SGD", DENSE_COLOR)
        plot(axes, rows, "D", "FactoredHead + FactoredSGD", OURS_COLOR)
        axes.set(xlabel="number of classes D", ylabel="milliseconds")
        write(figure, results / "step_time.svg")
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        for axes, name in zip(figure.subplots(1, 2, sharey=True), ("N", "d"), strict=True):
            plot(axes, rows, name, f"exponent {exponent_of(rows, name):.2f}", OURS_COLOR)
            axes.set(xlabel=f"{name} ({others(name)})", ylabel="milliseconds per step" if name == "N" else None)
        write(figure, results / "growth.svg")


def exponent_of(rows: list[Row], name: str) -> float:
    return next(row["exponent"] for row in rows if row["sweep"] == name)


def plot(axes: Any, rows: list[Row], name: str, label: str, color: str) -> None:
    from spherical_loss.experiments.report.any_page import plain_log_ticks

    found = [(row["D" if name == "dense" else name], 1e3 * row["seconds"][0]) for row in rows if row["sweep"] == name]
    values, times = zip(*found, strict=True)
    axes.loglog(values, times, "o-", color=color, label=label)
    plain_log_ticks(axes, values)
    axes.grid(visible=True)
    axes.legend(loc="upper left" if name in ("N", "d") else "center right")  # where no line is
