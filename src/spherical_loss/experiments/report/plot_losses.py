"""Draw the losses and their gradients: ``python -m spherical_loss.experiments.report.plot_losses docs/losses.svg``.

One example with ten classes: the output of the target varies, the nine others stay fixed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from spherical_loss import (
    AbsSoftmaxLoss,
    Loss,
    SoftmaxBoundLoss,
    SoftmaxLoss,
    SphericalSoftmaxLoss,
    SquaredErrorLoss,
    TaylorSoftmaxLoss,
    ZLoss,
)
from spherical_loss.experiments.report.any_page import GREY, STYLE, write

OTHERS = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)  # the outputs of the other classes
LOSSES: dict[str, tuple[Loss, str, str]] = {  # label -> loss, colour (none relies on red against green), line style
    "log-softmax": (SoftmaxLoss(reduction="none"), "#8a8a8a", "-"),
    "log-softmax of |o|": (AbsSoftmaxLoss(reduction="none"), "#8a8a8a", ":"),
    "upper bound of log-softmax": (SoftmaxBoundLoss(reduction="none"), "#c9a000", "--"),
    "log-Taylor softmax": (TaylorSoftmaxLoss(reduction="none"), "#d55e00", "-"),
    "log-spherical softmax, $\\epsilon$ = 0.1": (SphericalSoftmaxLoss(0.1, reduction="none"), "#0072b2", "-"),
    "squared error": (SquaredErrorLoss(reduction="none"), "#cc79a7", "--"),
    "Z-loss, a = 1, b = 2": (ZLoss(1.0, 2.0, reduction="none"), "#009e73", "-."),
}


def curve(loss: Loss, o_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and its derivative in the target's output, at each ``o_c``."""
    moving = o_c.clone().requires_grad_()
    o = torch.cat([moving.unsqueeze(1), OTHERS.expand(len(o_c), -1)], dim=1)
    losses = loss(o, torch.zeros(len(o_c), dtype=torch.long))
    (slopes,) = torch.autograd.grad(losses.sum(), moving)
    return losses.detach(), slopes


def draw(path: Path) -> None:
    """Write the picture; the same bytes every time."""
    o_c = torch.linspace(-6.0, 6.0, 601, dtype=torch.float64)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.6, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for label, (loss, colour, line) in LOSSES.items():
            values, slopes = curve(loss, o_c)
            left.plot(o_c, values, line, color=colour, linewidth=1.8, label=label)
            right.plot(o_c, slopes, line, color=colour, linewidth=1.8)
        left.set(title="loss", ylim=(-0.2, 7.5))
        right.set(title="gradient in the target's output", ylim=(-3.2, 3.2))
        for axes in (left, right):
            axes.set(xlim=(-6, 6), xlabel="output of the target, $o_c$\n(the other nine from $-1$ to $1$)")
            axes.axhline(0, color=GREY, linewidth=0.6)
            axes.axvline(0, color=GREY, linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=2, columnspacing=3)
        write(figure, path)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("give one file to write, for example docs/losses.svg")
    draw(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
