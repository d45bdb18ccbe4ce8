"""``spherical-loss report``: the store of results as one HTML page, and a summary for the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.files.marks import replace_marked
from spherical_loss.experiments.report import activations, page, questions
from spherical_loss.experiments.report.claims import claim_rows, verdict_counts
from spherical_loss.experiments.report.overview import overview
from spherical_loss.experiments.report.page import Section, details, paragraph, pictures
from spherical_loss.experiments.report.pictures import HOW_TO_READ, error_bars, learning_curves, time_curves, tuning_picture
from spherical_loss.experiments.report.summary import summary
from spherical_loss.experiments.results.paper import TABLES, PaperTable
from spherical_loss.experiments.results.selection import (
    Group,
    conditions,
    group_of,
    grouped,
    has_relu,
    scaled_down,
    table_group,
    table_groups,
)
from spherical_loss.experiments.results.store import StoredRun, Study, read_missing, read_runs, read_studies
from spherical_loss.experiments.results.tables import (
    BESIDE,
    CLAIM_HEADINGS,
    COLUMNS,
    Results,
    label_text,
    loss_of,
    result_table,
)
from spherical_loss.experiments.table import Table, html

TITLE = "Softmax alternatives of the spherical family: results"
RULE = (
    "The rule: a claim is confirmed where the 95% interval of the difference lies on its side of zero (a t-test on our runs, "
    "p < 0.025 one-sided), contradicted where it lies on the other, and undecided otherwise. Of forty claims about runs that "
    "do not differ, two would be decided by chance. A verdict holds for our runs: where they are far shorter than the paper's, "
    "it is no evidence about the paper's runs. A single run of each loss decides nothing. Runs with the same seed share their "
    "split and initial weights and are compared in pairs; n is the number of pairs. The difference is positive where the "
    "claim holds."
)


STUDY_HEADINGS = ["task", "loss function", "trials", "given up", "diverged", "best values", "validation", "judged by", "epochs"]
NOTES = ("scaled down", "ours")
"""Headings of the columns that say in words what is missing, beside the figures."""
ENVIRONMENT_HEADINGS = ["versions", "Python", "machine", "threads", "runs"]
TRIAL_HEADINGS = ["task", "loss function", "trial", "values", "validation", "pruned after"]


def write_report(results: Path, out: Path, readme: Path | None) -> None:
    """Write the page, and the summary into ``readme``."""
    runs, studies = read_runs(results), read_studies(results)
    if not runs and not studies:
        raise UserError(
            f"{results} has no results: neither {results / 'runs'} nor {results / 'tuning'} has a line; train some runs, and "
            "add them with 'spherical-loss collect RUNS'"
        )
    missing = read_missing(results)
    notes = path.read_text(encoding="utf-8") if (path := results / "notes.md").exists() else ""
    write_atomically(out, html_report(runs, studies, missing, notes).encode())
    if readme is not None:
        replace_marked(readme, "results", summary(runs, missing))


def html_report(runs: list[StoredRun], studies: list[Study], missing: dict[str, str], notes: str) -> str:
    sections = [claims_section(runs, missing)]
    sections += [table_section(name, runs, missing) for name in TABLES]
    sections += [
        section
        for section in (
            bounds_section(runs),
            growth_section(runs),
            tiers_section(runs),
            activations_section(runs),
            large_vocabulary_section(runs),
            others_section(runs),
            tuning_section(studies),
        )
        if section is not None
    ]
    if notes.strip():
        sections.append(Section("notes", "Where our figures differ from the paper's", page.from_markdown(notes)))
    sections.append(environment_section(runs))
    diverged = sum(not run.finished for run in runs)
    introduction = paragraph(
        f"{len(runs)} runs of {len({run.task for run in runs})} tasks ({diverged} diverged) and {len(studies)} tuning studies, "
        "beside the figures of A. de Brebisson and P. Vincent, An Exploration of Softmax Alternatives Belonging to the "
        "Spherical Loss Family (ICLR 2016, arXiv 1511.05042). Everything here is made from the stored runs by the command "
        "spherical-loss report."
    )
    rows = claim_rows(runs, missing)
    opening = [introduction, paragraph(f"{verdict_counts(rows)}."), pictures(overview(runs)), paragraph(HOW_TO_READ)]
    return page.page(TITLE, "\n".join(opening), sections)


# The paper's tables


def table_section(name: str, runs: Sequence[StoredRun], missing: dict[str, str]) -> Section:
    table = TABLES[name]
    title = f"Table {table.number}: {table.title}"
    groups = table_groups(name, runs)
    if not groups:
        found = missing_table("", table, missing.get(table.task, "no runs yet"))
        return Section(name, title, main_and_others(found, table.main_metric))
    group, metric = table_group(groups), table.main_metric
    body = [main_and_others(group_table("", group, table), metric)]
    if group.left_out:
        body.append(paragraph(left_out_text(group)))
    timed = ["error"] if metric == "error" else ["perplexity", "top10"]
    body.append(
        pictures(
            error_bars(title, group, table, metric), learning_curves(title, group, metric), time_curves(title, group, timed)
        )
    )
    shown = {run.name for run in group.runs}
    for other in groups:
        if any(run.name not in shown for run in other.runs):
            theirs = main_and_others(group_table("", other, table, absent=False), metric)
            body.append(details(f"Other runs of this table: {conditions_text(other, group)}", theirs))
    return Section(name, title, "\n".join(body))


def group_table(title: str, group: Group, table: PaperTable, absent: bool = True) -> Table:
    """Our results beside the paper's, what was scaled down, and (``absent``) rows for the paper's losses that have no runs."""
    results: Results = group.results
    run = {loss_of(label) for label in results}
    without = [loss for loss in table.losses if absent and loss not in run]
    found = result_table(title, {**results, **{loss: {} for loss in without}}, table)
    notes = [scaled_down(group, label, table) for label in results] + ["no runs yet"] * len(without)
    return with_notes(found, NOTES[0], notes)


def with_notes(table: Table, heading: str, notes: Sequence[str]) -> Table:
    rows = [[*row, note] for row, note in zip(table.rows, notes, strict=True)]
    return Table(table.title, [*table.header, heading], rows)


def main_and_others(table: Table, metric: str) -> str:
    """A table of the loss, its runs, the main metric with the columns beside it, and the notes, which fits the page; and the
    other metrics, folded, with a row for each."""
    main = next(column.heading for column in COLUMNS if column.metric == metric)
    if main not in table.header:  # all runs have diverged, or are of losses without it
        return html(table)
    start = stop = table.header.index(main)
    while (stop := stop + 1) < len(table.header) and table.header[stop] in BESIDE:
        pass
    notes = [i for i, heading in enumerate(table.header) if heading in NOTES]
    shown = [0, 1, *range(start, stop), *notes]
    left = [i for i in range(len(table.header)) if i not in shown]
    first = html(table.select(shown))
    return f"{first}\n{details('Other metrics', html(named_beside(table).select([0, *left]).transposed()))}" if left else first


def named_beside(table: Table) -> Table:
    """The headings of columns that belong to the metric before them name it, too."""
    header, metric = [], ""
    for heading in table.header:
        if heading not in BESIDE:
            metric = heading
        header.append(heading if heading == metric else f"{metric}, {heading}")
    return Table("", header, table.rows)


def missing_table(title: str, table: PaperTable, reason: str) -> Table:
    """The paper's figures, and the reason why we have none."""
    found = result_table(title, {loss: {} for loss in table.losses}, table)
    return with_notes(found, NOTES[1], [reason] * len(found.rows))


