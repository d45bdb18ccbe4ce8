"""The heads against what people use today, and how the step of the factored head grows with D, N and d."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss import FactoredHead, FactoredSGD, GramHead, TaylorSoftmaxLoss
from spherical_loss.benchmarks import peers
from spherical_loss.benchmarks.timing import RESULTS, Work, interleaved, matmul_rate, peak_memory, readable, show

Row = dict[str, Any]

WORD_MODEL = (250, 300, 793_471)  # N, d, and the vocabulary of One Billion Word
FACTORED_LR = 1_000.0  # of 1,000 .. 100,000, where the loss of these batches falls furthest in 400 steps


def batches(N: int, d: int, D: int, seed: int = 0, count: int = 16) -> Any:
    """Hidden vectors as after rectifiers, and targets as frequent as words are; made beforehand, then repeated for ever."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        hidden = (0.3 + 0.5 * torch.randn(N, d, generator=generator)).relu()
        u = torch.rand(N, generator=generator, dtype=torch.float64)
        target = (torch.exp(u * math.log(D + 1)).long() - 1).clamp_(0, D - 1)
        made.append((hidden.requires_grad_(), target))
    return itertools.cycle(made)


def all_gram() -> list[Row]:
    return [*gram(8192, 768, 50_257, 3, goal=20), *gram(2048, 512, 50_257, 4, goal=6)]


