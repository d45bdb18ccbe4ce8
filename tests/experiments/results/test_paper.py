"""The paper's tables as data."""

from __future__ import annotations

import dataclasses

import pytest

from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.results.paper import TABLES, table_of
from spherical_loss.experiments.training.tasks import TASKS


@pytest.mark.parametrize("name", TABLES)
def test_settings_and_losses_exist(name: str) -> None:
    table = TABLES[name]
    settings = dataclasses.replace(TASKS[table.task].settings, **table.settings)
    assert table_of(table.task, settings) is table
    assert set(table.losses) <= set(LOSSES)
    assert {c.better for c in table.claims} | {c.worse for c in table.claims if not c.elsewhere} <= set(table.losses)


@pytest.mark.parametrize("name", TABLES)
def test_every_claim_holds_for_the_papers_own_figures(name: str) -> None:
    table = TABLES[name]
    assert table.claims
    for claim in table.claims:
        metric = "loss" if claim.metric == "nll" else claim.metric
        other = TABLES[claim.elsewhere] if claim.elsewhere else table
        better, worse = getattr(table.rows[claim.better], metric), getattr(other.rows[claim.worse], metric)
        assert better.mean < worse.mean, claim.text


def test_tables_are_numbered_as_in_the_paper() -> None:
    assert {name: table.number for name, table in TABLES.items() if table.number <= 4} == {
        "mnist-random-splits": 1,
        "mnist-official": 2,
        "cifar10": 3,
        "cifar100": 4,
    }


def test_a_task_outside_the_paper_has_no_table() -> None:
    assert table_of("digits", TASKS["digits"].settings) is None
