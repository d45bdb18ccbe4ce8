"""Our tests against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from spherical_loss.experiments.results.significance import interval, paired, unpaired

VALUES = st.lists(st.integers(-1000, 1000).map(lambda n: n / 100), min_size=2, max_size=20)


@given(VALUES, st.integers(0, 2**32 - 1))
def test_paired_is_scipys(values: list[float], seed: int) -> None:
    other = np.random.default_rng(seed).normal(size=len(values))
    found = paired(dict(enumerate(values)), dict(enumerate(other)))
    expected = scipy.stats.ttest_rel(values, other, alternative="less")
    assert found is not None
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    both = scipy.stats.ttest_rel(other, values).confidence_interval()
    assert (found.low, found.high) == pytest.approx((both.low, both.high), rel=1e-6, abs=1e-9)
    assert found.n == len(values)


@given(VALUES.filter(lambda values: len(set(values)) > 1), st.integers(0, 2**32 - 1))
def test_unpaired_is_scipys(values: list[float], seed: int) -> None:
    other = list(np.random.default_rng(seed).normal(size=7))
    found = unpaired(values, other)
    expected = scipy.stats.ttest_ind(values, other, equal_var=False, alternative="less")
    assert found is not None
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)


@given(VALUES.filter(lambda values: len(set(values)) > 1))
def test_interval_is_scipys(values: list[float]) -> None:
    bounds = interval(values)
    expected = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values))
    assert bounds == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_pairs_are_the_shared_seeds() -> None:
    found = paired({0: 1.0, 1: 2.0, 5: 100.0}, {1: 3.0, 0: 2.5, 7: -100.0})
    assert found is not None
    assert found.n == 2
    assert found.difference == pytest.approx(1.25)


def test_too_few_runs() -> None:
    assert interval([1.0]) is None
    assert paired({0: 1.0}, {0: 2.0}) is None
    assert paired({0: 1.0, 1: 1.0}, {2: 2.0, 3: 1.0}) is None
    assert unpaired([1.0], [2.0, 3.0]) is None


def test_equal_differences_give_the_sign_test() -> None:
    found = paired({0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 2.0, 2: 2.0})
    assert found is not None
    assert found.p == 0.125
    none = paired({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert none is not None
    assert none.p == 0.5  # neither for nor against
    opposite = paired({0: 2.0, 1: 2.0, 2: 2.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert opposite is not None
    assert opposite.p == 0.875
