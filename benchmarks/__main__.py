"""``python -m benchmarks``: measure all parts, or those that are named."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts import PARTS, measure
from benchmarks.timing import RESULTS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the losses and heads against what people use instead; all parts take some 20 minutes.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure (default: all): {', '.join(PARTS)}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the main ratios in two to three minutes: fewer sizes, peers and repetitions, nothing stored",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of bench.json and of the pictures")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; the parts are: {', '.join(PARTS)}")
    if path := measure(options.parts or list(PARTS), options.results, options.quick):
        print(f"all figures: {path}")


if __name__ == "__main__":
    main()
