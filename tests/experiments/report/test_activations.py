"""Runs with other hidden activations than ReLU, beside those with ReLUs."""

from __future__ import annotations

from spherical_loss.experiments.report import write_report as report
from spherical_loss.experiments.report.activations import activation_table, families
from tests.experiments.results.stores import errors, runs_of, text_line


def test_errors_of_the_same_seeds_are_compared() -> None:
    relu = errors("taylor", 0.010, 0.012, 0.050)
    exponentials = errors("taylor", 0.012, 0.015, activation="exp")
    alone = errors("softmax", 0.020, activation="softmax")
    (family,) = families(runs_of(*relu, *exponentials, *alone))
    rows = activation_table("Title", family).rows
    assert rows == [
        ["Log softmax", "softmax in the last hidden layer", "1", "2", "-"],
        ["Log Taylor softmax", "truncated exponentials", "2", "1.35 (0.212)", "0.25 %"],  # 0.2 and 0.3 points
    ]


def test_language_models_are_compared_by_perplexity() -> None:
    lines = [text_line("taylor", 0, 150.0), text_line("taylor", 0, 180.0, activation="exp")]
    (family,) = families(runs_of(*lines))
    (row,) = activation_table("Title", family).rows
    assert row[2:] == ["1", "180", "30"]
    section = report.activations_section(runs_of(*lines))
    assert section is not None
    assert "truncated exponentials" in section.body


def test_without_other_activations_there_is_no_section() -> None:
    runs = runs_of(*errors("taylor", 0.010, 0.012))
    assert families(runs) == []
    assert report.activations_section(runs) is None
