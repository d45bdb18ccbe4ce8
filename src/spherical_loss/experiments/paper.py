"""The paper's tables as data: its figures, its settings, and its claims.

Reference: A. de Brebisson and P. Vincent, An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family,
ICLR 2016, arXiv 1511.05042. Error rates are fractions here (0.812% is 0.00812).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A mean and a standard deviation over runs; None where the paper gives none (a single run)."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table: the training loss on the test set, the error rate, and the number of epochs."""

    loss: Figure | None = None
    error: Figure | None = None
    epochs: Figure | None = None


@dataclass(frozen=True)
class Claim:
    """``better`` has a lower ``metric`` than ``worse``. The text says it in the paper's sense.

    With ``elsewhere``, ``worse`` is measured in another table's runs (a name in ``TABLES``).
    """

    text: str
    better: str
    worse: str
    metric: str
    elsewhere: str | None = None


@dataclass(frozen=True)
class Table:
    """A table of the paper: the settings that differ from the task's own, the figures, and the claims."""

    number: int
    task: str
    title: str
    runs: int
    settings: dict[str, Any]
    rows: dict[str, Row]
    claims: tuple[Claim, ...] = field(default=())

    @property
    def losses(self) -> tuple[str, ...]:
        return tuple(self.rows)


TABLES: dict[str, Table] = {
    "mnist-random-splits": Table(
        1,
        "mnist",
        "MNIST, a new random split and start for every run",
        runs=100,
        settings={"split": "random"},
        rows={
            "mse": Row(Figure(0.0035, 0.00036), Figure(0.00889, 0.00100), Figure(60, 17)),
            "softmax": Row(Figure(0.0433, 0.0080), Figure(0.00812, 0.00104), Figure(26, 7)),
            "abs": Row(Figure(0.0437, 0.0097), Figure(0.00813, 0.00095), Figure(25, 8)),
            "spherical": Row(Figure(0.0311, 0.0031), Figure(0.00828, 0.00094), Figure(27, 9)),
            "taylor": Row(Figure(0.0292, 0.0034), Figure(0.00785, 0.00097), Figure(22, 7)),
        },
        claims=(
            Claim("Taylor beats softmax in negative log-likelihood on MNIST", "taylor", "softmax", "nll"),
            Claim("Taylor beats softmax in error on MNIST", "taylor", "softmax", "error"),
            Claim("Spherical beats softmax in negative log-likelihood on MNIST", "spherical", "softmax", "nll"),
            Claim("Taylor beats spherical in negative log-likelihood on MNIST", "taylor", "spherical", "nll"),
            Claim("Taylor beats spherical in error on MNIST", "taylor", "spherical", "error"),
            Claim("Softmax beats MSE in error on MNIST", "softmax", "mse", "error"),
            Claim("Softmax needs fewer epochs than MSE on MNIST", "softmax", "mse", "epochs"),
        ),
    ),
    "mnist-official": Table(
        2,
        "mnist",
        "MNIST, the official training and test sets",
        runs=100,
        settings={"split": "official"},
        rows={
            "softmax": Row(Figure(0.0335, 0.0052), Figure(0.00716, 0.00084), Figure(26, 7)),
            "taylor": Row(Figure(0.0247, 0.0020), Figure(0.00688, 0.00061), Figure(22, 8)),
        },
        claims=(
            Claim("Taylor beats softmax in negative log-likelihood on official MNIST", "taylor", "softmax", "nll"),
            Claim("Taylor beats softmax in error on official MNIST", "taylor", "softmax", "error"),
            Claim("The official split is easier (softmax error)", "softmax", "softmax", "error", "mnist-random-splits"),
            Claim("The official split is easier (Taylor error)", "taylor", "taylor", "error", "mnist-random-splits"),
        ),
    ),
    "cifar10": Table(
        3,
        "cifar10",
        "CIFAR-10, a new random split and start for every run",
        runs=10,
        settings={"split": "random", "width": 64},
        rows={
            "mse": Row(Figure(0.0251), Figure(0.0900)),
            "softmax": Row(Figure(0.411, 0.032), Figure(0.0852, 0.0020)),
            "spherical": Row(Figure(0.410), Figure(0.0837)),
            "taylor": Row(Figure(0.403, 0.034), Figure(0.0807, 0.0012)),
        },
        claims=(
            Claim("Taylor beats softmax in negative log-likelihood on CIFAR-10", "taylor", "softmax", "nll"),
            Claim("Taylor beats softmax in error on CIFAR-10", "taylor", "softmax", "error"),
            Claim("Spherical beats softmax in error on CIFAR-10", "spherical", "softmax", "error"),
            Claim("Softmax beats MSE in error on CIFAR-10", "softmax", "mse", "error"),
        ),
    ),
    "cifar100": Table(
        4,
        "cifar100",
        "CIFAR-100, the official training and test sets",
        runs=5,
        settings={"split": "official", "width": 64},
        rows={
            "mse": Row(error=Figure(0.99)),  # from the text: "it yielded 99% error rate"
            "softmax": Row(Figure(1.69, 0.091), Figure(0.324, 0.0085)),
            "spherical": Row(Figure(1.90, 0.053), Figure(0.331, 0.0097)),
            "taylor": Row(Figure(1.88, 0.047), Figure(0.331, 0.0085)),
        },
        claims=(
            Claim("Softmax beats Taylor in negative log-likelihood on CIFAR-100", "softmax", "taylor", "nll"),
            Claim("Softmax beats Taylor in error on CIFAR-100", "softmax", "taylor", "error"),
            Claim("Softmax beats spherical in negative log-likelihood on CIFAR-100", "softmax", "spherical", "nll"),
            Claim("Softmax beats spherical in error on CIFAR-100", "softmax", "spherical", "error"),
            Claim("Softmax beats MSE, which fails to train, in error on CIFAR-100", "softmax", "mse", "error"),
        ),
    ),
}


def table_of(task: str, settings: Any) -> Table | None:
    """The paper's table that ``settings`` of ``task`` belong to; the width of the network may differ."""
    for table in TABLES.values():
        wanted = {key: value for key, value in table.settings.items() if key != "width"}
        if table.task == task and all(getattr(settings, key) == value for key, value in wanted.items()):
            return table
    return None
