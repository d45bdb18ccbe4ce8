"""Where two measured curves cross."""

import pytest

from benchmarks import crossover


def rows(slow, fast):
    """Times of two heads at D = 100, 1,000, 10,000: a median and quartiles each."""
    return [
        {"N": 1, "d": 1, "D": D, "dense": [a, a, a], "factored": [b, b, b]}
        for D, a, b in zip((100, 1_000, 10_000), slow, fast, strict=True)
    ]


@pytest.mark.parametrize(
    ("slow", "fast", "expected"),
    [
        ((1, 10, 100), (2, 2, 2), 200),  # a line of slope 1 in D reaches 2 at D = 200
        ((1, 10, 100), (50, 50, 50), 5_000),
        ((3, 10, 100), (2, 2, 2), 0),
        ((1, 2, 3), (4, 4, 4), None),
        ((5, 1, 100), (2, 10, 1), 1_000 * 10 ** (1 / 3)),  # the last crossing counts
    ],
)
def test_crossover(slow, fast, expected):
    found = crossover.crossover(rows(slow, fast), "dense", "factored")
    assert found == (None if expected is None else pytest.approx(expected))


def test_two_digits():
    assert [crossover.two_digits(D) for D in (None, 0, 837.2, 12_345.6)] == ["none measured", "any D", "840", "12,000"]


def test_a_measurement_has_all_heads():
    row = crossover.measure(N=8, d=4, D=50, repeats=1)
    assert all(row[name].median > 0 for name in crossover.NAMES)
    assert (row["N"], row["d"], row["D"]) == (8, 4, 50)
