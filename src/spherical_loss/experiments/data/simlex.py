"""SimLex-999: how well the similarity of word vectors agrees with human judgement.

F. Hill, R. Reichart, A. Korhonen, SimLex-999: Evaluating Semantic Models with (Genuine) Similarity Estimation, 2015.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss.experiments.errors import UserError


class Pairs(NamedTuple):
    """Pairs of words that are in a vocabulary: their numbers ``(n, 2)``, and the human scores ``(n,)``."""

    words: Tensor
    scores: np.ndarray


@lru_cache(maxsize=4)
def read_simlex(path: Path) -> list[tuple[str, str, float]]:
    """The pairs of ``SimLex-999.txt`` and their scores; none if there is no such file."""
    if not path.is_file():
        return []
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        names = header.split("\t")
        first, second, score = (names.index(name) for name in ("word1", "word2", "SimLex999"))
        rows = [line.split("\t") for line in lines]
        return [(row[first], row[second], float(row[score])) for row in rows]
    except (ValueError, IndexError) as error:
        raise UserError(
            f"{path} is not the SimLex-999 file, with word1, word2 and SimLex999 in tab-separated columns"
        ) from error


def pairs_in(words: Sequence[str], simlex: list[tuple[str, str, float]]) -> Pairs:
    """The pairs of which both words are in the vocabulary."""
    numbers = {word: i for i, word in enumerate(words)}
    found = [(numbers[a], numbers[b], score) for a, b, score in simlex if a in numbers and b in numbers]
    both = torch.tensor([pair[:2] for pair in found], dtype=torch.long).reshape(-1, 2)
    return Pairs(both, np.array([pair[2] for pair in found]))


def agreement(first: Tensor, second: Tensor, scores: np.ndarray) -> float | None:
    """Spearman's rho of the cosine similarities of ``first`` and ``second`` (n, d) with ``scores`` (n,).

    None where it is not defined: fewer than two pairs, or the same similarity for all pairs, as with zero weights.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> y = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    >>> agreement(x, y, np.array([9.0, 5.0, 1.0]))
    1.0
    """
    import scipy.stats  # takes a second to import, which only language models should pay for

    similarity = F.cosine_similarity(first.double(), second.double()).cpu().numpy()
    if len(scores) < 2 or np.ptp(similarity) == 0 or np.ptp(scores) == 0:
        return None
    return round(float(scipy.stats.spearmanr(similarity, scores).statistic), 12)
