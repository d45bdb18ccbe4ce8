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
class PaperRow:
    """A row of a table: the training loss on the test set, the error rate, and the number of epochs; for a language model,
    perplexity, top-10 error rate and SimLex-999 score."""

    loss: Figure | None = None
    error: Figure | None = None
    epochs: Figure | None = None
    perplexity: Figure | None = None
    top10: Figure | None = None
    simlex_input: Figure | None = None


@dataclass(frozen=True)
class Claim:
    """``better`` has a lower ``metric`` than ``worse``. ``text`` says it in words.

    With ``elsewhere``, ``worse`` is measured in another table's runs (a name in ``TABLES``).
    """

    text: str
    better: str
    worse: str
    metric: str
    elsewhere: str | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: the settings that differ from the task's own, the figures, and the claims."""

    number: int
    task: str
    title: str
    runs: int
    settings: dict[str, Any]
    rows: dict[str, PaperRow]
    claims: tuple[Claim, ...] = field(default=())
    words: int | None = None
    """The number of words of the paper's text, where we may have only a part of it."""

    @property
    def losses(self) -> tuple[str, ...]:
        return tuple(self.rows)

    @property
    def main_metric(self) -> str:
        return "error" if any(row.error is not None for row in self.rows.values()) else "perplexity"


def language_row(perplexity: float, top10: float, simlex: float, epochs: float | None = None) -> PaperRow:
    return PaperRow(
        epochs=None if epochs is None else Figure(epochs),
        perplexity=Figure(perplexity),
        top10=Figure(top10),
        simlex_input=Figure(simlex),
    )


def softmax_claims(corpus: str) -> tuple[Claim, ...]:
    """The claims that softmax is better than the spherical losses, by both measures."""
    return tuple(
        Claim(f"Softmax beats {title} in {name} on {corpus}", "softmax", loss, metric)
        for loss, title in (("spherical", "spherical"), ("taylor", "Taylor"))
        for metric, name in (("perplexity", "perplexity"), ("top10", "top-10 error"))
    )


def one_billion_word(layers: int, title: str, rows: dict[str, PaperRow], claims: tuple[Claim, ...] = ()) -> PaperTable:
    settings = {"layers": layers, "width": 1000, "vocabulary": 10_000}
    corpus = f"One Billion Word, {title}"
    return PaperTable(6, "one-billion-word", corpus, 1, settings, rows, (*softmax_claims(corpus), *claims), 800_000_000)


