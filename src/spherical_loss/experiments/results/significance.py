"""Confidence intervals, and tests of "this loss is better than that one" on our own runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # scipy.stats has the same tests, but takes as long to import as torch


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's confidence interval of the mean; None for fewer than two values.

    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> f"{low:.3f} {high:.3f}"
    '-0.484 4.484'
    """
    if len(values) < 2:
        return None
    x = np.asarray(values, dtype=float)
    half = special.stdtrit(len(x) - 1, (1 + level) / 2) * x.std(ddof=1) / math.sqrt(len(x))
    return float(x.mean() - half), float(x.mean() + half)


@dataclass(frozen=True)
class Comparison:
    """``difference`` is the mean of worse - better, positive where the claim holds; ``p`` is one-sided."""

    difference: float
    low: float
    high: float
    p: float
    n: int
    test: str


def paired(better: dict[int, float], worse: dict[int, float], level: float = 0.95) -> Comparison | None:
    """The one-sided paired t-test that ``better`` is lower, over the seeds that both have.

    Runs with the same seed share their split and their initial weights, so these do not contribute to the difference
    within a pair. None for fewer than two pairs.

    >>> c = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.1, 1: 2.9, 2: 4.0})
    >>> f"{c.difference:.2f} {c.p:.4f} {c.n}"
    '1.00 0.0017 3'
    """
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < 2:
        return None
    difference = np.array([worse[seed] - better[seed] for seed in seeds])
    n, mean, error = len(seeds), float(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(seeds))
    return _student(mean, error, n - 1, n, level, "paired t")


def unpaired(better: Sequence[float], worse: Sequence[float], level: float = 0.95) -> Comparison | None:
    """Welch's one-sided t-test that ``better`` is lower, for runs that share nothing; None for fewer than two of each.

    >>> c = unpaired([1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0])
    >>> f"{c.difference:.2f} {c.p:.4f}"
    '1.50 0.0721'
    """
    if min(len(better), len(worse)) < 2:
        return None
    parts = [np.var(x, ddof=1) / len(x) for x in (better, worse)]
    mean, error = float(np.mean(worse) - np.mean(better)), math.sqrt(sum(parts))
    total = sum(v**2 / (len(x) - 1) for v, x in zip(parts, (better, worse), strict=True))
    freedom = float(sum(parts) ** 2 / total) if total > 0 else len(better) + len(worse) - 2
    return _student(mean, error, freedom, len(better) + len(worse), level, "Welch t")


def _student(mean: float, error: float, freedom: float, n: int, level: float, test: str) -> Comparison:
    half = float(special.stdtrit(freedom, (1 + level) / 2)) * error
    if error > 1e-12 * abs(mean):
        p = float(special.stdtr(freedom, -mean / error))
    else:  # t is not defined if all differences are equal: use the sign test
        p = 0.5**n if mean > 0 else 1 - 0.5**n if mean < 0 else 0.5
    return Comparison(mean, mean - half, mean + half, p, n, test)
