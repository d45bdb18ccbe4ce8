"""Whole training steps of large output layers, ours and what people use instead, at three sizes: time and peak memory.

Every contender does a forward pass, a backward pass and an SGD step from hidden vectors that need a gradient. Each peer takes
turns with ours, in a process of its own: page faults depend on what a process has freed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers
from benchmarks.steps import WORD_MODEL, FactoredStep, Row, Step, batches, parameter_step, step_flops
from benchmarks.timing import (
    Spread,
    Work,
    available,
    copy_rate,
    in_fresh_process,
    interleaved,
    matmul_rate,
    peak_memory,
    ratio_cells,
    time_cells,
)
from spherical_loss import GramHead
from spherical_loss.experiments.table import Table, show

Size = tuple[int, int, int]

SIZES: dict[str, Size] = {  # N, d, D
    "word model": WORD_MODEL,
    "GPT-2-sized head": (8192, 768, 50_257),
    "item catalogue": (1024, 128, 3_000_000),
}
SECONDS, QUICK_SECONDS = 5.0, 3.0  # about, for a peer's repetitions
TURN, SLOW = 0.02, 0.5  # seconds

CONTENDERS: dict[str, tuple[str, Callable[[int, int], Step]]] = {
    "GramHead + Taylor softmax + SGD": ("exact", lambda d, D: parameter_step(GramHead(d, D), 0.1)),
    "dense + cross-entropy + SGD": ("exact", peers.dense_softmax),
    "F.linear_cross_entropy + SGD": ("exact", peers.fused_softmax),
    "nn.AdaptiveLogSoftmaxWithLoss": ("another model", peers.adaptive_softmax),
    "sampled softmax, 1,024 negatives": ("approximation", lambda d, D: peers.sampled_softmax(d, D, 1024)),
    "sampled softmax, 8,192 negatives": ("approximation", lambda d, D: peers.sampled_softmax(d, D, 8192)),
    "noise-contrastive estimation, 1,024": ("approximation", lambda d, D: peers.noise_contrastive(d, D, 1024)),
}


FEW = ("dense + cross-entropy + SGD", "nn.AdaptiveLogSoftmaxWithLoss", "sampled softmax, 1,024 negatives")


def needed(name: str, N: int, d: int, D: int) -> int:
    """The fewest bytes that a contender needs: weights and their gradient, and, if it has logits, three times those.

    The three are the logits, their log-softmax, which the backward pass needs, and the gradient. F.linear_cross_entropy of
    torch 2.13 needs them, too, on the CPU: its peak memory is that of the dense layer.
    """
    logits = 3 * N * D if name.startswith(("dense", "F.linear_cross_entropy")) else 0
    return 4 * (2 * d * D + logits)


def compared(size: str, N: int, d: int, D: int, seconds: float = SECONDS, names: Collection[str] = CONTENDERS) -> list[Row]:
    """Each peer in turns with ours, in a process of its own."""
    same = {"size": size, "N": N, "d": d, "D": D}
    rows: list[Row] = []
    for name in names:
        row = {**same, "name": name, "kind": CONTENDERS[name][0], "seconds": None, "ratio": None, "memory": None}
        if (need := needed(name, N, d, D)) > available():
            row["memory"] = need - 4 * d * D
        elif not name.startswith("F.linear_cross") or hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
            row |= in_fresh_process(beside, name, N, d, D, seconds)
        rows.append(row)
    own = in_fresh_process(limits, N, d, D, rows)
    return [{**same, "name": "FactoredHead + Taylor softmax", "kind": "exact", **own}, *rows]


def beside(name: str, N: int, d: int, D: int, seconds: float) -> Row:
    torch.manual_seed(0)
    ours, (_, make) = started(N, d, D), CONTENDERS[name]
    return against(ours, make(d, D), batches(N, d, D, seed=1, count=4), seconds)


def started(N: int, d: int, D: int) -> FactoredStep:
    step = FactoredStep(N, d, D)
    for _ in range(3):
        step()
    return step


def against(ours: Work, step: Step, data: Iterator[tuple[Tensor, Tensor]], seconds: float) -> Row:
    """A peer in turns with ours, for about ``seconds``.

    In a training a step follows the same step. So a turn lasts ``TURN`` at least, several steps of a quick contender, and one
    more leads it that is not timed: it finds the caches as the other has left them. Alternating single steps would charge each
    with the caches of the other, and a short step most. Turns of a peer that takes longer than ``SLOW`` have no lead.
    """

    def peer() -> None:
        step(*next(data))

    first = interleaved({"peer": peer, "ours": ours}, repeats=1, warmup=0)
    slow, quick = first["peer"].spread.median, first["ours"].spread.median
    turns = {"peer": calls(slow, TURN), "ours": calls(quick, max(TURN, slow / 4))}
    leads = int(slow < SLOW)
    repeats = max(3, min(200, int(seconds / (slow * (turns["peer"] + leads)))))
    times = interleaved({"peer": peer, "ours": ours}, repeats, warmup=0, turns=turns, leads=leads)
    return {
        "seconds": times["peer"].spread,
        "ours": times["ours"].spread,
        "ratio": times["peer"].over(times["ours"]),
        "memory": peak_memory(peer, warm=True),
    }


def calls(seconds: float, turn: float) -> int:
    """How many calls make a turn.

    >>> calls(0.003, 0.02), calls(3.0, 0.02), calls(1e-6, 0.02)
    (7, 1, 100)
    """
    return min(100, math.ceil(turn / seconds))


def limits(N: int, d: int, D: int, rows: list[Row]) -> Row:
    """Our own row: the median over all turns, and how far it is from the limits of the machine."""
    spread = sorted((row["ours"] for row in rows if row["seconds"] is not None), key=lambda t: t.median)
    time = spread[len(spread) // 2]
    flops, moved = step_flops(N, d), step_bytes(N, d)
    return {
        "seconds": time,
        "ratio": Spread(1.0, 1.0, 1.0),
        "memory": peak_memory(started(N, d, D), warm=True),
        "of_matmul": flops / matmul_rate() / time.median,
        "of_copy": moved / copy_rate() / time.median,
    }


def step_bytes(N: int, d: int) -> float:
    """Bytes that a step must read or write at least: N rows of V, N x d vectors; three matrices for Q, one only read; E; F."""
    return 4 * (2 * 3 * N * d + (2 + 2 + 1 + 2 + 2) * d * d)


def run(quick: bool = False) -> list[Row]:
    """The word model beside the three peers that people would use, if ``quick``."""
    rows = []
    for size, (N, d, D) in list(SIZES.items())[: 1 if quick else None]:
        found = compared(size, N, d, D, QUICK_SECONDS, FEW) if quick else compared(size, N, d, D)
        rows += found
        title = f"A training step, {size}: N={N:,}, d={d}, D={D:,}"
        header = ["", "", "median", "quartiles", "of ours", "quartiles", "memory beyond the weights"]
        show(Table(title, header, [cells(row) for row in found]))
        print(
            f"  ours: {found[0]['of_matmul']:.0%} of the time would be matrix products at the speed of a large one of torch, ",
            end="",
        )
        print(f"{found[0]['of_copy']:.0%} memory traffic at the speed of a copy")
    return rows


def cells(row: Row) -> list[str]:
    memory = "" if row["memory"] is None else f"{row['memory'] / 1e6:,.0f} MB"
    if row["seconds"] is None:
        why = "does not fit" if row["memory"] else "needs a newer torch"
        return [row["name"], row["kind"], why, "", "", "", memory]
    return [row["name"], row["kind"], *time_cells(row["seconds"]), *ratio_cells(row["ratio"]), memory]
