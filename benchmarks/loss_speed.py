"""TaylorSoftmaxLoss against what people use: forward and backward pass in float32, with a memory copy as the limit.

The peers: F.cross_entropy, eager and compiled, the losses of the package entmax, and a Taylor softmax written with torch
operations, as a reader of the paper would write it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.timing import Times, Work, in_fresh_process, interleaved, peak_memory, pooled, ratio_cells, time_cells
from spherical_loss import TaylorSoftmaxLoss
from spherical_loss.experiments.table import Table, show

REFERENCE = "F.cross_entropy"
OURS = ("TaylorSoftmaxLoss", "TaylorSoftmaxLoss(overwrite_logits=True)")


class Size(NamedTuple):
    """How a size is measured: how many calls make a turn, in how many processes and rounds, and the same for the peers.

    Several calls make a turn, as in torch.utils.benchmark and in a training. One more leads them that is not timed: it finds
    the memory given back to the system by the contender before, and pays for its page faults. Whether the calls after it pay,
    too, depends on the heap: at 2,048 x 1,000 F.cross_entropy takes 1.1 ms in some and 5 in others, in one process more often
    than in another. So only several processes with several rounds tell what is usual.
    """

    N: int
    D: int
    calls: int
    processes: int
    rounds: int
    peer_processes: int
    peer_rounds: int


SIZES = [  # at the largest one a loss of entmax takes 10 to 25 seconds
    Size(4096, 50_000, 3, 3, 2, 1, 2),
    Size(250, 10_000, 10, 12, 10, 3, 2),
    Size(2048, 1_000, 10, 12, 10, 3, 2),
    Size(128, 1_000, 50, 4, 10, 2, 5),
    Size(200, 10, 100, 4, 10, 2, 10),
]
SMALL_GOAL = (1 / 1.5, None)  # where time is that of the calls
TARGETS = {
    (4096, 50_000): (2.5, 5.0),
    (250, 10_000): (2.0, None),
    (2048, 1_000): (1.2, None),
    (128, 1_000): SMALL_GOAL,
    (200, 10): SMALL_GOAL,
}


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


def contenders(N: int, D: int, peers: bool) -> tuple[dict[str, Work], int]:
    """F.cross_entropy, the reference, and either ours or all others, some of which need ten times the memory of the logits and
    would disturb the caches and pages of ours; and the bytes of the logits."""
    torch.manual_seed(0)
    o = torch.randn(N, D, requires_grad=True)
    target = torch.randint(D, (N,))

    def forward_backward(loss: Any, o: torch.Tensor) -> None:
        loss(o, target).backward()
        o.grad = None  # freed here, so that the gradient counts as memory of this run

    work: dict[str, Work] = {REFERENCE: lambda: forward_backward(F.cross_entropy, o)}
    if peers:
        copy, logits, compiled = torch.empty(N, D), o.detach(), compiled_cross_entropy()
        losses = {"F.cross_entropy(1.5*o)": lambda o, target: F.cross_entropy(1.5 * o, target)}
        losses |= {"F.cross_entropy, compiled": compiled} if compiled else {}
        losses |= {"naive Taylor softmax": naive_taylor_softmax, **entmax_losses()}
        work |= {name: partial(forward_backward, loss, o) for name, loss in losses.items()}
        work["memory copy"] = lambda: copy.copy_(logits)
    else:
        spare = torch.randn(N, D, requires_grad=True)  # overwritten
        plain, overwriting = (partial(forward_backward, TaylorSoftmaxLoss(overwrite_logits=yes)) for yes in (False, True))
        work |= {OURS[0]: lambda: plain(o), OURS[1]: lambda: overwriting(spare)}
    return work, 4 * N * D


def measured(size: Size, peers: bool, rounds: int) -> tuple[dict[str, Times], dict[str, float]]:
    """Times of the contenders in this process, and their memory as a share of the logits."""
    work, logits = contenders(size.N, size.D, peers)
    large = logits > 2**24  # smaller amounts cannot be measured
    turns = {name: 1 if large and name.startswith("entmax") else size.calls for name in work}
    times = interleaved(work, rounds, warmup=int(not large), turns=turns, leads=1)
    return times, {name: peak_memory(run, warm=True) / logits for name, run in work.items()} if large else {}


def compare(size: Size, quick: bool = False) -> list[dict[str, Any]]:
    """The rows of a size: ours, and the others unless ``quick``, each in rounds with F.cross_entropy."""
    groups = [(False, max(1, size.processes // 2) if quick else size.processes, size.rounds)]
    groups += [] if quick else [(True, size.peer_processes, size.peer_rounds)]
    rows: list[dict[str, Any]] = []
    table: list[list[str]] = []
    for peers, processes, rounds in groups:
        found = [in_fresh_process(measured, size, peers, rounds) for _ in range(processes)]
        memory, times = found[0][1], {name: pooled([times[name] for times, _ in found]) for name in found[0][0]}
        for name in times:
            if name == REFERENCE and rows:
                continue
            t, speed = times[name].spread, times[REFERENCE].over(times[name])
            row = {"N": size.N, "D": size.D, "name": name, "seconds": t, "speed": speed, "memory": memory.get(name)}
            rows.append(row)
            share = "" if row["memory"] is None else f"{row['memory']:.2f}"
            table.append([name, *time_cells(t), *ratio_cells(speed), share])
    goal, goal_overwriting = TARGETS[size.N, size.D]
    goals = f"to reach: {goal:.2f}x" + (f", overwriting {goal_overwriting:.1f}x" if goal_overwriting else "")
    header = ["", "median", "quartiles", "speed", "quartiles", "memory beyond the logits, of theirs"]
    show(Table(f"Losses at N={size.N:,}, D={size.D:,}, forward + backward ({goals})", header, table))
    return rows


def run(quick: bool = False) -> list[dict[str, Any]]:
    """All sizes; in half as many processes, and without the other peers, if ``quick``."""
    return [row for size in SIZES for row in compare(size, quick)]
