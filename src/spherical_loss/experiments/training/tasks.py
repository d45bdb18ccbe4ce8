"""The tasks: their descriptions, default settings and learning rates. How they are trained: :mod:`recipes`.

A new task is an entry in ``TASKS`` and one in ``RECIPES``. The command line reads this file before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.training.settings import ImageSettings, LanguageSettings, Settings
from spherical_loss.experiments.tuning.tuned import SHIPPED, tuned_values


@dataclass(frozen=True)
class Task:
    """A task: its default settings, and where its learning rates come from."""

    summary: str
    settings: Settings
    losses: tuple[str, ...]
    """The losses that ``compare`` trains, unless others are given."""
    runs: int
    lr: float = 0.01
    """Initial learning rate of a loss that has not been tuned."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For some losses, default values of other settings that have not been tuned."""
    shallow: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same for a network without hidden layers."""
    lr_range: tuple[float, float] = (1e-3, 1.0)
    """Where ``tune`` looks for the learning rate."""
    search: dict[str, tuple[int, int] | tuple[float, float]] = field(default_factory=dict)
    """Other settings that ``tune`` searches, such as layers and widths, and their ranges, on a log scale; integer
    ranges give integers."""


def open_values(task: str, loss: str, settings: Settings, tuned: Path | None = None) -> dict[str, Any]:
    """Values for the settings that are None: the task's and the loss's defaults, replaced by the tuned values that are shipped,
    and those by the ones in the file ``tuned``."""
    entry = TASKS[task]
    # The rates of the adaptive spherical softmax are those of its softmax, which has most of the probability.
    rated = "softmax" if getattr(settings, "head", None) == "adaptive-spherical" else loss
    shallow = entry.shallow.get(rated, {}) if getattr(settings, "layers", None) == 0 else {}
    shipped = tuned_values(task, rated, settings, SHIPPED)
    own = {} if tuned is None else tuned_values(task, rated, settings, tuned)
    values = {"lr": entry.lr, **LOSSES[loss].defaults, **entry.values.get(loss, {}), **entry.values.get(rated, {})}
    if getattr(settings, "head", None) == "tiered" and loss in STARTS_AT_FREQUENCIES:
        shipped = {**shipped}
        shipped.pop("output_rate", None)  # one rate for all words says nothing of tiers
    return {**values, **shallow, **shipped, **own}


def language_task(summary: str, settings: LanguageSettings, losses: tuple[str, ...], values: dict[str, dict[str, Any]]) -> Task:
    """A task of the language model; ``values`` are the losses' learning rates and layers."""
    return Task(
        summary,
        settings,
        losses,
        runs=1,
        lr=1.0,
        values=values,
        shallow=SHALLOW,
        lr_range=(0.01, 300.0),
        search={"layers": (1, 4), "width": (200, 2000), "output_rate": (1.0, 300.0)},
    )


def language_settings(**changes: Any) -> LanguageSettings:
    """Plain SGD on minibatches of 250, by negative log-likelihood."""
    common: dict[str, Any] = {"batch_size": 250, "momentum": 0.0, "monitor": "nll", "halve_after": 1}
    return LanguageSettings(**{**common, **changes})


STARTS_AT_FREQUENCIES = ("taylor", "spherical")  # of the losses of the family: suggested_lr needs such a start

