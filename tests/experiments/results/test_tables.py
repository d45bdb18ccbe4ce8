"""Tables come from results, number by number."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence

import pytest
from rich.console import Console

from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.results.tables import by_label, claim_table, fitted, result_table
from spherical_loss.experiments.table import FILE_WIDTH, Table, markdown, show
from spherical_loss.experiments.training.settings import Run, Settings


def result(error: float, nll: float | None, epochs: int = 5) -> dict:
    test = {"loss": nll or 0.5, "nll": nll, "error": error, "top5": error / 10, "calibration": None if nll is None else 0.01}
    times = {"seconds_per_epoch": 1.5, "alone": True}
    return {"status": "finished", "best_epoch": epochs, "epochs": 9, **times, "valid": test, "test": test}


def results(**errors: list[float]):
    runs = [
        (Run("mnist", loss, i, Settings(lr=0.1)), result(e, 10 * e)) for loss, es in errors.items() for i, e in enumerate(es)
    ]
    return by_label(runs)


def cell(headings: Sequence[str], row: Sequence[str], heading: str) -> str:
    return row[headings.index(heading)]


def cells(table: Table) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return table.header, table.rows


def test_mean_and_deviation() -> None:
    errors = [0.011, 0.013, 0.0155]
    headings, rows = cells(result_table("Title", results(taylor=errors), None))
    assert cell(headings, rows[0], "loss function") == "Log Taylor softmax"
    assert cell(headings, rows[0], "runs") == "3"
    mean, deviation = 100 * statistics.fmean(errors), 100 * statistics.stdev(errors)
    assert cell(headings, rows[0], "error %") == f"{mean:.3g} ({deviation:.3g})"
    assert cell(headings, rows[0], "epochs") == "5 (0)"
    assert cell(headings, rows[0], "s / epoch") == "1.5 (0)"
    assert "paper" not in headings


def test_times_are_those_of_runs_that_had_the_machine_to_themselves() -> None:
    found = results(taylor=[0.011, 0.013], softmax=[0.012])
    found["taylor"][1] |= {"alone": False, "seconds_per_epoch": 100.0}
    del found["softmax"][0]["alone"]  # an older run, which does not say
    headings, rows = cells(result_table("Title", found, None))
    assert [cell(headings, row, "s / epoch") for row in rows] == ["1.5", "-"]


def test_the_paper_stands_beside() -> None:
    headings, rows = cells(result_table("Title", results(softmax=[0.01], z=[0.02]), TABLES["mnist-random-splits"]))
    after_error = headings.index("error %") + 1
    assert headings[after_error] == "paper"
    assert rows[0][after_error] == "0.812 (0.104)"
    assert rows[0][headings.index("loss") + 1] == "0.0433 (0.008)"
    assert rows[0][headings.index("epochs") + 1] == "26 (7)"
    assert rows[1][after_error] == "-"  # the paper has no Z-loss


def test_single_runs_have_no_deviation_and_missing_metrics_a_dash() -> None:
    run = Run("mnist", "mse", 0, Settings(lr=0.1))
    other = Run("mnist", "taylor", 0, Settings(lr=0.1))
    headings, rows = cells(result_table("Title", by_label([(run, result(0.02, None)), (other, result(0.02, 0.1))]), None))
    assert cell(headings, rows[0], "error %") == "2"
    assert cell(headings, rows[0], "95% interval") == "-"
    assert cell(headings, rows[0], "neg. log-lik.") == "-"


def test_columns_without_a_number_are_left_out() -> None:
    run = Run("mnist", "mse", 0, Settings(lr=0.1))
    headings, _ = cells(result_table("Title", by_label([(run, result(0.02, None))]), None))
    assert "neg. log-lik." not in headings
    assert "error %" in headings


def test_diverged_runs_are_counted_apart() -> None:
    found = results(taylor=[0.01, 0.03])
    found["taylor"][2] = {"status": "diverged", "epoch": 1, "reason": "nan"}
    headings, rows = cells(result_table("Title", found, None))
    assert cell(headings, rows[0], "runs") == "2 (+ 1 diverged)"
    assert cell(headings, rows[0], "error %").startswith("2 (")


@pytest.mark.parametrize(
    ("taylor", "verdict"),
    [([0.010, 0.011, 0.0122], "confirmed"), ([0.030, 0.031, 0.0322], "contradicted"), ([0.015, 0.025, 0.020], "undecided")],
)
def test_claims(taylor: list[float], verdict: str) -> None:
    found = results(taylor=taylor, softmax=[0.020, 0.021, 0.0219])
    claims = [claim for claim in TABLES["mnist-official"].claims if claim.elsewhere is None]
    headings, rows = cells(claim_table("Title", claims, found, {}))
    assert [cell(headings, row, "here") for row in rows] == [verdict, verdict]
    assert cell(headings, rows[0], "n") == "3"


def test_claims_across_tables_and_with_too_few_runs() -> None:
    claims = TABLES["mnist-official"].claims
    official, random = results(softmax=[0.010, 0.011, 0.012]), results(softmax=[0.02, 0.021, 0.023])
    headings, rows = cells(claim_table("Title", claims, official, {"mnist-random-splits": random}))
    verdicts = {row[0]: row[1] for row in rows}
    assert verdicts["The official split is easier (softmax error)"] == "confirmed"
    assert verdicts["The official split is easier (Taylor error)"] == "undecided"
    assert rows[3][headings.index("test")] == "two runs of each are needed"
    assert rows[2][headings.index("test")] == "Welch t"


def test_narrow_terminals_get_fewer_columns() -> None:
    """What a table is about stays: the error, ours (1.5%) and the paper's, down to the narrowest terminal."""
    table = result_table("Title", results(softmax=[0.01, 0.02], taylor=[0.01, 0.015]), TABLES["mnist-random-splits"])
    printed = {}
    for width in (60, 80, 120, 300):
        console = Console(width=width, file=io.StringIO())
        show(fitted(table, console), console)
        printed[width] = console.file.getvalue()
        header = printed[width].splitlines()[2]
        assert header.index("error %") < header.index("paper", header.index("error %"))
        assert "1.5 (0.707)" in printed[width]
        assert "0.812" in printed[width]
        assert "…" not in printed[width]
    assert "calibration" in printed[300]
    assert "calibration" not in printed[80]
    assert "95% interval" in printed[120]


def test_narrow_language_tables_have_the_perplexity() -> None:
    metrics = {"loss": 5.0, "nll": 5.0, "error": 0.8, "perplexity": 148.4, "top10": 0.5, "ranked": 1000, "measured": 2000}
    metrics |= {"simlex_input": 0.1, "simlex_output": 0.2, "simlex_pairs": 500}
    run = {"status": "finished", "best_epoch": 3, "seconds_per_epoch": 1.0, "seconds_to_best": 3.0, "test": metrics}
    run |= {"alone": True, "start": {"perplexity": 700.0}, "valid": {"perplexity": 150.0}}
    table = result_table("Title", {"softmax": {0: run}, "taylor/factored": {0: run}}, TABLES["ptb"])
    for width in (80, 100, FILE_WIDTH):
        console = Console(width=width, file=io.StringIO())
        show(fitted(table, console), console)
        printed = console.file.getvalue()
        assert "148.4" in printed
        assert "126.7" in printed  # the paper's
        assert "…" not in printed
    assert "s / epoch" in printed
    assert "on words" in printed


def test_markdown_has_every_cell() -> None:
    table = result_table("Title", results(softmax=[0.01], taylor=[0.02]), None)
    lines = markdown(table).splitlines()
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")] == table.rows[-1]
    assert len({line.count("|") for line in lines[2:]}) == 1
