"""``python -m spherical_loss.experiments.tuning.ship FILE``: make tuned values part of the package. For maintainers.

FILE is the ``tuned.json`` of an ``--out`` folder; its tasks and losses replace those that are shipped, and the others stay.
Run it in a checkout, and commit the file that it names.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spherical_loss.experiments.tuning.tuned import SHIPPED, read_tuned, store_tuned


def ship(path: Path, shipped: Path = SHIPPED) -> int:
    """Returns how many values were added or replaced."""
    entries = [(task, loss, entry) for task, losses in read_tuned(path).items() for loss, entry in losses.items()]
    for task, loss, entry in entries:
        store_tuned(task, loss, entry, shipped)
    return len(entries)


if __name__ == "__main__":
    print(f"{ship(Path(sys.argv[1]))} tuned losses -> {SHIPPED}")
