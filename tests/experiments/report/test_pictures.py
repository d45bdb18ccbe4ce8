"""Pictures of the report: what they show, and when there are none."""

from __future__ import annotations

import re

from spherical_loss.experiments.report.overview import overview
from spherical_loss.experiments.report.pictures import error_bars, learning_curves, time_curves, tuning_picture
from spherical_loss.experiments.results.selection import group_of
from tests.experiments.results.stores import errors, runs_of, study, text_line


def test_numbers_of_pictures_keep_their_digits() -> None:
    lines = errors("softmax", 0.00286, 0.00288, epochs=3)
    for line in lines:
        line["history"]["valid"]["error"] = [line["result"]["valid"]["error"]] * 3
    drawn = learning_curves("Table 2", group_of(runs_of(*lines)), "error")
    assert drawn is not None
    assert "Log softmax, mean of 2: 0.287 after epoch 1" in re.findall('aria-label="([^"]*)"', drawn.svg)[0]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn.svg)
    assert [text for text in texts if re.fullmatch(r"0\.\d{3,}", text)]  # of y, from 0.286 to 0.288
    assert [text for text in texts if re.fullmatch(r"[\d.]+", text) and not text.startswith("0.")] == ["1", "2", "3"]  # epochs
    assert not re.search(r' d="[^"]*\d\.\d{3}', drawn.svg)  # of coordinates two are enough


def test_the_overview_has_our_figures_and_the_papers() -> None:
    """Mean and figure of every loss; tables without runs are left out, and so is a picture without any."""
    runs = runs_of(*errors("softmax", 0.01, 0.02), *errors("taylor", 0.03), text_line("spherical", 0, 200.0))
    picture = overview(runs)
    assert picture is not None
    assert picture.alternative.split(". ")[1:] == [
        "Table 1 mnist-random-splits, Log softmax, test error (%): 1.5, in the paper 0.812",
        "Table 1 mnist-random-splits, Log Taylor softmax, test error (%): 3, in the paper 0.785",
        "Table 5 ptb, Log spherical softmax, test perplexity: 200, in the paper 149.",
    ]
    assert overview(runs_of(*errors("softmax", 0.1, task="digits"))) is None


def test_one_or_two_points_are_no_picture() -> None:
    two = group_of(runs_of(*errors("softmax", 0.1, 0.2, epochs=2)))
    three = group_of(runs_of(*errors("softmax", 0.1, 0.2, epochs=3)))
    assert learning_curves("T", two, "error") is time_curves("T", two, ["error"]) is None
    assert learning_curves("T", three, "error") is not None
    assert time_curves("T", three, ["error"]) is not None
    assert error_bars("T", three, None, "error") is None  # a single mean
    assert error_bars("T", group_of(runs_of(*errors("softmax", 0.1), *errors("taylor", 0.1))), None, "error") is None
    assert tuning_picture("mnist", [study("mnist", "taylor", {0.01: 0.5, 0.1: 0.25})]) is None


def test_time_curves_are_of_a_quiet_machine() -> None:
    lines = errors("softmax", 0.1, 0.2, epochs=3)
    for line in lines:
        line["result"]["alone"] = False
    assert time_curves("T", group_of(runs_of(*lines)), ["error"]) is None
