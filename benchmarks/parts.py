"""The parts of the benchmark; a new comparison is an entry here. The figures go to bench.json in the folder of the results.

Ratios of medians of interleaved repetitions (A B A B ...). The largest sizes need about 16 GiB of memory.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    adaptive_step,
    gram_step,
    growth,
    language_step,
    loss_speed,
    mnist_step,
    refactoring,
    side_by_side,
    tiered_step,
    top_classes,
)
from benchmarks.summary import print_summary
from benchmarks.timing import touch_memory

PARTS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {  # of whether to be quick
    "losses": loss_speed.run,
    "gram": gram_step.run,
    "side-by-side": side_by_side.run,
    "adaptive": adaptive_step.run,
    "tiers": tiered_step.run,
    "topk": top_classes.run,
    "refactoring": refactoring.run,
    "growth": growth.run,
    "mnist": mnist_step.run,
    "language": language_step.run,
}


def measure(parts: Sequence[str], results: Path, quick: bool = False) -> Path | None:
    """Run these parts and add their figures to those of other parts; the file is written after each.

    If ``quick``, with fewer sizes, peers and repetitions; their figures are shown, and not stored.
    """
    if sys.platform != "linux":
        raise SystemExit(
            f"the benchmark measures peak memory through /proc, which {sys.platform} does not have: it needs Linux"
        )
    path = results / "bench.json"
    stored = json.loads(path.read_text()) if path.exists() and not quick else {}
    measured = {name: stored[name] for name in PARTS if name in stored}
    measured["machine"] = {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {measured['machine']['capability']}")
    start = time.monotonic()
    touch_memory()
    for i, name in enumerate(parts):
        print(f"\n[{i + 1}/{len(parts)}] {name}, after {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        if figures := PARTS[name](quick):  # empty for a part that was left out
            measured[name] = figures
        if not quick:
            results.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(measured, indent=1) + "\n")
    print_summary({name: measured[name] for name in parts if name in measured})
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes")
    return None if quick else path
