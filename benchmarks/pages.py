"""The generated tables of the documentation: from results/bench.json, results/crossover.json and the paper's own figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import choices, crossover, labels, search, top_classes, word_capacity
from benchmarks.language_step import PART_NAMES
from benchmarks.quality import gap, leverages
from benchmarks.quality import page as quality_page
from benchmarks.steps import Row
from benchmarks.timing import RESULTS, ratio_cells, readable, time_cells
from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.table import Table, markdown

CLASSES = {"mnist": 10, "cifar10": 10, "cifar100": 100, "ptb": 10_000, "one-billion-word": 10_000}


def untitled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown on a page that says itself what the table is about."""
    return markdown(Table("", header, rows))


def code(name: str) -> str:
    """A Python name, formatted as code."""
    return name if " " in name else f"`{name}`"


def tables(measured: dict[str, Any]) -> dict[tuple[str, str], str]:
    """The text between the marks, by the page (in docs/) and the name of the marks."""
    crossings: list[Row] = stored("crossover")
    classes, time = stored("quality-classes"), stored("quality-time")
    parts = {"side-by-side": side_by_side, "growth": growth, "language": language, "adaptive": adaptive, "tiers": tiers}
    return {
        **{("benchmarks.md", name): table(measured[name]) for name, table in parts.items()},
        ("benchmarks.md", "topk"): markdown(replace(top_classes.table(measured["topk"]), title="")),
        ("guides/choosing-a-head.md", "crossover"): crossovers(crossings),
        ("guides/choosing-a-head.md", "by-classes"): choices.heads(measured, crossings, classes, time),
        ("guides/choosing-a-loss.md", "by-classes"): choices.losses(time),
        ("benchmarks.md", "quality"): quality(time),
        ("benchmarks.md", "gap"): markdown(gap.table(stored("quality-gap"))),
        ("how/many-classes.md", "capacity"): markdown(replace(word_capacity.table(stored("capacity")), title="")),
        ("guides/several-classes.md", "labels"): markdown(replace(labels.table(stored("labels")), title="")),
        ("guides/serving.md", "search"): markdown(replace(search.table(stored("search")), title="")),
        ("how/many-classes.md", "leverages"): markdown(leverages.table(stored("leverages"))),
        ("how/many-classes.md", "classes"): markdown(quality_page.by_classes(classes)),
        ("limits.md", "paper"): paper(),
        ("limits.md", "gain"): gain(crossings),
        ("limits.md", "refactoring"): refactoring(measured),
        ("limits.md", "small"): small(measured["losses"]),
    }


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def crossovers(crossings: list[Row]) -> str:
    threads = "one thread" if crossings[0]["threads"] == 1 else f"{crossings[0]['threads']} threads"
    return f"On {threads}:\n\n{markdown(replace(crossover.table(crossings), title=''))}"


def paper() -> str:
    """The losses side by side, a row for each of the paper's tables: perplexity, or else the error rate."""
    losses = ("softmax", "spherical", "taylor")
    rows = []
    for table in TABLES.values():
        cells = []
        for loss in losses:
            row = table.rows.get(loss)
            if row is None:
                cells.append("")
            elif row.perplexity is not None and row.top10 is not None:
                cells.append(f"{row.perplexity.mean:.1f} ({100 * row.top10.mean:.1f}%)")
            else:
                cells.append(f"{100 * row.error.mean:.3g}%" if row.error else "")
        metric = "perplexity (top-10 error)" if "%)" in cells[0] else "error"
        rows.append([str(table.number), table.title.split(", each")[0], f"{CLASSES[table.task]:,}", metric, *cells])
    return untitled(["table", "data", "classes", "measured", "softmax", "spherical", "Taylor"], rows)


def gain(crossings: list[Row], N: int = 250) -> str:
    """How many times faster than dense the factored head is, for every D and d measured, beside D / (4 d)."""
    rows = [row for row in crossings if row["N"] == N]
    sizes = sorted({row["d"] for row in rows})
    cells = {
        (row["D"], row["d"]): f"{row['dense'][0] / row['factored'][0]:.1f}x ({row['D'] / (4 * row['d']):.1f})" for row in rows
    }
    table = [[f"{D:,}", *(cells.get((D, d), "") for d in sizes)] for D in sorted({row["D"] for row in rows})]
    return untitled(["gain (D / 4d)", *(f"d={d}" for d in sizes)], table)


def refactoring(measured: dict[str, Any]) -> str:
    (found,), ours = measured["refactoring"], measured["side-by-side"][0]
    when = "became due after" if found["by_itself"] else "was not due before"
    return (
        f"At N={ours['N']}, d={ours['d']}, D={ours['D']:,} refactoring took {readable(found['duration'])}, and {when} "
        f"{found['steps']:,} steps that repeat 16 batches at a rate of {found['lr']:,g}: {found['share']:.1%} of the time. "
        f"A step of the benchmark reaches {ours['of_matmul']:.0%} of the speed of a large matrix product of torch, because its "
        "matrices are small."
    )