def left_out_text(group: Group) -> str:
    losses = ", ".join(sorted({label_text(run.label) for run in group.left_out}))
    runs = f"{len(group.left_out)} more run{'s' if len(group.left_out) > 1 else ''}"
    return f"{runs} with other learning rates or options in the store: {losses}."


def conditions_text(other: Group, group: Group) -> str:
    """The conditions of ``other`` that not all runs of ``group`` share."""
    ours, all_theirs = other.conditions, [conditions(run) for run in group.runs]
    keys = sorted(set(ours).union(*all_theirs))
    return ", ".join(f"{key} {ours.get(key, 'unset')}" for key in keys if any(t.get(key) != ours.get(key) for t in all_theirs))


# The claims


def claims_section(runs: Sequence[StoredRun], missing: dict[str, str]) -> Section:
    """The decided claims; the others, folded."""
    rows = claim_rows(runs, missing)
    headings = [CLAIM_HEADINGS[0], "table", *CLAIM_HEADINGS[1:], "epochs"]
    decided, undecided = ([row for row in rows if (row[2] == "undecided") is open_] for open_ in (False, True))
    found = html(Table("", headings, decided)) if decided else paragraph("No claim is decided by the stored runs.")
    body = [found, paragraph(RULE)]
    if undecided:
        body.append(details(f"{len(undecided)} undecided claims", html(Table("", headings, undecided))))
    return Section("claims", "The paper's claims: decided", "\n".join(body))


