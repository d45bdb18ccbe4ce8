"""The best perplexity that a hidden size allows, for the words of Penn Treebank and of the IMDB reviews.

``python -m benchmarks.word_capacity`` counts the words, ``python -m benchmarks.publish`` writes the table into the docs.
Needs the data of the tasks ``ptb`` and ``imdb``.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.timing import RESULTS
from spherical_loss.capacity import best_perplexity
from spherical_loss.experiments.data.corpora import imdb, load, ptb
from spherical_loss.experiments.table import Table, show
from spherical_loss.experiments.training.settings import LanguageSettings

SIZES = (64, 128, 300, 1_000, 3_000)


def measured() -> list[dict[str, Any]]:
    repeated, full = (LanguageSettings(vocabulary="full", min_count=n, tokens="words") for n in (2, 1))
    texts = {
        "Penn Treebank": (ptb, LanguageSettings()),
        "IMDB reviews, words that occur twice": (imdb, repeated),
        "IMDB reviews, all words": (imdb, full),
    }
    rows = []
    for name, (corpus, settings) in texts.items():
        counts = load(corpus, settings).train.frequencies
        rows.append({"text": name, "words": len(counts), "perplexity": {str(d): best_perplexity(counts, d) for d in SIZES}})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    cells = [[row["text"], f"{row['words']:,}", *(f"{row['perplexity'][str(d)]:.2g}" for d in SIZES)] for row in rows]
    return Table("The best possible perplexity", ["text", "words", *(f"d = {d:,}" for d in SIZES)], cells)


def main() -> None:
    rows = measured()
    (RESULTS / "capacity.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(table(rows))


if __name__ == "__main__":
    main()
