"""Quality for time, and the gap as classes are added: ``python -m benchmarks.quality time`` and ``... classes``.

What is stored already is kept, so a study that was interrupted resumes. Without training anything new, ``python -m
benchmarks.publish`` writes the tables and the pictures. Needs the data of the task ``imdb``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.quality.contenders import CONTENDERS
from benchmarks.quality.page import ONE_HEAD, TIERS
from benchmarks.quality.study import Budget, Study
from benchmarks.timing import RESULTS

STUDIES = {
    # Trials as long as the trainings: after a minute, larger rates win than after five.
    "time": (
        Budget(300, 300, "seconds"),
        ("115,519", "all"),
        tuple(name for name in CONTENDERS if name != TIERS),
    ),
    "classes": (
        Budget(2_000, 500, "steps"),
        ("100", "1,000", "10,000", "100,000"),
        (ONE_HEAD, TIERS),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--vocabularies", nargs="+", help="some of those of the study")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, metavar="CONTENDER", help="some of: " + "; ".join(CONTENDERS)
    )
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, each on one thread (default: 2)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder of quality-time.json and quality-classes.json"
    )
    options = parser.parse_args()
    budget, vocabularies, contenders = STUDIES[options.study]
    for vocabulary in options.vocabularies or vocabularies:
        searched = vocabularies[0] if budget.unit == "seconds" else vocabulary
        study = Study(options.results / f"quality-{options.study}.json", vocabulary, budget, searched)
        study.run(options.contenders or contenders, options.workers)


if __name__ == "__main__":
    main()
