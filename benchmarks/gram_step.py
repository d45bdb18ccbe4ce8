"""Forward and backward pass of the Gram head, against exact losses on logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.steps import Row
from benchmarks.timing import Work, factor, interleaved, peak_memory, ratio_cells, readable
from spherical_loss import GramHead, TaylorSoftmaxLoss
from spherical_loss.experiments.table import Table, show


def limit(N: int, d: int, D: int) -> float:
    """How many times fewer operations than the logits take: 6 N d D for the logits, their gradient and that of the weights;
    3 D d^2 + 4 N d^2 for the Gram matrix and its products with the weights and the hidden vectors.

    >>> round(limit(8192, 768, 50_257), 1)
    17.5
    """
    return 6 * N * d * D / (3 * D * d**2 + 4 * N * d**2)


def run(quick: bool = False) -> list[Row]:
    smaller = compared(2048, 512, 50_257, 3 if quick else 7)
    return smaller if quick else [*compared(8192, 768, 50_257, 3), *smaller]


def compared(N: int, d: int, D: int, repeats: int) -> list[Row]:
    torch.manual_seed(0)
    head, loss = GramHead(d, D, bias=False), TaylorSoftmaxLoss()
    hidden, weight, target = torch.randn(N, d, requires_grad=True), head.weight, torch.randint(D, (N,))

    def forward_backward(value: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None  # freed here, so that the gradient does not count: the memory beyond it is measured
        value().backward()

    ours = "GramHead + TaylorSoftmaxLoss"
    work: dict[str, Work] = {
        ours: lambda: forward_backward(lambda: loss(head(hidden, target))),
        "F.linear + F.cross_entropy": lambda: forward_backward(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        work["F.linear_cross_entropy"] = lambda: forward_backward(lambda: F.linear_cross_entropy(hidden, weight, target))
    work[ours]()  # only ours: the others take 15 seconds, so their warm-up would not be visible
    times = interleaved(work, repeats, warmup=0)
    memory = {ours: peak_memory(work[ours], warm=True) / (4 * N * D)}
    rows, table = [], []
    for name in times:
        t, ratio = times[name].spread, times[name].over(times[ours])
        rows.append({"N": N, "d": d, "D": D, "name": name, "seconds": t, "ratio": ratio, "memory": memory.get(name)})
        table.append([name, readable(t.median), *ratio_cells(ratio), f"{memory[name]:.1%}" if name in memory else ""])
    title = f"Heads at N={N:,}, d={d}, D={D:,}, forward + backward; by operations, {factor(limit(N, d, D))}x at most"
    header = ["", "median", "of GramHead's time", "quartiles", "memory beyond weights and gradient, of the logits"]
    show(Table(title, header, table))
    return rows