TABLES: dict[str, PaperTable] = {
    "mnist-random-splits": PaperTable(
        1,
        "mnist",
        "MNIST, a new random split and start for every run",
        runs=100,
        settings={"split": "random"},
        rows={
            "mse": PaperRow(Figure(0.0035, 0.00036), Figure(0.00889, 0.00100), Figure(60, 17)),
            "softmax": PaperRow(Figure(0.0433, 0.0080), Figure(0.00812, 0.00104), Figure(26, 7)),
            "abs": PaperRow(Figure(0.0437, 0.0097), Figure(0.00813, 0.00095), Figure(25, 8)),
            "spherical": PaperRow(Figure(0.0311, 0.0031), Figure(0.00828, 0.00094), Figure(27, 9)),
            "taylor": PaperRow(Figure(0.0292, 0.0034), Figure(0.00785, 0.00097), Figure(22, 7)),
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
    "mnist-official": PaperTable(
        2,
        "mnist",
        "MNIST, the official training and test sets",
        runs=100,
        settings={"split": "official"},
        rows={
            "softmax": PaperRow(Figure(0.0335, 0.0052), Figure(0.00716, 0.00084), Figure(26, 7)),
            "taylor": PaperRow(Figure(0.0247, 0.0020), Figure(0.00688, 0.00061), Figure(22, 8)),
        },
        claims=(
            Claim("Taylor beats softmax in negative log-likelihood on official MNIST", "taylor", "softmax", "nll"),
            Claim("Taylor beats softmax in error on official MNIST", "taylor", "softmax", "error"),
            Claim("The official split is easier (softmax error)", "softmax", "softmax", "error", "mnist-random-splits"),
            Claim("The official split is easier (Taylor error)", "taylor", "taylor", "error", "mnist-random-splits"),
        ),
    ),
    "cifar10": PaperTable(
        3,
        "cifar10",
        "CIFAR-10, a new random split and start for every run",
        runs=10,
        settings={"split": "random", "width": 64},
        rows={
            "mse": PaperRow(Figure(0.0251), Figure(0.0900)),
            "softmax": PaperRow(Figure(0.411, 0.032), Figure(0.0852, 0.0020)),
            "spherical": PaperRow(Figure(0.410), Figure(0.0837)),
            "taylor": PaperRow(Figure(0.403, 0.034), Figure(0.0807, 0.0012)),
        },
        claims=(
            Claim("Taylor beats softmax in negative log-likelihood on CIFAR-10", "taylor", "softmax", "nll"),
            Claim("Taylor beats softmax in error on CIFAR-10", "taylor", "softmax", "error"),
            Claim("Spherical beats softmax in error on CIFAR-10", "spherical", "softmax", "error"),
            Claim("Softmax beats MSE in error on CIFAR-10", "softmax", "mse", "error"),
        ),
    ),
    "cifar100": PaperTable(
        4,
        "cifar100",
        "CIFAR-100, the official training and test sets",
        runs=5,
        settings={"split": "official", "width": 64},
        rows={
            "mse": PaperRow(error=Figure(0.99)),  # from the text: "it yielded 99% error rate"
            "softmax": PaperRow(Figure(1.69, 0.091), Figure(0.324, 0.0085)),
            "spherical": PaperRow(Figure(1.90, 0.053), Figure(0.331, 0.0097)),
            "taylor": PaperRow(Figure(1.88, 0.047), Figure(0.331, 0.0085)),
        },
        claims=(
            Claim("Softmax beats Taylor in negative log-likelihood on CIFAR-100", "softmax", "taylor", "nll"),
            Claim("Softmax beats Taylor in error on CIFAR-100", "softmax", "taylor", "error"),
            Claim("Softmax beats spherical in negative log-likelihood on CIFAR-100", "softmax", "spherical", "nll"),
            Claim("Softmax beats spherical in error on CIFAR-100", "softmax", "spherical", "error"),
            Claim("Softmax beats MSE, which fails to train, in error on CIFAR-100", "softmax", "mse", "error"),
        ),
    ),
    "ptb": PaperTable(
        5,
        "ptb",
        "Penn Treebank, each loss with the architecture that suits it best",
        runs=1,
        settings={"vocabulary": 10_000},
        rows={
            "softmax": language_row(126.7, 0.501, 0.109, 6),
            "spherical": language_row(149.2, 0.508, 0.052, 7),
            "taylor": language_row(147.2, 0.503, 0.066, 6),
            "abs": language_row(128.2, 0.503, 0.0777, 7),
        },
        claims=(
            *softmax_claims("Penn Treebank"),
            Claim("Taylor beats spherical in perplexity on Penn Treebank", "taylor", "spherical", "perplexity"),
            Claim("Softmax beats softmax of |o| in perplexity on Penn Treebank", "softmax", "abs", "perplexity"),
        ),
    ),
    "one-billion-word-0": one_billion_word(
        0,
        "no hidden layer",
        {
            "softmax": language_row(27.3, 0.283, 0.365),
            "spherical": language_row(72.9, 0.417, 0.164),
            "taylor": language_row(75.8, 0.421, 0.168),
        },
    ),
    "one-billion-word-1": one_billion_word(
        1,
        "one hidden layer",
        {
            "softmax": language_row(19.4, 0.245, 0.336),
            "spherical": language_row(29.6, 0.313, 0.254),
            "taylor": language_row(28.9, 0.313, 0.262),
        },
        (
            Claim("A hidden layer helps spherical", "spherical", "spherical", "perplexity", "one-billion-word-0"),
            Claim("A hidden layer helps Taylor", "taylor", "taylor", "perplexity", "one-billion-word-0"),
        ),
    ),
    "one-billion-word-2": one_billion_word(
        2,
        "two hidden layers",
        {
            "softmax": language_row(19.2, 0.244, 0.318),
            "spherical": language_row(29.4, 0.306, 0.262),
            "taylor": language_row(28.4, 0.309, 0.265),
        },
        (
            Claim("A second hidden layer helps spherical", "spherical", "spherical", "perplexity", "one-billion-word-1"),
            Claim("A second hidden layer helps Taylor", "taylor", "taylor", "perplexity", "one-billion-word-1"),
        ),
    ),
}


def table_of(task: str, settings: Any) -> PaperTable | None:
    """The paper's table that ``settings`` of ``task`` belong to; the width of the network may differ."""
    for table in TABLES.values():
        wanted = {key: value for key, value in table.settings.items() if key != "width"}
        if table.task == task and all(getattr(settings, key, None) == value for key, value in wanted.items()):
            return table
    return None
