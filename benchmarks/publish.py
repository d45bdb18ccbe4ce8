"""Write the measured figures of results/bench.json into README.md and docs/scale.md: ``python -m benchmarks.publish``.

Each table stands between ``<!-- name -->`` and ``<!-- end name -->``; nothing between them is written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import scale
from benchmarks.timing import RESULTS, readable

ROOT = RESULTS.parent


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def speed(row: dict[str, Any], key: str = "seconds") -> str:
    return readable(row[key][0] if isinstance(row[key], list) else row[key])


def losses_table(rows: list[dict[str, Any]]) -> str:
    """Forward and backward, as multiples of the speed of F.cross_entropy."""
    sizes = list(dict.fromkeys((row["N"], row["D"]) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = {(row["name"], row["N"], row["D"]): f"{speed(row)} ({row['speed']:.2g}x)" for row in rows}
    table = [[name if " " in name else f"`{name}`", *(cells[name, N, D] for N, D in sizes)] for name in names]
    return markdown(["forward + backward", *(f"{N:,} x {D:,}" for N, D in sizes)], table)


def heads_table(rows: list[dict[str, Any]]) -> str:
    """Every exact or approximate alternative, as a multiple of our time."""
    table = []
    ours = ""
    for row in (row for row in rows if "name" in row):
        if "N" in row and row["name"].startswith("GramHead"):
            ours = speed(row)
        elif "ratio" in row:
            size = f"N={row['N']:,}, d={row['d']}, D={row['D']:,}" if "N" in row else "N=250, d=300, D=793,471"
            what = ("GramHead", ours) if "N" in row else ("FactoredHead", speed(row, "ours"))
            table.append([size, row["name"], speed(row), f"{what[0]}: {what[1]}", f"**{row['ratio']:,.3g}x**"])
    return markdown(["size", "instead of", "takes", "ours", "ratio"], table)


def replace(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end {name} -->)", re.DOTALL)
    before = path.read_text()
    after, count = pattern.subn(lambda match: match[1] + text + match[2], before)
    if count != 1:
        raise SystemExit(f"{path.name} must have <!-- {name} --> and <!-- end {name} --> once, but has them {count} times")
    path.write_text(after)


def main() -> None:
    measured = json.loads((RESULTS / "bench.json").read_text())
    replace(ROOT / "README.md", "losses", losses_table(measured["losses"]))
    replace(ROOT / "README.md", "heads", heads_table([*measured["gram"], *measured["factored"]]))
    options = scale.parser_of_options().parse_args([])
    replace(ROOT / "docs" / "scale.md", "scale", f"{scale.title(options)}:\n\n{markdown(scale.HEADER, scale.table(options))}")


if __name__ == "__main__":
    main()
