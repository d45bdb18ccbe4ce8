"""``python -m benchmarks``: all comparisons in one run, as tables; the figures go to results/bench.json.

Ratios of medians of interleaved repetitions (A B A B ...). Name some of the parts to run only those. The largest
size needs some 16 GiB of memory.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch

from benchmarks import heads, language, losses, mnist_step, quality, side_by_side
from benchmarks.timing import RESULTS

PARTS = {
    "losses": losses.run,
    "gram": heads.all_gram,
    "factored": heads.factored,
    "side_by_side": side_by_side.run,
    "growth": heads.growth,
    "mnist": mnist_step.run,
    "language": language.run,
    "quality": quality.run,
}


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"benchmarks: no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "bench.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    measured["machine"] = {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {measured['machine']['capability']}")
    for name in names:
        measured[name] = PARTS[name]()
        path.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"\nall figures: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
