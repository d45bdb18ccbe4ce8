"""Whether a run had the machine to itself: only then do its times tell something about the loss."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil

OTHERS = 0.1  # cores that other processes may keep busy, on average
OWN = 0.9  # cores that a run keeps busy on average; if fewer, it was stopped, or had to wait


class Load:
    """The CPU time since this object was made: that of this process, and that of all others."""

    def __init__(self) -> None:
        self.own, self.busy = time.process_time(), busy_seconds()

    def seconds(self) -> dict[str, float]:
        own = time.process_time() - self.own
        return {"own_cpu_seconds": own, "other_cpu_seconds": max(0.0, busy_seconds() - self.busy - own)}


def busy_seconds() -> float:
    """CPU time that all cores have spent on anything, also for other virtual machines (steal)."""
    times = psutil.cpu_times()._asdict()
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are a part of user and nice
    return sum(value for name, value in times.items() if name not in idle)


def alone(history: Sequence[dict[str, Any]]) -> bool:
    """Whether a run with this history had the machine to itself; False if the history does not say.

    >>> alone([{"seconds": 10.0, "own_cpu_seconds": 9.9, "other_cpu_seconds": 0.2}])
    True
    >>> alone([{"seconds": 10.0, "own_cpu_seconds": 9.9, "other_cpu_seconds": 8.0}])
    False
    """
    if not all("own_cpu_seconds" in record for record in history):
        return False
    total, own, others = (sum(r[key] for r in history) for key in ("seconds", "own_cpu_seconds", "other_cpu_seconds"))
    return own >= OWN * total and others <= OTHERS * total
