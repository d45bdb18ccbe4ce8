"""AdaptiveSphericalSoftmax: a training step beside its peers, its growth with D, and scoring, in tokens per second."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.side_by_side import QUICK_SECONDS, SECONDS, against
from benchmarks.steps import WORD_MODEL, Row, Step, batches
from benchmarks.timing import in_fresh_process, interleaved, ratio_cells, readable
from spherical_loss import AdaptiveSphericalSoftmax, FactoredHead, FactoredSGD, TaylorSoftmaxLoss
from spherical_loss.experiments.models.softmax_heads import AdaptiveSoftmax
from spherical_loss.experiments.table import Table, show
from spherical_loss.learning_rate import suggested_lr

FREQUENT = (100, 500, 2_000)  # three softmaxes and one tail
OURS = "AdaptiveSphericalSoftmax"
PEERS: dict[str, tuple[str, Callable[[int, int], Step]]] = {
    "dense + cross-entropy + SGD": ("exact", peers.dense_softmax),
    "nn.AdaptiveLogSoftmaxWithLoss": ("another model", peers.adaptive_softmax),
    "sampled softmax, 1,024 negatives": ("approximation", lambda d, D: peers.sampled_softmax(d, D, 1024)),
}
CLASSES = (10**4, 10**5, 10**6)  # of the sweep


class AdaptiveStep:
    """A training step: forward pass, backward pass, SGD of the softmax and exact SGD of the tail."""

    def __init__(self, N: int, d: int, D: int) -> None:
        self.layer = started(d, D)
        self.layer.train()
        square = next(batches(N, d, D))[0].square().sum(1).mean().item()
        tail = self.layer.tail
        lr = suggested_lr(tail, self.layer.loss, N, square)
        self.optimizers = torch.optim.SGD(self.layer.parameters(), lr=0.1), FactoredSGD(tail, lr)
        self.batches = batches(N, d, D)

    def __call__(self) -> None:
        hidden, target = next(self.batches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.layer(hidden, target).loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


def started(d: int, D: int) -> AdaptiveSphericalSoftmax:
    layer = AdaptiveSphericalSoftmax(d, D, FREQUENT)
    for rows in layer.tail.V.split(2**18):  # write the memory once: otherwise its page faults would count in the steps
        rows.mul_(1)
    return layer.eval()


def steps(N: int, d: int, D: int, seconds: float) -> list[Row]:
    """The layer beside each of its peers, in turns, in a process of its own."""
    same = {"N": N, "d": d, "D": D}
    return [
        {"part": "step", "name": name, "kind": kind, **same, **in_fresh_process(beside, name, N, d, D, seconds)}
        for name, (kind, _) in PEERS.items()
    ]


def beside(name: str, N: int, d: int, D: int, seconds: float) -> Row:
    ours, (_, make) = AdaptiveStep(N, d, D), PEERS[name]
    for _ in range(3):
        ours()
    return against(ours, make(d, D), batches(N, d, D, seed=1, count=4), seconds)


def growth(N: int, d: int, classes: tuple[int, ...], repeats: int) -> list[Row]:
    """The step against D."""
    times = interleaved({str(D): AdaptiveStep(N, d, D) for D in classes}, repeats, warmup=repeats // 5)
    return [{"part": "growth", "N": N, "d": d, "D": int(D), "seconds": t.spread} for D, t in times.items()]


def scores(N: int, d: int, D: int, seconds: float) -> list[Row]:
    """Log-probabilities of N targets under each model, each exact; ours and each of the others in turns."""
    layer, family, data = started(d, D), family_scorer(d, D), batches(N, d, D)

    def ours() -> Tensor:
        hidden, target = next(data)
        with torch.no_grad():
            return layer.log_prob(hidden, target)

    rows = []
    makers: dict[str, Callable[[int, int], Step]] = {
        "dense log_softmax": dense_scorer,
        "nn.AdaptiveLogSoftmaxWithLoss": adaptive_scorer,
        "TaylorSoftmaxLoss of FactoredHead": lambda d, D: family,
    }
    for name, make in makers.items():
        found = against(ours, make(d, D), batches(N, d, D, seed=1, count=4), seconds)
        rows.append({"part": "scores", "name": name, "N": N, "d": d, "D": D, **found})
        gc.collect()
    return rows


def dense_scorer(d: int, D: int) -> Step:
    linear = nn.Linear(d, D)

    @torch.no_grad()
    def score(hidden: Tensor, target: Tensor) -> Tensor:
        return F.log_softmax(linear(hidden), 1).gather(1, target.unsqueeze(1))

    return score


def adaptive_scorer(d: int, D: int) -> Step:
    layer = AdaptiveSoftmax(d, D).eval()

    @torch.no_grad()
    def score(hidden: Tensor, target: Tensor) -> Tensor:
        return layer.log_prob(hidden, target)

    return score


def family_scorer(d: int, D: int) -> Step:
    """The plain family: the loss of the statistics is the exact negative log-likelihood."""
    head, loss = FactoredHead(d, D, init="zero").eval(), TaylorSoftmaxLoss(reduction="none")

    @torch.no_grad()
    def score(hidden: Tensor, target: Tensor) -> Tensor:
        return -loss(head(hidden, target))

    return score


def run(
    quick: bool = False, size: tuple[int, int, int] = WORD_MODEL, classes: tuple[int, ...] = CLASSES, seconds: float = SECONDS
) -> list[Row]:
    """The step beside its peers only, if ``quick``."""
    N, d, D = size
    stepped = steps(N, d, D, QUICK_SECONDS if quick else seconds)
    title = f"{OURS}, a training step: N={N:,}, d={d}, D={D:,}, softmaxes up to {FREQUENT}"
    header = ["instead of", "", "takes", "ours", "ratio", "quartiles"]
    show(Table(title, header, [[r["name"], r["kind"], *cells(r)] for r in stepped]))
    if quick:
        return stepped
    grown = growth(N, d, classes, repeats=max(5, min(60, int(10 * seconds))))
    least = min(r["seconds"].median for r in grown)
    table = [[f"{r['D']:,}", readable(r["seconds"].median), f"{r['seconds'].median / least:.2f}x"] for r in grown]
    show(Table(f"{OURS}, a training step against D", ["D", "median", "of the least"], table))
    scored = scores(N, d, D, seconds)
    table = [[r["name"], *cells(r), *(f"{N / r[key].median:,.0f}" for key in ("seconds", "ours"))] for r in scored]
    header = ["", "takes", "ours", "ratio", "quartiles", "tokens per second", "ours"]
    show(Table(f"Scores of {N:,} targets: d={d}, D={D:,}; {OURS} beside others", header, table))
    return [*stepped, *grown, *scored]


def cells(row: Row) -> list[str]:
    return [readable(row["seconds"].median), readable(row["ours"].median), *ratio_cells(row["ratio"])]
