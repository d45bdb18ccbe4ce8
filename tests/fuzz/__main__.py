"""``python -m tests.fuzz``: random attacks for as long as one likes; the first one that succeeds is printed, with its seed."""

from __future__ import annotations

import argparse
import time

from tests.fuzz import damage, losses, training

ATTACKS = {"losses": losses.compare, "training": training.train, "damage": damage.damage}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run in total")
    parser.add_argument("--seed", type=int, default=0, help="of the first attack of each kind; the others follow")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options = parser.parse_args()
    for name in options.attacks:
        end, seed = time.monotonic() + 60 * options.minutes / len(options.attacks), options.seed
        while time.monotonic() < end:
            try:
                ATTACKS[name](seed)
            except Exception as error:
                print(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                return 1
            seed += 1
        print(f"{name}: {seed - options.seed:,} attacks, seeds {options.seed} to {seed - 1}, none succeeded", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
