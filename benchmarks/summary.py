"""The goals of the heads and what was measured, in one table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gram_step import limit
from benchmarks.language_step import PART_NAMES
from benchmarks.steps import WORD_MODEL
from benchmarks.timing import factor, ratio_cells
from spherical_loss.experiments.table import Table, show

Line = tuple[str, str, str, str]

GRAM_SHARE = 0.9  # of the limit by operations
FACTORED_GOALS = {
    "dense + cross-entropy + SGD": 1000.0,
    "nn.AdaptiveLogSoftmaxWithLoss": 30.0,
    "sampled softmax, 1,024 negatives": 1.0,
}
ADAPTIVE_GOALS = {  # by part and peer
    ("step", "dense + cross-entropy + SGD"): 500.0,
    ("step", "nn.AdaptiveLogSoftmaxWithLoss"): 20.0,
    ("step", "sampled softmax, 1,024 negatives"): 1 / 1.3,
    ("scores", "dense log_softmax"): 300.0,
}
TIERS = 2.2  # times the step of one head, at most
TOPK = 1.3  # times the matrix product, at most
MEMORY, GROWTH, REFACTORING = 0.1, 1.15, 0.1


def print_summary(measured: dict[str, Any]) -> None:
    if lines := list(summary(measured)):
        show(Table("All ratios of the heads", ["", "measured", "quartiles", "to reach"], lines))


def summary(measured: dict[str, Any]) -> Iterator[Line]:
    for row in measured.get("gram", []):
        size = f"N={row['N']:,}, d={row['d']}, D={row['D']:,}"
        if row["memory"] is not None:
            yield (
                f"GramHead's memory beyond weights and gradient, of the logits ({size})",
                f"{row['memory']:.1%}",
                "",
                f"{MEMORY:.0%} at most",
            )
        else:
            goal = GRAM_SHARE * limit(row["N"], row["d"], row["D"])
            yield f"{row['name']} / GramHead ({size})", *ratio_cells(row["ratio"]), f"{factor(goal)}x"
    for row in measured.get("side-by-side", []):
        if row["size"] == "word model" and row["name"] in FACTORED_GOALS and row["ratio"] is not None:
            size, goal = f"N={row['N']}, d={row['d']}, D={row['D']:,}", FACTORED_GOALS[row["name"]]
            yield f"{row['name']} / FactoredHead ({size})", *ratio_cells(row["ratio"]), f"{goal:,g}x"
    for row in measured.get("adaptive", []):
        if (compared := (row["part"], row.get("name"))) in ADAPTIVE_GOALS:
            size, what = f"N={row['N']}, d={row['d']}, D={row['D']:,}", "" if row["part"] == "step" else ", scores"
            reach = f"{ADAPTIVE_GOALS[compared]:.3g}x"
            yield f"{row['name']} / AdaptiveSphericalSoftmax{what} ({size})", *ratio_cells(row["ratio"]), reach
    for row in measured.get("tiers", []):
        if row["part"] == "step":
            size = f"N={row['N']}, d={row['d']}, D={row['D']:,}"
            yield f"TieredHead, {row['cuts']} / FactoredHead ({size})", *ratio_cells(row["ratio"]), f"{TIERS}x at most"
    yield from slowest("TieredHead", {r["D"]: r["seconds"][0] for r in measured.get("tiers", []) if r["part"] == "growth"})
    for row in measured.get("topk", []):
        size = f"N={row['N']:,}, d={row['d']}, D={row['D']:,}"
        yield f"{row['name']}.topk / the product of all outputs ({size})", *ratio_cells(row["ratio"]), f"{TOPK}x at most"
    for row in measured.get("refactoring", []):
        N, d, D = WORD_MODEL
        what = f"share of the time for refactoring (N={N}, d={d}, D={D:,})"
        yield what, f"{row['share']:.1%}", "", f"{REFACTORING:.0%} at most"
    yield from slowest("FactoredHead", {r["D"]: r["seconds"][0] for r in measured.get("growth", []) if r["sweep"] == "D"})
    for row in measured.get("language", []):
        part = PART_NAMES[row["part"]]
        size = f"N={row['N']}, d={row['d']}, D={row['D']:,}"
        yield f"language model, {part}: dense softmax / factored ({size})", *ratio_cells(row["ratio"]), f"{row['goal']:g}x"


def slowest(head: str, by_D: dict[int, float]) -> Iterator[Line]:
    if by_D:
        spread = max(by_D.values()) / min(by_D.values())
        yield f"{head}: slowest / fastest step, D={min(by_D):,} to {max(by_D):,}", f"{spread:.2f}x", "", f"{GROWTH}x at most"
