"""Write the measured figures of results/ into README.md and docs/: ``python -m benchmarks.publish``.

Each table is between ``<!-- name -->`` and ``<!-- end name -->``; nothing between them is written by hand.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

from benchmarks import growth, pages, scale
from benchmarks.gram_step import limit
from benchmarks.loss_speed import REFERENCE
from benchmarks.parts import PARTS
from benchmarks.quality import page as quality_page
from benchmarks.summary import FACTORED_GOALS
from benchmarks.timing import RESULTS, factor, ratio_cells, readable, time_cells
from spherical_loss.experiments.files.marks import replace_marked
from spherical_loss.experiments.report.any_page import STYLE
from spherical_loss.experiments.table import Table, markdown

ROOT = RESULTS.parent
DENSE = "dense + cross-entropy + SGD"


def speed(row: dict[str, Any], key: str = "seconds") -> str:
    return readable(row[key][0] if isinstance(row[key], list) else row[key])


def losses_table(rows: list[dict[str, Any]]) -> str:
    """A table for every size: forward and backward pass, as multiples of the speed of F.cross_entropy."""
    sizes = list(dict.fromkeys((row["N"], row["D"]) for row in rows))
    names = sorted(dict.fromkeys(row["name"] for row in rows), key=lambda name: name != REFERENCE)  # which comes first
    cells = {(row["name"], row["N"], row["D"]): [*time_cells(row["seconds"]), *ratio_cells(row["speed"])] for row in rows}
    header = ["forward + backward", "median", "quartiles", "speed", "quartiles"]
    tables = (
        Table(f"{N:,} x {D:,} logits", header, [[pages.code(name), *cells[name, N, D]] for name in names]) for N, D in sizes
    )
    return "\n\n".join(markdown(table) for table in tables)


def heads_table(gram: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    """The time of what the exact heads replace, as a multiple of ours."""
    table, ours = [], ""
    for row in gram:
        if row["name"].startswith("GramHead"):
            ours = speed(row)
        else:
            table.append([*compared(row, f"GramHead: {ours}"), f"{factor(limit(row['N'], row['d'], row['D']))}x"])
    for row in steps:
        if row["size"] == "word model" and row["seconds"] and row["name"] in FACTORED_GOALS:
            table.append([*compared(row, f"FactoredHead: {speed(row, 'ours')}"), ""])
    return pages.untitled(["size", "instead of", "takes", "ours", "ratio", "quartiles", "limit by operations"], table)


def headline(measured: dict[str, Any]) -> str:
    """The ratios that the README shows."""
    word_model = {row["name"]: row for row in measured["side-by-side"] if row["size"] == "word model"}
    rows = [
        ("FactoredHead", word_model[DENSE]),
        ("AdaptiveSphericalSoftmax", next(row for row in measured["adaptive"] if row.get("name") == DENSE)),
        ("GramHead", next(row for row in measured["gram"] if row["name"] == "F.linear + F.cross_entropy")),
    ]
    table = [[f"a step of `{ours}`", row["name"], size_of(row), *ratio_cells(row["ratio"])] for ours, row in rows]
    scores = next(row for row in measured["adaptive"] if row["part"] == "scores")
    table.insert(2, ["scores by its `log_prob`", scores["name"], size_of(scores), *ratio_cells(scores["ratio"])])
    loss = next(row for row in measured["losses"] if row["name"] == "TaylorSoftmaxLoss")
    table.append(
        ["`TaylorSoftmaxLoss`", f"`{REFERENCE}`", f"{loss['N']:,} x {loss['D']:,} logits", *ratio_cells(loss["speed"])]
    )
    return pages.untitled(["", "instead of", "at", "is faster by", "quartiles"], table)


def size_of(row: dict[str, Any]) -> str:
    return f"N={row['N']:,}, d={row['d']}, D={row['D']:,}"


def compared(row: dict[str, Any], ours: str) -> list[str]:
    return [size_of(row), row["name"], speed(row), ours, *ratio_cells(row["ratio"])]


def stored_figures() -> dict[str, Any]:
    """The figures of all parts."""
    path = RESULTS / "bench.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    if missing := [part for part in PARTS if part not in measured]:
        sys.exit(f"{path} has no figures of {', '.join(missing)}: python -m benchmarks {' '.join(missing)}")
    if not (RESULTS / "crossover.json").exists():
        sys.exit(f"{RESULTS / 'crossover.json'} is missing: run python -m benchmarks.crossover")
    return measured


def generated(measured: dict[str, Any]) -> dict[tuple[str, str], str]:
    """The text between the marks, by the page and the name of the marks."""
    options = scale.parser_of_options().parse_args([])
    return {
        ("README.md", "headline"): headline(measured),
        ("docs/benchmarks.md", "losses"): losses_table(measured["losses"]),
        ("docs/benchmarks.md", "heads"): heads_table(measured["gram"], measured["side-by-side"]),
        ("docs/scale.md", "scale"): markdown(scale.table(options)),
        **{(f"docs/{page}", name): text for (page, name), text in pages.tables(measured).items()},
    }


def main() -> None:
    measured = stored_figures()
    for (page, name), text in generated(measured).items():
        replace_marked(ROOT / page, name, text)
    growth.draw(measured["growth"], RESULTS)
    with matplotlib.rc_context(STYLE):
        quality_page.draw(pages.stored("quality-time"), RESULTS / "quality_time.svg")


if __name__ == "__main__":
    main()
