"""Confidence intervals, and tests of "this loss is better than that one" on our own runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

# scipy.stats takes as long to import as torch, so it is imported where a table needs it.


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's confidence interval of the mean; None for fewer than two values.

    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> f"{low:.3f} {high:.3f}"
    '-0.484 4.484'
    """
    from scipy import stats

    if len(values) < 2:
        return None
    if np.ptp(values) == 0:  # no spread, no interval
        return float(values[0]), float(values[0])
    low, high = stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))
    return float(low), float(high)


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
    from scipy import stats

    pairs = [worse[seed] for seed in seeds], [better[seed] for seed in seeds]
    return _compared(stats.ttest_rel, *pairs, float(np.std(np.subtract(*pairs))), len(seeds), level, "paired t")


def unpaired(better: Sequence[float], worse: Sequence[float], level: float = 0.95) -> Comparison | None:
    """Welch's one-sided t-test that ``better`` is lower, for runs that share nothing; None for fewer than two of each.

    >>> c = unpaired([1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0])
    >>> f"{c.difference:.2f} {c.p:.4f}"
    '1.50 0.0721'
    """
    if min(len(better), len(worse)) < 2:
        return None
    from scipy import stats

    welch, spread = partial(stats.ttest_ind, equal_var=False), float(max(np.std(better), np.std(worse)))
    return _compared(welch, worse, better, spread, len(better) + len(worse), level, "Welch t")


def _compared(
    test: Callable[..., Any], worse: Sequence[float], better: Sequence[float], spread: float, n: int, level: float, name: str
) -> Comparison:
    mean = float(np.mean(worse) - np.mean(better))
    if spread <= 1e-12 * abs(mean):  # t is not defined where all differences are the same number: the sign test
        p = 0.5**n if mean > 0 else 1 - 0.5**n if mean < 0 else 0.5
        return Comparison(mean, mean, mean, p, n, name)
    bounds = test(worse, better).confidence_interval(level)
    p = test(worse, better, alternative="greater").pvalue
    return Comparison(mean, float(bounds.low), float(bounds.high), float(p), n, name)