def gram(N: int, d: int, D: int, repeats: int, goal: float) -> list[Row]:
    """Forward and backward of GramHead, against the exact ways with logits."""
    torch.manual_seed(0)
    head, loss = GramHead(d, D, bias=False), TaylorSoftmaxLoss()
    hidden, weight, target = torch.randn(N, d, requires_grad=True), head.weight, torch.randint(D, (N,))

    def forward_backward(value: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        value().backward()

    ours = "GramHead + TaylorSoftmaxLoss"
    work: dict[str, Work] = {
        ours: lambda: forward_backward(lambda: loss(head(hidden, target))),
        "F.linear + F.cross_entropy": lambda: forward_backward(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        work["F.linear_cross_entropy"] = lambda: forward_backward(lambda: F.linear_cross_entropy(hidden, weight, target))
    times = interleaved(work, repeats, warmup=0)
    memory = {ours: peak_memory(work[ours]) / (4 * N * D)}
    rows, table = [], []
    for name, t in times.items():
        ratio = t.median / times[ours].median
        rows.append({"N": N, "d": d, "D": D, "name": name, "seconds": t, "ratio": ratio, "memory": memory.get(name)})
        table.append([name, readable(t.median), f"{ratio:.1f}x", f"{memory[name]:.1%}" if name in memory else ""])
    title = f"Heads at N={N:,}, d={d}, D={D:,}, forward + backward (to reach: {goal:g}x, memory 10%)"
    show(title, ["", "median", "of GramHead's time", "peak memory / logits"], table)
    return rows


class FactoredStep:
    """A training step of the factored head."""

    def __init__(self, N: int, d: int, D: int, lr: float = FACTORED_LR) -> None:
        self.head = FactoredHead(d, D, init="zero")
        for rows in self.head.V.split(2**18):  # memory that was never written would be paid for in the steps
            rows.fill_(0)
        self.optimizer, self.loss, self.batches = FactoredSGD(self.head, lr), TaylorSoftmaxLoss(), batches(N, d, D)

    def __call__(self) -> None:
        hidden, target = next(self.batches)
        self.optimizer.zero_grad()
        self.loss(self.head(hidden, target)).backward()
        self.optimizer.step()


def factored() -> list[Row]:
    """A training step against its peers, one of them in memory at a time."""
    torch.manual_seed(0)
    N, d, D = WORD_MODEL
    ours = FactoredStep(N, d, D)
    rows = [
        against(ours, "sampled softmax, 1,024 negatives", "approximation", peers.sampled_softmax(d, D, 1024), 200, 1.0),
        against(ours, "nn.AdaptiveLogSoftmaxWithLoss", "another model", peers.adaptive_softmax(d, D), 10, 30.0),
        against(ours, "dense + cross-entropy + SGD", "exact", peers.dense_softmax(d, D), 4, 1000.0),
    ]
    table = [
        [r["name"], r["kind"], readable(r["seconds"].median), readable(r["ours"]), f"{r['ratio']:,.2f}x", f"{r['goal']:,.0f}x"]
        for r in rows
    ]
    title = f"FactoredHead at N={N}, d={d}, D={D:,}: a training step against its peers"
    show(title, ["", "", "peer", "ours", "ratio", "to reach"], table)
    seconds = statistics.median(r["ours"] for r in rows)
    flops, rate = step_flops(N, d), matmul_rate()
    efficiency = flops / rate / seconds
    print(f"  {flops / 1e6:.0f} million operations a step: {efficiency:.0%} of {rate / 1e9:.0f} GFLOP/s")
    limit = {"name": "limit", "flops": flops, "rate": rate, "efficiency": efficiency}
    return [*rows, limit, {"name": "refactoring", **refactoring(ours)}]


def against(ours: FactoredStep, name: str, kind: str, step: peers.Step, repeats: int, goal: float) -> Row:
    """A slow peer takes turns with several of our steps, each timed by itself."""
    data = batches(*WORD_MODEL, seed=1)
    turns = 1 if repeats >= 100 else 100  # half a second: what a step of gigabytes leaves behind is not ours
    times = interleaved({name: lambda: step(*next(data)), "ours": ours}, repeats, turns={"ours": turns})
    mine = times["ours"].median
    return {"name": name, "kind": kind, "seconds": times[name], "ours": mine, "ratio": times[name].median / mine, "goal": goal}


def step_flops(N: int, d: int) -> float:
    """Products of a step with N > d / 2: six of N d^2 (as if all targets were distinct), two of d^3."""
    return 12 * N * d**2 + 4 * d**3


def refactoring(step: FactoredStep, most: int = 20_000) -> Row:
    """The share of the time that refactoring takes, from one to the next with all the frames in between.

    The next one comes by itself, or is made after ``most`` steps.
    """
    head = step.head
    head.refactor()
    seconds: list[float] = []
    frames = 0
    while len(seconds) < most and len(head.past) >= frames:
        frames = len(head.past)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    by_itself = len(head.past) < frames
    if not by_itself:
        start = time.perf_counter()
        head.refactor()
        seconds.append(time.perf_counter() - start)
    duration, steps, share = seconds[-1], len(seconds), seconds[-1] / sum(seconds)
    how = "by itself" if by_itself else "not due yet"
    print(
        f"  refactoring took {duration:.2g} s after {steps:,} steps ({how}) at lr={FACTORED_LR:g}: {share:.2%} (to reach: 10%)"
    )
    mean = sum(seconds[:-1]) / (steps - 1)
    return {"duration": duration, "steps": steps, "share": share, "by_itself": by_itself, "mean_step": mean}


SWEEPS = {"D": [10**4, 10**5, 10**6, 10**7], "N": [16, 64, 256, 1024, 4096], "d": [64, 128, 256, 512, 1024]}
BASE = {"N": 250, "d": 300, "D": 100_000}


def growth(results: Path = RESULTS) -> list[Row]:
    """Step time against D, N and d, with the fitted exponents; the picture goes to ``results``."""
    rows = [row for name, values in SWEEPS.items() for row in sweep(name, values)]
    draw(rows, {D: dense_seconds(D) for D in (10**4, 10**5, 10**6)}, results / "step_time.svg")
    return rows


def sweep(name: str, values: list[int]) -> list[Row]:
    steps: dict[str, Work] = {str(value): FactoredStep(**{**BASE, name: value}) for value in values}
    times = {int(value): t.median for value, t in interleaved(steps, repeats=100, warmup=20).items()}
    exponent = statistics.linear_regression([math.log(v) for v in times], [math.log(t) for t in times.values()]).slope
    title = f"FactoredHead: step time against {name} ({others(name)}); fitted exponent {exponent:.2f}"
    least = min(times.values())
    show(title, [name, "median", "of the least"], [[f"{v:,}", readable(t), f"{t / least:.2f}x"] for v, t in times.items()])
    if name == "D":
        print("  to reach: within 1.15x")
    return [{"sweep": name, **BASE, name: v, "seconds": t, "exponent": exponent} for v, t in times.items()]


def others(name: str) -> str:
    return ", ".join(f"{k}={v:,}" for k, v in BASE.items() if k != name)


def dense_seconds(D: int) -> float:
    step, data = peers.dense_softmax(300, D), batches(250, 300, D)
    return interleaved({"dense": lambda: step(*next(data))}, repeats=3)["dense"].median


def draw(rows: list[Row], dense: dict[int, float], path: Path) -> None:
    """Step time against D, N and d, log-log, and beside the first the dense step."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), SWEEPS, strict=True):
        found = [row for row in rows if row["sweep"] == name]
        label = f"FactoredHead, exponent {found[0]['exponent']:.2f}"
        axes.loglog([row[name] for row in found], [1e3 * row["seconds"] for row in found], "o-", color="#2f6fc1", label=label)
        if name == "D":
            times = [1e3 * t for t in dense.values()]
            axes.loglog(list(dense), times, "o-", color="#c1662f", label="dense + cross-entropy + SGD")
            axes.set_ylabel("milliseconds per exact training step")
        axes.set(xlabel=name, title=others(name))
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "spherical-loss"}):  # the same figures, the same file
        figure.savefig(path, metadata={"Date": None})
    print(f"  picture: {path}")
