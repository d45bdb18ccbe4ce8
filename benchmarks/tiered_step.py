"""TieredHead: a training step with four tiers beside that of one factored head, and its growth with D."""

from __future__ import annotations

from benchmarks.steps import WORD_MODEL, FactoredStep, Row, batches
from benchmarks.timing import Work, interleaved, ratio_cells, readable
from spherical_loss import TaylorSoftmaxLoss, TieredHead, TieredSGD, suggested_lr
from spherical_loss.experiments.table import Table, show

CUTS = (100, 1_000, 5_000)  # the same for every D: the first tier is small and dense, the others are factored
CLASSES = (10**4, 10**5, 10**6, 10**7)  # of the sweep
AUTOMATIC = "automatic cuts"


class TieredStep:
    """A training step: forward pass, backward pass and exact SGD of all tiers."""

    def __init__(self, N: int, d: int, D: int, cuts: tuple[int, ...] | None = CUTS) -> None:
        self.loss, self.batches = TaylorSoftmaxLoss(), batches(N, d, D)
        self.head = TieredHead(d, D, init="zero", cuts=cuts)
        for tier, _ in self.head.spans:
            for rows in tier.V.split(2**18):  # write the memory once: otherwise its page faults would count in the steps
                rows.fill_(0)
        square = next(self.batches)[0].square().sum(1).mean().item()
        self.optimizer = TieredSGD(self.head, suggested_lr(self.head, self.loss, N, square))

    def __call__(self) -> None:
        hidden, target = next(self.batches)
        self.optimizer.zero_grad()
        self.loss(self.head(hidden, target)).backward()
        self.optimizer.step()


def beside_one_head(N: int, d: int, D: int, repeats: int) -> list[Row]:
    """How many times longer a step with tiers takes than one of a single head, in turns."""
    work: dict[str, Work] = {
        "one head": FactoredStep(N, d, D),
        **{name_of(cuts): TieredStep(N, d, D, cuts) for cuts in (CUTS, None)},
    }
    times = interleaved(work, repeats, warmup=repeats // 5)
    one = times.pop("one head")
    return [
        {"part": "step", "N": N, "d": d, "D": D, "cuts": name, "one": one.spread, "seconds": t.spread, "ratio": t.over(one)}
        for name, t in times.items()
    ]


def name_of(cuts: tuple[int, ...] | None) -> str:
    return AUTOMATIC if cuts is None else f"cuts {cuts}"


def growth(N: int, d: int, classes: tuple[int, ...], repeats: int) -> list[Row]:
    times = interleaved({str(D): TieredStep(N, d, D) for D in classes}, repeats, warmup=repeats // 5)
    return [{"part": "growth", "N": N, "d": d, "D": int(D), "seconds": t.spread} for D, t in times.items()]


def run(
    quick: bool = False,
    size: tuple[int, int, int] = WORD_MODEL,
    classes: tuple[int, ...] = CLASSES,
    repeats: int = 100,
) -> list[Row]:
    """The step beside that of one head only, if ``quick``."""
    N, d, D = size
    rows = beside_one_head(N, d, D, repeats // 3 if quick else repeats)
    table = [[r["cuts"], readable(r["seconds"].median), readable(r["one"].median), *ratio_cells(r["ratio"])] for r in rows]
    header = ["four tiers", "take", "one head", "ratio", "quartiles"]
    show(Table(f"TieredHead, a training step: N={N:,}, d={d}, D={D:,}", header, table))
    if quick:
        return rows
    grown = growth(N, d, classes, repeats)
    least = min(r["seconds"].median for r in grown)
    table = [[f"{r['D']:,}", readable(r["seconds"].median), f"{r['seconds'].median / least:.2f}x"] for r in grown]
    show(Table(f"TieredHead, a training step against D, {name_of(CUTS)}", ["D", "median", "of the least"], table))
    return [*rows, *grown]
