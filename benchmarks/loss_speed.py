"""TaylorSoftmaxLoss against what people use: forward and backward pass in float32, with a memory copy as the limit.

The peers: F.cross_entropy, eager and compiled, the losses of the package entmax, and a Taylor softmax written with torch
operations, as a reader of the paper would write it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import Work, in_fresh_process, interleaved, peak_memory, ratio_cells, time_cells
from spherical_loss import TaylorSoftmaxLoss
from spherical_loss.experiments.table import Table, show

REFERENCE = "F.cross_entropy"
# N, D, rounds, those of the other peers, and calls in a row in a round. At the largest size a loss of entmax takes 15 seconds.
# At the others several calls make a turn, as in torch.utils.benchmark and in a training, and one more leads them that is not
# timed: it finds the memory given back to the system by the contender before, and pays for its page faults.
SIZES = [(4096, 50_000, 7, 2, 1), (250, 10_000, 20, 6, 10), (2048, 1_000, 20, 6, 10), (200, 10, 40, 20, 100)]
TARGETS = {(4096, 50_000): (2.5, 5.0), (250, 10_000): (2.0, None), (2048, 1_000): (1.2, None), (200, 10): (1 / 1.5, None)}


def naive_taylor_softmax(o: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    numerators = 1 + o + o**2 / 2
    probabilities = numerators / numerators.sum(1, keepdim=True)
    return -probabilities.gather(1, target.unsqueeze(1)).log().mean()


def compiled_cross_entropy() -> Any:
    """``F.cross_entropy`` compiled, or None if torch finds no compiler."""
    compiled = torch.compile(F.cross_entropy)
    try:
        compiled(torch.zeros(2, 3), torch.tensor([0, 1]))
    except Exception as error:  # torch raises any error of its back end
        print(f"  F.cross_entropy compiled: left out, torch.compile failed ({type(error).__name__})")
        return None
    return compiled


def entmax_losses() -> dict[str, Any]:
    """Sparse alternatives to the softmax, of the extra ``bench``."""
    try:
        import entmax
    except ImportError:
        print("  entmax: left out, not installed; pip install entmax")
        return {}
    losses = {"entmax.sparsemax_loss": entmax.sparsemax_loss, "entmax.entmax15_loss": entmax.entmax15_loss}
    return {name: partial(mean_of, loss) for name, loss in losses.items()}


def mean_of(loss: Any, o: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss(o, target).mean()


def contenders(N: int, D: int) -> tuple[list[dict[str, Work]], torch.Tensor]:
    """Two rounds, each with F.cross_entropy as its reference: one for ours, and one for the other peers, some of which need ten
    times the memory of the logits and would disturb the caches and pages of ours."""
    torch.manual_seed(0)
    o = torch.randn(N, D, requires_grad=True)
    target, copy, logits = torch.randint(D, (N,)), torch.empty(N, D), o.detach()
    taylor, overwriting = TaylorSoftmaxLoss(), TaylorSoftmaxLoss(overwrite_logits=True)

    def forward_backward(loss: Any, o: torch.Tensor) -> None:
        loss(o, target).backward()
        o.grad = None  # freed here, so that the gradient counts as memory of this run

    spare = torch.randn(N, D, requires_grad=True)  # overwritten
    reference: dict[str, Work] = {REFERENCE: lambda: forward_backward(F.cross_entropy, o)}
    ours: dict[str, Work] = {
        "F.cross_entropy(1.5*o)": lambda: forward_backward(lambda o, target: F.cross_entropy(1.5 * o, target), o),
        "TaylorSoftmaxLoss": lambda: forward_backward(taylor, o),
        "TaylorSoftmaxLoss(overwrite_logits=True)": lambda: forward_backward(overwriting, spare),
        "memory copy": lambda: copy.copy_(logits),
    }
    compiled = compiled_cross_entropy()
    losses = {"F.cross_entropy, compiled": compiled} if compiled else {}
    losses |= {"naive Taylor softmax": naive_taylor_softmax, **entmax_losses()}
    others: dict[str, Work] = {name: partial(forward_backward, loss, o) for name, loss in losses.items()}
    return [reference | ours, reference | others], logits


def compare(N: int, D: int, repeats: int, peer_repeats: int, in_a_row: int) -> list[dict[str, Any]]:
    rounds, logits = contenders(N, D)
    rows: list[dict[str, Any]] = []
    table: list[list[str]] = []
    for work, count in zip(rounds, (repeats, peer_repeats), strict=True):
        if count == 0:
            continue
        times = interleaved(work, count, turns=dict.fromkeys(work, in_a_row), leads=int(in_a_row > 1))
        for name in times:
            if name == REFERENCE and rows:
                continue
            t, speed = times[name].spread, times[REFERENCE].over(times[name])
            large = logits.nbytes > 2**24  # smaller amounts cannot be measured
            memory = peak_memory(work[name], warm=True) / logits.nbytes if large else None
            rows.append({"N": N, "D": D, "name": name, "seconds": t, "speed": speed, "memory": memory})
            share = "" if memory is None else f"{memory:.2f}"
            table.append([name, *time_cells(t), *ratio_cells(speed), share])
    goal, goal_overwriting = TARGETS[N, D]
    goals = f"to reach: {goal:.2f}x" + (f", overwriting {goal_overwriting:.1f}x" if goal_overwriting else "")
    header = ["", "median", "quartiles", "speed", "quartiles", "memory beyond the logits, of theirs"]
    show(Table(f"Losses at N={N:,}, D={D:,}, forward + backward ({goals})", header, table))
    return rows


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Each size in a process of its own; without the other peers' round if ``quick``."""
    sizes = [(N, D, max(3, repeats // 3), 0, in_a_row) for N, D, repeats, _, in_a_row in SIZES] if quick else SIZES
    return [row for size in sizes for row in in_fresh_process(compare, *size)]
