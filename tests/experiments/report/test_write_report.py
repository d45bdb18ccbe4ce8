"""The report says what the store has, number by number."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spherical_loss.experiments.cli import main
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.marks import replace_marked
from spherical_loss.experiments.report import questions
from spherical_loss.experiments.report import write_report as report
from spherical_loss.experiments.report.page import from_markdown
from spherical_loss.experiments.report.pictures import tuning_picture
from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.results.selection import differences, group_of, table_group, table_groups
from spherical_loss.experiments.table import Table
from tests.experiments.results.stores import (
    diverged_line,
    errors,
    full_store,
    image_line,
    runs_of,
    study,
    text_line,
    with_pruned,
)

Line = dict[str, Any]


def claim(rows: list[list[str]], text: str) -> list[str]:
    return next(row for row in rows if row[0] == text)


# By hand: the differences are 0.010, 0.011 and 0.009, with the mean 0.01 and the standard error 0.001 / sqrt(3), so t is 17.32.
# With 2 degrees of freedom p = 1/2 - t / (2 sqrt(t^2 + 2)) = 0.00166, and the interval is 0.01 +- 4.303 x 0.001 / sqrt(3).
# The last ones are 0.002, -0.001 and 0.0005: the mean is 0.0005, the standard error 0.0015 / sqrt(3), t is 0.577, p 0.311.
UNSURE = (0.010, 0.012, 0.011)
BETTER, WORSE = (0.010, 0.011, 0.012), (0.020, 0.022, 0.021)


@pytest.mark.parametrize(
    ("taylor", "softmax", "expected"),
    [
        (BETTER, WORSE, ["confirmed", "1 %", "0.752 % to 1.25 %", "0.00166", "paired t", "3"]),
        (WORSE, BETTER, ["contradicted", "-1 %", "-1.25 % to -0.752 %", "0.998", "paired t", "3"]),
        (UNSURE, (0.012, 0.011, 0.0115), ["undecided", "0.05 %", "-0.323 % to 0.423 %", "0.311", "paired t", "3"]),
        ((0.010,), (0.020,), ["undecided", "1 %", "-", "-", "two runs of each are needed", "1"]),
    ],
)
def test_verdicts(taylor: tuple[float, ...], softmax: tuple[float, ...], expected: list[str]) -> None:
    rows = report.claim_rows(runs_of(*errors("taylor", *taylor), *errors("softmax", *softmax)), {})
    assert claim(rows, "Taylor beats softmax in error on MNIST")[1:] == ["1", *expected, "3"]  # epochs


def test_without_runs_every_claim_is_undecided_and_says_why() -> None:
    rows = report.claim_rows(runs_of(image_line("mse", 0, 0.1, task="digits")), {"cifar100": "data not available"})
    assert len(rows) == sum(len(table.claims) for table in TABLES.values())
    assert {row[2] for row in rows} == {"undecided"}
    assert {row[6] for row in rows if row[1] == "4"} == {"data not available"}
    assert {row[6] for row in rows if row[1] != "4"} == {"no runs yet"}
    assert report.verdict_counts(rows).endswith(f"0 confirmed, 0 contradicted, {len(rows)} undecided")


def test_claims_across_tables_need_the_same_conditions() -> None:
    random = errors("softmax", 0.020, 0.021, 0.022)
    text = "The official split is easier (softmax error)"
    same = report.claim_rows(runs_of(*random, *errors("softmax", *BETTER, split="official")), {})
    assert claim(same, text)[2] == "confirmed"
    longer = report.claim_rows(runs_of(*random, *errors("softmax", *BETTER, split="official", epochs=5)), {})
    assert claim(longer, text)[2] == "undecided"


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    return list(table.header), [list(row) for row in table.rows]


def test_what_was_scaled_down_stands_in_the_row() -> None:
    lines = [
        *errors("softmax", 0.2, 0.21, task="cifar10", width=16, weight_decay=2e-3),
        *errors("taylor", 0.19, task="cifar10"),
    ]
    table = TABLES["cifar10"]
    groups = table_groups("cifar10", runs_of(*lines))
    assert len(groups) == 2  # without weight decay: other conditions
    found = report.group_table("Title", groups[0], table)
    headings, rows = cells(found)
    assert headings[-1] == "scaled down"
    assert rows[0][:2] == ["Log softmax", "2"]
    assert rows[0][headings.index("error %") + 1] == "8.52 (0.2)"
    assert rows[0][-1] == "2 of 10 runs; at most 3 epochs instead of 200; width 16 instead of 64"
    assert [row[-1] for row in rows[1:]] == ["no runs yet"] * 3
    shown, folded = report.main_and_others(found, "error").split("<details>")
    head = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', shown)
    assert head == ["loss function", "runs", "error %", "paper", "95% interval", "scaled down"]
    names = re.findall(r'<th scope="row"[^>]*>(.*?)</th>', folded)
    assert names[:3] == ["loss", "loss, paper", "neg. log-lik."]
    assert not set(names) & set(head)
    assert differences(groups[1].runs[0], table)[1:] == ["weight decay 0.0 instead of 0.002", "width 30 instead of 64"]


def test_words_of_a_part_of_a_corpus() -> None:
    settings = {"task": "one-billion-word", "online": True, "epochs": 10, "patience": 10}
    (run,) = runs_of(text_line("softmax", 0, 90.0, layers=0, width=7, **settings))
    assert differences(run, TABLES["one-billion-word-0"]) == ["929,589 words of 800,000,000"]  # no layer has the width
    without = {key: x for key, x in text_line("softmax", 0, 90.0, layers=0, **settings).items() if key != "data"}
    assert differences(*runs_of(without), TABLES["one-billion-word-0"]) == ["an unknown number of words instead of 800,000,000"]
    (run,) = runs_of(text_line("softmax", 0, 90.0, words=5000))
    assert differences(run, TABLES["ptb"]) == ["the first 5,000 words"]


def test_the_table_has_the_runs_closest_to_the_paper() -> None:
    short = [*errors("softmax", *BETTER, epochs=2), *errors("taylor", *BETTER, epochs=2)]
    whole = [*errors("softmax", 0.01, epochs=200), *errors("taylor", 0.01, epochs=200)]
    first, other = table_groups("mnist-random-splits", runs_of(*short, *whole))
    assert first.conditions["epochs"] == 200
    assert report.conditions_text(other, first) == "epochs 2"


def test_every_loss_has_its_longest_runs_and_a_claim_those_of_both() -> None:
    short = [*errors("softmax", *WORSE, epochs=2), *errors("taylor", *BETTER, epochs=2), *errors("mse", 0.5, epochs=2)]
    longer = [*errors("softmax", 0.008, 0.009, epochs=9), *errors("taylor", 0.007, epochs=9)]
    runs = runs_of(*short, *longer)
    table = table_group(table_groups("mnist-random-splits", runs))
    shown = [(run.loss, run.seed, run.settings["epochs"]) for run in table.runs]
    assert shown == [("mse", 0, 2), ("softmax", 0, 9), ("softmax", 1, 9), ("taylor", 0, 9)]
    body = report.table_section("mnist-random-splits", runs, {}).body
    assert body.count("1 of 100 runs; at most 2 epochs instead of 200") == 2  # mse: in the table, and below with the others
    assert body.count("2 of 100 runs; at most 9 epochs instead of 200") == 1
    row = claim(report.claim_rows(runs, {}), "Taylor beats softmax in error on MNIST")
    assert row[2:4] == ["confirmed", "1 %"]  # a single pair of the longer ones decides nothing
    assert row[-1] == "2"
    pairs = runs_of(*short, *longer, image_line("taylor", 1, 0.007, epochs=9))
    assert claim(report.claim_rows(pairs, {}), "Taylor beats softmax in error on MNIST")[-2:] == ["2", "9"]


def test_other_activations_are_no_part_of_a_table() -> None:
    runs = runs_of(*errors("taylor", 0.02, epochs=2), *errors("taylor", 0.01, epochs=9, activation="exp"))
    assert [run.settings["epochs"] for group in table_groups("mnist-random-splits", runs) for run in group.runs] == [2]
    section = report.activations_section(runs)
    assert section is not None
    assert "at most 9 epochs" in section.body
    assert report.others_section(runs) is None


def test_many_epochs_of_a_few_words_are_not_long() -> None:
    few = text_line("taylor", 0, 400.0, words=5000, epochs=20)
    few["data"]["train"], few["result"]["epochs"] = 5000, 20
    first, second = table_groups("ptb", runs_of(few, text_line("taylor", 0, 250.0, epochs=2)))
    assert ("words" in first.conditions, "words" in second.conditions) == (False, True)


def test_a_loss_may_have_normalized_hidden_vectors() -> None:
    """As it may have layers of its own: the row says so."""
    lines = [text_line("softmax", 0, 150.0), text_line("taylor", 0, 170.0, normalize="rms")]
    (group,) = table_groups("ptb", runs_of(*lines))
    assert differences(group.first("taylor"), TABLES["ptb"])[-1] == "rms normalization of the hidden vectors"
    assert not any("normalization" in text for text in differences(group.first("softmax"), TABLES["ptb"]))


def test_the_table_has_the_longest_runs() -> None:
    short, longer = errors("taylor", 0.02, 0.03, 0.01, epochs=3), errors("taylor", 0.01, epochs=6)
    for lines in ((*short, *longer), (*longer, *short)):
        first, other = table_groups("mnist-random-splits", runs_of(*lines))
        assert (first.conditions["epochs"], other.conditions["epochs"]) == (6, 3)


def test_of_several_rates_the_one_with_the_most_runs_is_shown() -> None:
    group = group_of(runs_of(*errors("taylor", 0.01, 0.02, lr=0.1), *errors("taylor", 0.001, lr=0.5)))
    assert [(run.seed, run.settings["lr"]) for run in group.runs] == [(0, 0.1), (1, 0.1)]
    assert "1 more run with" in report.left_out_text(group)
    tie = group_of(runs_of(*errors("taylor", 0.01, lr=0.1), *errors("taylor", 0.001, lr=0.5)))
    assert [run.settings["lr"] for run in tie.runs] == [0.5]  # better on the validation set


def test_a_task_of_which_no_run_has_the_main_metric() -> None:
    lines = [diverged_line("mse", 0, task="digits"), text_line("mse", 0, None, task="imdb", vocabulary="full")]
    page = report.html_report(runs_of(*lines), [], {}, "")
    assert "0 (+ 1 diverged)" in page
    assert "imdb, 10,000 classes" in page


def test_diverged_runs_are_counted_and_do_not_hurt() -> None:
    lines = [*errors("taylor", 0.01, 0.02), diverged_line("mse", 0)]
    section = report.table_section("mnist-random-splits", runs_of(*lines), {})
    assert "0 (+ 1 diverged)" in section.body
    assert "1.5 (0.707)" in section.body
    only = report.html_report(runs_of(diverged_line("mse", 0)), [], {}, "")
    assert "(1 diverged)" in only
    assert "<svg" not in only


def test_pieces_of_one_pass_are_not_fewer_epochs() -> None:
    settings = {"task": "one-billion-word", "online": True, "epochs": 1, "patience": 1, "width": 1000, "layers": 1}
    (run,) = runs_of(text_line("softmax", 0, 90.0, **settings))
    assert differences(run, TABLES["one-billion-word-1"]) == ["929,589 words of 800,000,000"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.json", "{", r"missing\.json is damaged .* it must have the form"),
        ("missing.json", "[1]", r"missing\.json is damaged .* it must have the form"),
        ("missing.json", '{"ptb": 1}', r"missing\.json is damaged .* it must have the form"),
        (
            "runs/x.jsonl",
            '{"a": 1}\n',
            r"x\.jsonl, line 1, was not written by 'spherical-loss collect' \(.*it has no 'name'\)",
        ),
        ("tuning/x.jsonl", '{"a": 1}\n', r"x\.jsonl, line 1, was not written by"),
    ],
)
def test_damaged_stores_are_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    full_store(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        report.write_report(tmp_path, tmp_path / "report.html", None)


def test_missing_data() -> None:
    section = report.table_section("cifar100", [], {"cifar100": "data not available"})
    assert section.body.count("data not available") == len(TABLES["cifar100"].rows)
    assert "32.4 (0.85)" in section.body
    assert report.table_section("ptb", [], {}).body.count("no runs yet") == 4


def test_bounds() -> None:
    lines = [text_line(loss, seed, 900.0 + 10 * seed, task="bounds") for loss in ("softmax", "bound") for seed in (0, 1)]
    group = questions.bound_group(runs_of(*lines))
    assert group is not None
    headings, rows = cells(questions.bounds_table(group))
    assert headings[1:] == ["learning rate", "runs", "at the start", "after epoch 1", "after epoch 2", "at its best"]
    assert rows[1] == ["Bound of log softmax", "0.3", "2", "700 (0)", "1358 (10.61)", "905 (7.071)", "905 (7.071)"]
    (row,) = questions.bounds_claims(group).rows
    assert row[1:3] == ["confirmed", "205"]  # 900 - 700 and 910 - 700
    assert "700 at the start, 905 at best, 905 after the last epoch" in questions.bounds_picture(group).alternative
    assert report.claim_rows(runs_of(*lines), {})[-1][1:3] == ["text", "confirmed"]
    assert questions.bound_group([]) is None


def test_bounds_that_are_not_in_their_table_are_among_the_others() -> None:
    """Other rates, other conditions, and losses without a perplexity."""
    lines = [text_line(loss, 0, 900.0, task="bounds") for loss in ("softmax", "bound")]
    lines += [text_line("bound", 0, 950.0, task="bounds", lr=0.5), text_line("z", 0, None, task="bounds")]
    lines += [text_line("softmax", 0, 800.0, task="bounds", words=50_000)]
    runs = runs_of(*lines)
    group = questions.bound_group(runs)
    assert group is not None
    assert [run.label for run in group.runs] == ["softmax", "bound"]
    section = report.others_section(runs)
    assert section is not None
    assert "learning rates: Bound of log softmax 0.5, Z-loss 0.3)" in section.body
    assert "words 50000; learning rates: Log softmax 0.3)" in section.body


def test_gap_to_the_softmax() -> None:
    lines = [
        text_line(loss, seed, factor * D * (1 + seed), task="text", vocabulary=D, D=D)
        for D in (100, 1000, 10_000)
        for loss, factor in (("softmax", 1.0), ("taylor", 1 + D / 1000))
        for seed in (0, 1)
    ]
    alone = text_line("taylor", 0, 5.0, task="imdb")
    (family,) = questions.families(runs_of(*lines, alone))
    gaps = questions.gaps(family)
    assert [(gap.label, gap.D, gap.metric, gap.n) for gap in gaps] == [
        ("taylor", D, metric, 2) for D in (100, 1000, 10_000) for metric in ("perplexity", "top10")
    ]
    assert [gap.mean for gap in gaps] == pytest.approx([1.1, 0, 2.0, 0, 11, 0])
    rows = questions.gap_table("Title", gaps).rows
    assert rows[1][:5] == ["Log Taylor softmax", "1,000", "2", "2", "2 to 2"]
    picture = questions.gap_picture("text", gaps)
    assert picture is not None
    assert "1.1 at 100 classes, 2 at 1,000 classes, 11 at 10,000 classes" in picture.alternative
    assert questions.gap_picture("text", [gap for gap in gaps if gap.D > 100]) is None  # of two points
    assert report.growth_section(runs_of(alone)) is None


def test_approximate_heads_are_not_the_softmax() -> None:
    sampled = [text_line("softmax", s, 50.0, task="text", head="sampled") for s in (0, 1)]
    exact = [text_line(loss, s, p + s, task="text") for loss, p in (("softmax", 100.0), ("taylor", 120.0)) for s in (0, 1)]
    found = {gap.label: gap.mean for gap in questions.gaps(runs_of(*sampled, *exact)) if gap.metric == "perplexity"}
    assert found.keys() == {"taylor", "softmax/sampled"}
    assert found["taylor"] == pytest.approx(1.199, abs=1e-3)
    ptb = [{**line, "run": {**line["run"], "task": "ptb"}} for line in (*sampled, *exact)]
    row = claim(report.claim_rows(runs_of(*ptb), {}), "Softmax beats Taylor in perplexity on Penn Treebank")
    assert row[3] == "20"


def test_gaps_have_the_interval_of_the_ratio() -> None:
    lines = [text_line("softmax", s, 100.0, task="text") for s in (0, 1)]
    lines += [text_line("taylor", s, p, task="text") for s, p in ((0, 200.0), (1, 400.0))]
    gap = questions.gaps(runs_of(*lines))[0]
    assert gap.mean == pytest.approx(math.sqrt(8))
    assert gap.bounds is not None
    half = 12.7062 * math.log(2) / 2  # Student's t with one degree of freedom, standard error log(2) / 2
    assert gap.bounds[1] == pytest.approx(math.sqrt(8) * math.exp(half), rel=1e-4)


def test_tiers() -> None:
    values = {"softmax": ("dense", 100.0, 6), "taylor": ("factored", 150.0, 20)}  # and the epochs that suit the loss
    lines = [
        text_line(loss, seed, p + seed, head=head, epochs=epochs)
        for loss, (head, p, epochs) in values.items()
        for seed in (0, 1, 2)
    ]
    runs = runs_of(*lines, *(text_line("taylor", seed, 120.0 + 2 * seed, head="tiered") for seed in (0, 1, 2)))
    (group,) = questions.tier_groups(runs)
    ((*_, softmax, single, tiers, closed),) = questions.tier_table("Title", group).rows
    assert [softmax, single, tiers] == ["101 (1)", "151 (1)", "122 (2)"]
    assert closed == "58%"  # 29 of 50
    better, gap = questions.tier_tests("Title", group).rows
    assert better[:3] == ["Log Taylor softmax: tiers beat one rate", "confirmed", "29"]
    assert gap[:3] == ["Log softmax beats Log Taylor softmax with tiers", "confirmed", "21"]
    section = report.tiers_section(runs)
    assert section is not None
    assert "58%" in section.body
    assert "at most 6 epochs of the training text or at most 20 epochs of the training text" in section.body
    assert report.tiers_section(runs_of(*lines)) is None
    row = claim(report.claim_rows(runs, {}), "Softmax beats Taylor in perplexity on Penn Treebank")
    assert row[3] == "50"  # the paper's claim is about one rate


def test_equal_time() -> None:
    lines = [
        text_line(loss, 0, 100.0, task="imdb", vocabulary="full", seconds=s) for loss, s in (("taylor", 10.0), ("new", 15.0))
    ]
    headings, rows = cells(questions.equal_time_table("Title", group_of(runs_of(*lines))))
    assert headings[2] == "perplexity after 20 s"
    # The longer run has validations after 15 s (150, 50%) and 30 s (100, 45%): 20 s are a third of the way.
    assert sorted(rows) == [
        ["Log Taylor softmax", "1", "100", "45", "929,589", "20"],
        ["new", "1", "133.3", "48.3", "929,589", "30"],
    ]
    section = report.large_vocabulary_section(runs_of(*lines))
    assert section is not None
    assert "10,000 classes" in section.body


def test_tuning() -> None:
    studies = [with_pruned(study("mnist", "taylor", {0.01: 0.5, 0.1: 0.25, 1.0: None}))]
    section = report.tuning_section(studies)
    assert section is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section.body)
    assert cells[:8] == ["Log Taylor softmax", "4", "1", "1", "lr 0.1", "0.25", "error", "1"]  # not the 0.05 of the pruned one
    assert [cells[-7], cells[-1]] == ["diverged", "epoch 3"]
    assert "4 trials, 1 diverged, best 0.25 at a learning rate of 0.1" in tuning_picture("mnist", studies).alternative
    assert report.tuning_section([]) is None


def test_notes_are_markdown_and_nothing_else() -> None:
    html = from_markdown("# Pooling\n\n*stride* 2 <script>alert(1)</script>\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert "<h3>Pooling</h3>" in html
    assert "<em>stride</em>" in html
    assert "<script>" not in html
    assert '<div class="scroll"' in html


def test_the_same_store_gives_the_same_bytes(tmp_path: Path, full_report: Path) -> None:
    results = full_store(tmp_path)
    command = [sys.executable, "-m", "spherical_loss", "report", "--results", str(results)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True)  # another order of sets
    assert (results / "report.html").read_bytes() == full_report.read_bytes()


class Tags(HTMLParser):
    """Checks that elements are closed in order."""

    VOID = ("meta", "link", "br", "hr", "use")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)


def test_the_page_is_whole_and_alone(full_report: Path) -> None:
    html = full_report.read_text()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert all(address.startswith("#") or address == "data:," for address in tags.addresses)
    assert "<script" not in html
    assert "@import" not in html
    for title in (
        "Table 1: MNIST",
        "Tuning",
        "The bounds",
        "The gap as",
        "The large vocabulary",
        "Other runs",
        "Where our figures",
    ):
        assert title in html
    assert "sampled" in html  # a loss that the command line need not know
    assert len(html) < 1_000_000


def test_the_page_opens_with_a_summary_a_picture_and_the_decided_claims(full_report: Path) -> None:
    html = full_report.read_text()
    order = [
        "44 claims of the paper",
        "Our figures beside the paper&#x27;s. Table 1 mnist-random-splits, Log softmax, test error (%)",
        "In the pictures a large point is",
        '<nav aria-label="Contents">',
        '<span class="confirmed">',
        "undecided claims</summary>",
        '<span class="undecided">',
        'id="mnist-random-splits"',
    ]
    places = [html.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)
    claims = html[html.index('<section id="claims">') : html.index('<section id="mnist-random-splits">')]
    decided, folded = claims.split("<details>")
    assert "undecided</span>" not in decided
    assert "confirmed</span>" not in folded


def test_captions_stand_once(full_report: Path) -> None:
    html = full_report.read_text()
    captions = [*re.findall("<caption>(.*?)</caption>", html), *re.findall("<figcaption>(.*?)</figcaption>", html)]
    assert captions
    assert len(captions) == len(set(captions))
    assert not set(captions) & set(re.findall("<h2>(.*?)</h2>", html))


def test_an_empty_store_is_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(tmp_path)]) == 1
    assert "has no results" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_the_readme_gets_the_summary(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- end results -->\nafter\n")
    runs = runs_of(*errors("softmax", *UNSURE), *errors("taylor", 0.008, 0.013, 0.0105))
    text = report.summary(runs, {"cifar100": "data not available"})
    replace_marked(readme, "results", text)
    written = readme.read_text()
    assert written.startswith("before\n<!-- results -->\n**")
    assert written.endswith("<!-- end results -->\nafter\n")
    assert "old" not in written
    order = "Taylor softmax before softmax: undecided (p = 0.311, n = 3, 3 epochs)"
    assert f"| 1 `mnist-random-splits` | error % | 1.1 (0.812) | 1.05 (0.785) | - (0.828) | {order} |" in written
    assert "| 4 `cifar100` | error % | - (32.4) | - (33.1) | - (33.1) | data not available |" in written
    assert "| 5 `ptb` | perplexity | - (126.7) | - (147.2) | - (149.2) | no runs yet |" in written
    with pytest.raises(UserError, match="exactly once, but has them 0 times"):
        replace_marked(readme, "others", text)
