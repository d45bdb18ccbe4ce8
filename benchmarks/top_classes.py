"""``topk`` of the heads beside the matrix product it needs: the most probable classes of many examples, as in an evaluation."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from benchmarks.steps import FactoredStep, Row, batches
from benchmarks.timing import Work, interleaved, ratio_cells, readable
from spherical_loss import DenseHead, TaylorSoftmaxLoss
from spherical_loss.experiments.table import Table, show

Size = tuple[int, int, int]

SIZE: Size = (10_000, 300, 115_517)  # N, d, and the words of the IMDB reviews that occur twice
QUICK_N = 2_000
K = 10
TRAINED = 100  # steps of the factored head before it is asked, half of them in an earlier frame
PRODUCT = 2**22  # outputs of the product that are computed at once: its result is never kept


def product(H: Tensor, W: Tensor) -> Work:
    """All outputs ``H W^T``, in pieces that share their memory."""
    rows = max(1, PRODUCT // len(H))
    out = torch.empty(len(H), min(rows, len(W)))

    def run() -> None:
        for part in W.split(rows):
            torch.mm(H, part.T, out=out[:, : len(part)])

    return run


def run(quick: bool = False, size: Size = SIZE, repeats: int = 5) -> list[Row]:
    """How many times longer than the product ``topk`` takes, in turns."""
    N, d, D = (QUICK_N, *size[1:]) if quick else size
    loss, hidden = TaylorSoftmaxLoss(), torch.cat([h.detach() for h, _ in itertools.islice(batches(N, d, D, count=1), 1)])
    step = FactoredStep(250, d, D)
    for n in range(TRAINED):
        step()
        if n == TRAINED // 2:
            step.head.close_frame()
    dense, factored = DenseHead.from_linear(step.head.to_linear()), step.head
    work: dict[str, Work] = {
        "product": product(hidden, dense.weight.detach()),
        "DenseHead": lambda: dense.topk(hidden, K, loss),
        "FactoredHead": lambda: factored.topk(hidden, K, loss),
    }
    times = interleaved(work, repeats)
    needed = times.pop("product")
    found = [
        {"N": N, "d": d, "D": D, "k": K, "name": name, "product": needed.spread, "seconds": t.spread, "ratio": t.over(needed)}
        for name, t in times.items()
    ]
    show(table(found))
    return found


def table(rows: list[Row]) -> Table:
    N, d, D, k = (rows[0][key] for key in ("N", "d", "D", "k"))
    cells = [
        [f"`{r['name']}.topk`", readable(r["seconds"][0]), readable(r["product"][0]), *ratio_cells(r["ratio"])] for r in rows
    ]
    title = f"The {k} most probable classes: N={N:,}, d={d}, D={D:,}"
    return Table(title, ["", "takes", "the product alone", "ratio", "quartiles"], cells)
