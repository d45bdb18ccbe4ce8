"""The language model at the full vocabulary of the IMDB reviews: a training step with the factored head, and with softmax."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Work, interleaved, ratio_cells, readable
from spherical_loss import Loss, SoftmaxLoss, TaylorSoftmaxLoss
from spherical_loss.experiments.models.language_model import HEADS, LanguageModel, language_optimizer, suggested_rates
from spherical_loss.experiments.table import Table, show
from spherical_loss.experiments.training.settings import LanguageSettings
from spherical_loss.experiments.training.tasks import RATES

N, D = 250, 115_517
OUTPUT_GOAL, STEP_GOAL = 50.0, 10.0
TURNS = 20  # of our steps for each step of the slow one, each timed separately
PART_NAMES = {"output": "output layer", "whole": "whole step"}


class Step:
    """Training steps of the whole model, or of its output layer alone, on words as frequent as words are."""

    def __init__(self, name: str, loss: Loss, head: str, width: int) -> None:
        rates = RATES[name]
        settings = LanguageSettings(lr=rates["lr"], output_rate=rates.get("output_rate"), layers=1, width=width)
        self.network, self.loss = LanguageModel(D, settings, partial(HEADS[head], init="zero")), loss
        frequencies = 1 / torch.arange(1.0, D + 1)
        self.network.head.set_bias(loss.prior_bias(frequencies))
        self.network.suggested_rates = suggested_rates(self.network.head, loss, N)
        self.optimizer = language_optimizer(self.network, settings)
        generator = torch.Generator().manual_seed(0)
        words = torch.multinomial(frequencies, N * 8 * 7, replacement=True, generator=generator).reshape(8, N, 7)
        self.words = words
        self.hidden = (0.3 + 0.5 * torch.randn(8, N, width, generator=generator)).relu()
        self.steps = 0

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts, hidden vectors (for the output layer alone) and targets."""
        k = self.steps % 8
        self.steps += 1
        return self.words[k, :, :6], self.hidden[k], self.words[k, :, 6]

    def whole(self) -> None:
        x, _, target = self.batch()
        self.optimizer.zero_grad()
        self.network.objective(x, target, self.loss).backward()
        self.optimizer.step()

    def output(self) -> None:
        """Forward pass, backward pass and step of the output layer; the trunk gets no gradient and does not change."""
        _, hidden, target = self.batch()
        hidden = hidden.detach().requires_grad_()
        self.optimizer.zero_grad()
        head = self.network.head
        (
            self.loss(head.logits(hidden), target) if isinstance(self.loss, SoftmaxLoss) else self.loss(head(hidden, target))
        ).backward()
        self.optimizer.step()


def compared(width: int, part: str, goal: float, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    ours = Step("taylor", TaylorSoftmaxLoss(), "factored", width)
    dense = Step("softmax", SoftmaxLoss(), "dense", width)

    work: dict[str, Work] = {"dense": getattr(dense, part), "ours": getattr(ours, part)}
    times = interleaved(work, repeats, turns={"ours": TURNS})
    seconds = {name: t.spread for name, t in times.items()}
    ratio = times["dense"].over(times["ours"])
    return {"part": part, "N": N, "d": width, "D": D, **seconds, "ratio": ratio, "goal": goal}


def run(quick: bool = False) -> list[dict[str, Any]]:
    goals = {"output": OUTPUT_GOAL, "whole": STEP_GOAL}
    widths, repeats = ((300,), 3) if quick else ((300, 1000), 5)
    rows = [compared(width, part, goal, repeats) for width in widths for part, goal in goals.items()]
    table = [
        [
            PART_NAMES[row["part"]],
            f"{row['d']}",
            readable(row["dense"].median),
            readable(row["ours"].median),
            *ratio_cells(row["ratio"]),
            f"{row['goal']:.0f}x",
        ]
        for row in rows
    ]
    title = f"Language model, N={N}, D={D:,}: factored head with Taylor softmax against dense softmax, both with exact SGD"
    show(Table(title, ["", "hidden units", "dense softmax", "factored", "ratio", "quartiles", "to reach"], table))
    return rows