# Beyond the tables


def bounds_section(runs: Sequence[StoredRun]) -> Section | None:
    group = questions.bound_group(runs)
    if group is None:
        return None
    body = [
        paragraph(
            "The paper trained language models by minimizing upper bounds of log-softmax, and found that it degraded the "
            "initial perplexity. At the start the network predicts the frequencies of the words."
        ),
        html(questions.bounds_table(group)),
        html(questions.bounds_claims(group)),
        pictures(questions.bounds_picture(group)),
    ]
    return Section("bounds", "The bounds: does minimizing them degrade the perplexity?", "\n".join(body))


def growth_section(runs: Sequence[StoredRun]) -> Section | None:
    families = questions.families(runs)
    if not families:
        return None
    body = [
        paragraph(
            "The paper leaves open why softmax is better with many classes and not with few. Here the corpus stays the same "
            "and the vocabulary grows. Words outside it are one class, so a smaller vocabulary is an easier task."
        )
    ]
    for family in families:
        gaps, title = questions.gaps(family), questions.family_title(family)
        body += [
            html(questions.gap_table(title, gaps)),
            pictures(questions.gap_picture(title, gaps)),
        ]
    return Section("growth", "The gap as the number of classes grows", "\n".join(body))


def tiers_section(runs: Sequence[StoredRun]) -> Section | None:
    groups = questions.tier_groups(runs)
    if not groups:
        return None
    body = [
        paragraph(
            "With one learning rate for all classes the frequent ones learn too slowly. A tiered head cuts the classes into "
            "tiers by frequency, and each tier has a rate of its own. The model is the same. Runs of the same seed are pairs."
        )
    ]
    for group in groups:
        texts = " or ".join(dict.fromkeys(questions.trained_on(run) for run in group.runs))
        title = f"{group.runs[0].task}, {texts}"
        body += [
            html(questions.tier_table(title, group)),
            html(questions.tier_tests(title, group)),
        ]
    return Section("tiers", "Tiers: a learning rate for every frequency", "\n".join(body))


def activations_section(runs: Sequence[StoredRun]) -> Section | None:
    families = activations.families(runs)
    if not families:
        return None
    body = [
        paragraph(
            "The paper tried stronger nonlinearities before the spherical losses, and found them no better than ReLUs: a "
            "softmax as the last hidden activation, and truncated exponentials with batch normalization. Runs of the same "
            "seed are pairs."
        )
    ]
    for family in families:
        epochs = max(run.settings["epochs"] for run in family if not has_relu(run))
        title = f"{family[0].task}, at most {epochs} epochs"
        body.append(html(activations.activation_table(title, family)))
    return Section("activations", "Other hidden activations than ReLU", "\n".join(body))


def large_vocabulary_section(runs: Sequence[StoredRun]) -> Section | None:
    mine = [run for run in runs if run.settings.get("vocabulary") == "full" and run.finished]
    if not mine:
        return None
    body = []
    for task in dict.fromkeys(run.task for run in mine):
        group = group_of([run for run in mine if run.task == task])
        D = next((f"{run.D:,} classes" for run in group.runs if run.D), "the full vocabulary")
        title = f"{task}, {D}"
        if any(run.alone for run in group.runs):
            body.append(html(questions.equal_time_table(title, group)))
        body += [
            main_and_others(result_table(f"{title}: on the test set, after the whole run", group.results, None), "perplexity"),
            pictures(time_curves(title, group, ["perplexity", "top10"])),
        ]
    return Section("large-vocabulary", "The large vocabulary, at equal time", "\n".join(body))


