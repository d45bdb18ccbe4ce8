"""Measuring side by side: interleaved repetitions, medians, ratios; peak memory; the limits of the machine."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
Work = Callable[[], object]
RESULTS = Path(__file__).parents[1] / "results"


class Spread(NamedTuple):
    """The median of the repetitions, and their quartiles: of seconds, or of ratios."""

    median: float
    low: float
    high: float


class Times:
    """The seconds of one contender: of each round, those of its turns."""

    def __init__(self) -> None:
        self.rounds: list[list[float]] = []

    @property
    def spread(self) -> Spread:
        return spread([seconds for turns in self.rounds for seconds in turns])

    def over(self, other: Times) -> Spread:
        """How many times longer than the other it took, round by round: what slows down a whole round cancels.

        Within a round the mean of the turns counts, since the one long turn of a slow contender includes its disturbances, too,
        and since some steps do more than others.
        """
        pairs = zip(self.rounds, other.rounds, strict=True)
        return spread([statistics.fmean(ours) / statistics.fmean(theirs) for ours, theirs in pairs])


def pooled(times: Sequence[Times]) -> Times:
    """The rounds of one contender in several processes, together."""
    together = Times()
    together.rounds = [turns for one in times for turns in one.rounds]
    return together


def interleaved(
    work: dict[str, Work], repeats: int, warmup: int = 1, turns: dict[str, int] | None = None, leads: int = 0
) -> dict[str, Times]:
    """Time every contender in turn (A B A B ...), so that a noisy machine does not favour one.

    ``turns`` gives how many times in a row a contender runs, by default once: A B B B A B B B ... for a slow A. ``leads`` calls
    come before them in every turn and are not timed: they pay for what the contender before has left.
    """
    times = {name: Times() for name in work}
    for repeat in range(warmup + repeats):
        for name, run in work.items():
            show_progress(f"round {repeat + 1} of {warmup + repeats}: {name}")
            for _ in range(leads):
                run()
            seconds = [timed(run) for _ in range((turns or {}).get(name, 1))]
            if repeat >= warmup:
                times[name].rounds.append(seconds)
    show_progress("")
    return times


def show_progress(what: str) -> None:
    """What is being measured, in one line of a terminal that the next one replaces: at most ten times a second, and between
    the measurements, so that it takes none of their time."""
    global _shown
    if sys.stderr.isatty() and (not what or time.monotonic() - _shown > 0.1):
        _shown = time.monotonic()
        sys.stderr.write(f"\r\x1b[K{what and f'  {what}'}")
        sys.stderr.flush()


_shown = -math.inf


def timed(run: Work) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_fresh_process(measure: Callable[..., T], *arguments: Any) -> T:
    """``measure(*arguments)`` in a process of its own. Whether glibc gives freed memory back to the system, and so who pays for
    page faults, depends on the largest tensors that a process has freed before."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def spread(values: list[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def peak_memory(run: Work, warm: bool = False) -> int:
    """Bytes of resident memory that ``run()`` needs beyond what was there before, at its peak (Linux).

    ``run`` must have run before (``warm``), so that what stays allocated does not count. A gradient counts if ``run`` frees it
    at its end, and does not if it leaves it for the next call to free.
    """
    if not warm:
        run()
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # return the freed memory that glibc keeps
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from the current value
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{key} is not in /proc/self/status; peak memory is measured on Linux only")


def available() -> int:
    """Bytes of memory that are free for use (Linux)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("MemAvailable is not in /proc/meminfo")


def touch_memory(most: int = 2**33) -> int:
    """Write ``most`` bytes of memory, or half of what is free, and free them again; returns how many.

    A virtual machine has only the memory that was used lately, and gets more from its host at the first touch: 3.1 s per GiB
    here, and 0.6 from then on. Who is measured first would pay for that, and a short measurement more than a long one.
    """
    size = min(most, available() // 2)
    with mmap.mmap(-1, max(size, mmap.PAGESIZE)) as memory:
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    return size


def matmul_rate(n: int = 2048, repeats: int = 10) -> float:
    """Floating-point operations per second of a large float32 matrix product."""
    a = torch.randn(n, n)
    return 2 * n**3 / interleaved({"matmul": lambda: a @ a}, repeats)["matmul"].spread.median


def copy_rate(n: int = 2**26, repeats: int = 10) -> float:
    """Bytes per second, read and written, of a large copy."""
    a, b = torch.ones(n), torch.zeros(n)
    return 8 * n / interleaved({"copy": lambda: b.copy_(a)}, repeats)["copy"].spread.median


def factor(value: float) -> str:
    """A ratio: three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio_cells(ratio: Sequence[float]) -> tuple[str, str]:
    """A ratio, and its quartiles: two cells of a table.

    >>> ratio_cells((39.21, 38.06, 41.7)), ratio_cells((1.0, 1.0, 1.0))
    (('39.2x', '38.1 to 41.7'), ('1x', ''))
    """
    median, low, high = (factor(x) for x in ratio)
    return f"{median}x", f"{low} to {high}" if low != high else ""


def time_cells(seconds: Sequence[float]) -> tuple[str, str]:
    """A time, and its quartiles: two cells of a table."""
    median, low, high = (readable(t) for t in seconds)
    return median, f"{low} to {high}" if low != high else ""


def readable(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