# Learning rates are not comparable between losses: the outputs of the spherical ones start large, at their prior biases. Where
# there is no rate of the output layer, it is that of suggested_lr.
RATES: dict[str, dict[str, Any]] = {
    "softmax": {"lr": 0.3, "output_rate": 3.0},
    "abs": {"lr": 0.3, "output_rate": 3.0},
    "spherical": {"lr": 1.0, "eps": 0.0198},
    "taylor": {"lr": 1.0},
    "z": {"lr": 0.3, "output_rate": 1.0, "a": 0.1, "b": 30.0},
    "mse": {"lr": 0.1, "output_rate": 1.0},
    "bound": {"lr": 0.1, "output_rate": 1.0},
    "bound-fixed": {"lr": 0.1, "output_rate": 1.0, "xi": 10.0},
}
# At the rates above, a model without hidden layers ends worse than it starts. At these, the first 20,000 words of One Billion
# Word bring the perplexity from 594 to 474, 580 and 559; three times these rates, to 873 (spherical) and 690 (Taylor).
SHALLOW: dict[str, dict[str, Any]] = {"softmax": {"lr": 0.1}, "spherical": {"lr": 0.03}, "taylor": {"lr": 0.1}}
# At its rate above, the spherical softmax with three layers collapses late in the first epoch of Penn Treebank (a validation
# perplexity of 14,800); at 0.3 it has 347.
TABLE_5: dict[str, dict[str, Any]] = {
    "spherical": {"layers": 3, "width": 1264, "lr": 0.3},
    "taylor": {"layers": 3, "width": 1427},
}
PTB_VALUES = {loss: {"layers": 2, "width": 809, **rates, **TABLE_5.get(loss, {})} for loss, rates in RATES.items()}
TEXT_VALUES = {loss: {"layers": 1, "width": 300, **rates} for loss, rates in RATES.items()}  # some minutes for a million words
ONLINE_VALUES = {loss: {"layers": 1, "width": 1000, **rates} for loss, rates in RATES.items()}
# The paper has "a weight decay". At a width of 16, 30 epochs of softmax have a validation error of 14.3% at 5e-4, 13.1% here.
CIFAR_WEIGHT_DECAY = 2e-3
LANGUAGE_LOSSES = ("softmax", "abs", "spherical", "taylor", "z")

TASKS: dict[str, Task] = {
    "digits": Task(
        "scikit-learn's 1,797 digits of 8 x 8 and a small network: seconds, no download",
        # One thread: this network is so small that two threads would wait for each other.
        ImageSettings(width=64, batch_size=100, epochs=40, patience=10, monitor="loss", threads=1),
        losses=("mse", "softmax", "abs", "spherical", "taylor", "z", "bound"),
        runs=3,
    ),
    "mnist": Task(
        "MNIST, the paper's convolutional network (tables 1 and 2)",
        ImageSettings(width=30),
        losses=("mse", "softmax", "abs", "spherical", "taylor"),
        runs=3,
        # The last hidden layer starts with a squared norm of about 10^4: the squared error needs very small steps.
        lr=0.003,
        values={"mse": {"lr": 1e-4}},
        lr_range=(1e-5, 0.3),
    ),
    "cifar10": Task(
        "CIFAR-10, 14 layers with batch normalization and random flips (table 3)",
        ImageSettings(width=16, weight_decay=CIFAR_WEIGHT_DECAY),
        losses=("mse", "softmax", "spherical", "taylor"),
        runs=3,
    ),
    "cifar100": Task(
        "CIFAR-100, the same network (table 4)",
        ImageSettings(width=16, weight_decay=CIFAR_WEIGHT_DECAY, split="official"),
        losses=("softmax", "spherical", "taylor"),
        runs=3,
    ),
    "ptb": language_task(
        "Penn Treebank, the paper's neural language model (table 5)",
        language_settings(epochs=20, patience=5),
        LANGUAGE_LOSSES,
        PTB_VALUES,
    ),
    "bounds": language_task(
        "Penn Treebank, trained with the upper bounds of log-softmax: does the perplexity get worse than at the start?",
        language_settings(epochs=5, patience=5),
        ("softmax", "bound", "bound-fixed"),
        PTB_VALUES,
    ),
    "one-billion-word": language_task(
        "One Billion Word, a vocabulary of 10,000, one pass over the available shards (table 6)",
        language_settings(epochs=10, patience=10, online=True),
        ("softmax", "spherical", "taylor"),
        ONLINE_VALUES,
    ),
    "imdb": language_task(
        "IMDB reviews, 27 million words, one pass; --vocabulary full has 115,517 words",
        language_settings(epochs=20, patience=20, online=True, tokens="words"),
        ("softmax", "spherical", "taylor"),
        ONLINE_VALUES,
    ),
    "text": language_task(
        "any text file: --file corpus.txt --vocabulary 50000",
        language_settings(epochs=20, patience=5, tokens="unicode", vocabulary=None, embedding=100),
        ("softmax", "spherical", "taylor"),
        TEXT_VALUES,
    ),
}