def others_section(runs: Sequence[StoredRun]) -> Section | None:
    """The stored runs that no other section shows."""
    shown = {run.name for name in TABLES for group in table_groups(name, runs) for run in (*group.runs, *group.left_out)}
    shown |= {run.name for family in questions.families(runs) for run in family}
    shown |= {run.name for family in activations.families(runs) for run in family if not has_relu(run)}
    if bounds := questions.bound_group(runs):
        shown |= {run.name for run in bounds.runs}
    shown |= {run.name for run in runs if run.settings.get("vocabulary") == "full"}
    left = [run for run in runs if run.name not in shown]
    body = []
    for part in grouped(left):
        group = group_of(part)
        metric = "perplexity" if "vocabulary" in group.conditions else "error"
        kept = {
            k: v for k, v in group.conditions.items() if k in ("epochs", "width", "split", "vocabulary", "words", "activation")
        }
        rates = ", ".join(f"{label_text(label)} {group.first(label).settings['lr']:g}" for label in group.results)
        title = f"{part[0].task} ({', '.join(f'{key} {value}' for key, value in kept.items())}; learning rates: {rates})"
        body += [
            main_and_others(result_table(title, group.results, None), metric),
            pictures(error_bars(title, group, None, metric), learning_curves(title, group, metric)),
        ]
        if group.left_out:
            body.append(paragraph(left_out_text(group)))
    return Section("others", "Other runs", "\n".join(body)) if body else None


def tuning_section(studies: Sequence[Study]) -> Section | None:
    """What was tried for each loss, and what was best."""
    if not studies:
        return None
    rows, trials = [], []
    for study in studies:
        best = study.best
        values = ", ".join(f"{key} {value:g}" for key, value in best["values"].items()) if best else "-"
        diverged = sum(trial["value"] is None for trial in study.trials)
        value = f"{best['value']:.4g}" if best else "-"
        title = label_text(study.loss)
        rows.append(
            [
                study.task,
                title,
                str(len(study.trials)),
                str(sum("pruned" in trial for trial in study.trials)),
                str(diverged),
                values,
                value,
                study.monitor,
                str(study.settings.get("epochs", "-")),
            ]
        )
        for trial in study.trials:
            tried = ", ".join(f"{key} {value:g}" for key, value in trial["values"].items())
            trials.append(
                [
                    study.task,
                    title,
                    str(trial["number"]),
                    tried,
                    "diverged" if trial["value"] is None else f"{trial['value']:.4g}",
                    f"epoch {trial['pruned']}" if "pruned" in trial else "-",
                ]
            )
    tasks = dict.fromkeys(study.task for study in studies)
    body = [
        paragraph(
            "The learning rate, and a loss's own options, were searched on the validation set with short trials. In the "
            "pictures a hollow point is a trial that was pruned, and a cross at the upper edge one that diverged."
        ),
        html(Table("", STUDY_HEADINGS, rows)),
        pictures(*(tuning_picture(task, [study for study in studies if study.task == task]) for task in tasks)),
        details("All trials", html(Table("", TRIAL_HEADINGS, trials))),
    ]
    return Section("tuning", "Tuning", "\n".join(body))


def environment_section(runs: Sequence[StoredRun]) -> Section:
    """Versions and machines, with the number of runs of each."""
    found: Counter[tuple[str, ...]] = Counter()
    for run in runs:
        environment = run.environment
        versions = ", ".join(f"{name} {version}" for name, version in sorted(environment["versions"].items()))
        machine = f"{environment['machine']} ({environment['cpu_capability']})"
        found[versions, f"Python {environment['python']}", machine, str(environment["threads"])] += 1
    rows = [[*key, str(count)] for key, count in sorted(found.items())]
    how = "The runs are in results/runs, one line each, with their configuration, seed and per-epoch metrics."
    return Section(
        "environment",
        "Versions and machines",
        paragraph(how)
        + html(Table("What the runs were made with", ["versions", "Python", "machine", "threads", "runs"], rows)),
    )
