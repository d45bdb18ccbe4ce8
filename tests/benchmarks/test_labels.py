"""The comparison with sigmoid cross-entropy, with few labels and documents."""

from __future__ import annotations

import torch

from benchmarks import labels


def test_every_contender_learns() -> None:
    torch.manual_seed(0)
    corpus = labels.Corpus(labels=20, vocabulary=100)
    rows = labels.measured(corpus, (1_024, 100, 200), epochs=5, rates=(0.03,))
    assert [(row["loss"], row["head"]) for row in rows] == [(c.name, c.Kind.__name__) for c in labels.contenders()]
    assert all(row["precision"]["1"] > 0.4 for row in rows)  # always the most frequent label: about a quarter
    assert labels.table(rows).rows[0][2] == "0.03"


def test_documents_have_different_labels_and_words_of_their_own() -> None:
    torch.manual_seed(0)
    corpus = labels.Corpus(labels=20, vocabulary=100)
    words, found = corpus.draw(200)
    for row, its_words in zip(found.tolist(), words.tolist(), strict=True):
        true = [label for label in row if label != labels.IGNORED]
        assert 1 <= len(set(true)) == len(true) <= 6
        own = {word for label in true for word in corpus.own[label].tolist()}
        assert set(its_words[:-8]) <= own | {0}