def small(rows: list[Row]) -> str:
    """The losses at the smallest size of the benchmark."""
    N, D = min(((row["N"], row["D"]) for row in rows), key=math.prod)
    here = [row for row in rows if (row["N"], row["D"]) == (N, D) and row["name"] != "memory copy"]
    reference = next(row for row in here if row["name"] == "F.cross_entropy")
    cells = [[code(r["name"]), readable(r["seconds"][0]), f"{r['seconds'][0] / reference['seconds'][0]:.2g}"] for r in here]
    return untitled([f"{N} x {D} logits, forward + backward", "median", "times `F.cross_entropy`"], cells)


def side_by_side(rows: list[Row]) -> str:
    """A table for every size: the time, as a multiple of ours, and the memory."""
    parts = []
    for size in dict.fromkeys(row["size"] for row in rows):
        here = [row for row in rows if row["size"] == size]
        ours = here[0]
        cells = [contender(row) for row in here]
        title = f"{size[0].upper()}{size[1:]}: N={ours['N']:,}, d={ours['d']}, D={ours['D']:,}"
        header = ["a training step", "", "median", "quartiles", "of ours", "quartiles", "memory beyond the weights"]
        parts.append(
            markdown(Table(title, header, cells))
            + f"\n\nFactoredHead: its matrix products at the speed of a large one of torch would take "
            f"{ours['of_matmul']:.0%} of its time, its memory traffic at the speed of a large copy {ours['of_copy']:.0%}."
        )
    return "\n\n".join(parts)


def contender(row: Row) -> list[str]:
    if row["memory"] is None:
        return [row["name"], row["kind"], "needs a newer torch", "", "", "", ""]
    if row["seconds"] is None:
        return [row["name"], row["kind"], "does not fit", "", "", "", f"{row['memory'] / 1e9:.3g} GB at least"]
    memory = f"{row['memory'] / 1e6:,.0f} MB"
    return [row["name"], row["kind"], *time_cells(row["seconds"]), *ratio_cells(row["ratio"]), memory]


def growth(rows: list[Row]) -> str:
    """A step's time for every value of D, N and d, and the exponents that fit."""
    cells = []
    for name in ("D", "N", "d"):
        for row in (row for row in rows if row["sweep"] == name):
            cells.append([name, f"{row[name]:,}", *time_cells(row["seconds"]), f"{row['exponent']:.2f}"])
    return untitled(["against", "at", "median", "quartiles", "fitted exponent"], cells)


def language(rows: list[Row]) -> str:
    cells = [
        [PART_NAMES[r["part"]], str(r["d"]), readable(r["dense"][0]), readable(r["ours"][0]), *ratio_cells(r["ratio"])]
        for r in rows
    ]
    return untitled(["", "hidden units", "dense softmax", "FactoredHead, Taylor softmax", "ratio", "quartiles"], cells)


def adaptive(rows: list[Row]) -> str:
    """Steps and scores of AdaptiveSphericalSoftmax beside others; a ratio is how many times longer the other takes."""
    work = {"step": "a training step", "scores": "scores of all targets of a batch"}
    cells = [
        [work[r["part"]], r["name"], readable(r["seconds"][0]), readable(r["ours"][0]), *ratio_cells(r["ratio"])]
        for r in rows
        if r["part"] in work
    ]
    header = ["", "instead of", "takes", "AdaptiveSphericalSoftmax", "ratio", "quartiles"]
    return f"{untitled(header, cells)}\n\n{against_D(rows)}"


def tiers(rows: list[Row]) -> str:
    """A step with four tiers beside one of a single head."""
    cells = [
        [r["cuts"], readable(r["seconds"][0]), readable(r["one"][0]), *ratio_cells(r["ratio"])]
        for r in rows
        if r["part"] == "step"
    ]
    return f"{untitled(['four tiers', 'take', 'one head takes', 'ratio', 'quartiles'], cells)}\n\n{against_D(rows)}"


def against_D(rows: list[Row]) -> str:
    by_D = ", ".join(f"{r['D']:,}: {readable(r['seconds'][0])}" for r in rows if r["part"] == "growth")
    return f"A step against D: {by_D}."


def quality(parts: dict[str, Any]) -> str:
    """A table for every vocabulary: the contenders after the same time."""
    tables = (Table(quality_page.title(part), quality_page.HEADER, quality_page.table(part)) for part in parts.values())
    return "\n\n".join(markdown(table) for table in tables)
