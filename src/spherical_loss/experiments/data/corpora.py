"""The corpora of the language models: which files they are, and how they are split.

The files are in ``$SPHERICAL_LOSS_DATA`` (default: the user's cache folder), their encoded copies in its folder ``encoded``:

    ptb/ptb.{train,valid,test}.txt           Penn Treebank as prepared by T. Mikolov
    one-billion-word/**/news.en-*-of-00100   training shards of the One Billion Word benchmark; any number of them
    one-billion-word/**/news.en.heldout-*    its held-out shards; heldout-00000-of-00050 is the test set
    imdb/imdb.{train,test}.txt               aclImdb, one review per line
    SimLex-999/SimLex-999.txt                word similarities; without it that score is left out
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pooch
import torch
from torch import Generator, Tensor

from spherical_loss.experiments.data.folder import VARIABLE, data_folder
from spherical_loss.experiments.data.simlex import Pairs, pairs_in, read_simlex
from spherical_loss.experiments.data.text import EOS, Corpus, checksums, read_corpus
from spherical_loss.experiments.errors import UsageError, UserError
from spherical_loss.experiments.training.settings import LanguageSettings

HELD_OUT = 100_000  # words: the limit for a validation or test set that is cut from a larger text
SMALLEST = 1_000  # words to train on, below which the figures are noise


class Budget(NamedTuple):
    """Outputs that may be computed to measure a validation or test set: a measurement takes about ``budget / D`` examples."""

    ranked: int
    """To rank the words, for the top-10 error."""
    logits: int
    """For a loss outside the family. 10^9 covers HELD_OUT words with a vocabulary of 10,000."""


FEW = 10_000  # words of a vocabulary, up to which the validation set of a loss outside the family is as large as the test set
# With 10^9 outputs, the sampled softmax would validate for 19% of the time it trains on 800,000 words, at D = 115,517.
VALID, TEST = Budget(10**8, 3 * 10**8), Budget(3 * 10**8, 10**9)


@dataclass(frozen=True)
class TextSet:
    """A stretch of a text, ``ids[first:last]``: every word is a target, and the ``context`` words before it are the input.

    Contexts run across line ends, which are words too (``<eos>``). The text is padded with line ends before its start.
    """

    ids: Tensor
    first: int
    last: int
    context: int
    words: list[str]
    pairs: Pairs
    budget: Budget
    pieces: int = 0
    """Pieces of an online pass: epoch k trains on the k-th piece. 0: every epoch trains on the whole text."""

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def D(self) -> int:
        return len(self.words)

    @property
    def frequencies(self) -> Tensor:
        """How often each word occurs, ``(D,)``; words that never occur (such as an unused ``<unk>``) count once."""
        counts = torch.zeros(self.D, dtype=torch.int64)
        for block in self.ids[self.first : self.last].split(2**24):
            counts += torch.bincount(block.cpu(), minlength=self.D)
        return counts.clamp_min(1)

    @property
    def ranked(self) -> Tensor:
        """The rows on which the words are ranked."""
        return self.spaced(self.budget.ranked)

    @property
    def with_logits(self) -> Tensor:
        """The rows on which a loss that needs all outputs is measured."""
        return self.spaced(TEST.logits if self.D <= FEW else self.budget.logits)

    def spaced(self, outputs: int) -> Tensor:
        """Evenly spaced rows with at most ``outputs`` outputs in total; all rows if they have no more."""
        n = min(len(self), max(1, outputs // self.D))
        return torch.arange(n) * len(self) // n

    def order(self, epoch: int, generator: Generator) -> Tensor:
        """All rows, or the rows of the epoch's piece, shuffled."""
        if self.pieces == 0:
            return torch.randperm(len(self), generator=generator)
        start, stop = (len(self) * k // self.pieces for k in (epoch, epoch + 1))
        return start + torch.randperm(stop - start, generator=generator)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Contexts ``(n, context)`` and targets ``(n,)``."""
        at = rows + self.first
        window = at.unsqueeze(1) + torch.arange(-self.context, 0, device=rows.device)
        x = torch.where(window >= 0, self.ids[window.clamp_min(0)].long(), self.words.index(EOS))
        return x, self.ids[at].long()

    def to(self, device: torch.device) -> TextSet:
        return dataclasses.replace(self, ids=self.ids.to(device))


class TextSplits(NamedTuple):
    """What a task gives to the training loop."""

    train: TextSet
    valid: TextSet
    test: TextSet


class Source(NamedTuple):
    """The files of a corpus. Without files of their own, validation and test sets are cut from the end of the training text."""

    train: list[Path]
    valid: list[Path]
    test: list[Path]
    whole_vocabulary: bool = False
    """Whether the vocabulary is counted on all files, or on the training files alone."""


def ptb(settings: LanguageSettings) -> Source:
    train, valid, test = (existing(f"ptb/ptb.{part}.txt") for part in ("train", "valid", "test"))
    return Source([train], [valid], [test])


def one_billion_word(settings: LanguageSettings) -> Source:
    """Train on the training shards, or, if there are none, on the held-out shards outside the test set."""
    folder = data_folder() / "one-billion-word"
    held_out = sorted(folder.rglob("news.en.heldout-*"))
    train = sorted(folder.rglob("news.en-*-of-*"))
    test = [path for path in held_out if path.name.startswith("news.en.heldout-00000-")]
    others = [path for path in held_out if path not in test]
    if not (train or others):
        raise UserError(
            f"{folder} has no shards of the One Billion Word benchmark (news.en-00001-of-00100 and so on, or "
            f"news.en.heldout-00001-of-00050 and so on); put some there, or point {VARIABLE} to a folder that has them"
        )
    return Source(train, others, test) if train else Source(others, [], test)


def imdb(settings: LanguageSettings) -> Source:
    """The vocabulary is counted on all 100,000 reviews, as in its usual figures (197,295 types, 115,517 seen twice or more)."""
    train, test = (existing(f"imdb/imdb.{part}.txt", "the reviews of aclImdb, one per line") for part in ("train", "test"))
    return Source([train], [], [test], whole_vocabulary=True)


def text(settings: LanguageSettings) -> Source:
    if settings.file is None:
        raise UsageError("the task text needs a file: give it with --file, for example --file corpus.txt")
    train, valid, test = ([Path(name).expanduser()] if name else [] for name in (settings.file, settings.valid, settings.test))
    return Source(train, valid, test)


def existing(name: str, what: str = "") -> Path:
    path = data_folder() / name
    if not path.is_file():
        of = f" ({what})" if what else ""
        raise UserError(
            f"{path} is missing{of}; 'spherical-loss data get {path.parent.name}' says where it comes from; put it there, or "
            f"point {VARIABLE} to a folder that has {name}"
        )
    return path


Find = Callable[[LanguageSettings], Source]


def prepared(find: Find, settings: LanguageSettings, quiet: bool) -> LanguageSettings:
    """The settings with the checksum of the files, which distinguishes runs on different texts. Encodes the text if needed."""
    source = find(settings)
    sums = checksums(source[:3])
    splits = load(find, settings, quiet)
    if len(splits.train) < SMALLEST:
        raise UserError(
            f"{len(splits.train):,} words are left to train on, too few to mean anything: give a text of {2 * SMALLEST:,} "
            "words at least, or validate and test on other texts with --valid and --test"
        )
    if not quiet:
        words = ", ".join(
            f"{len(part):,} words to {verb}" for part, verb in zip(splits, ("train", "validate", "test"), strict=True)
        )
        files = f"{len(source.train)} training file{'s' if len(source.train) > 1 else ''}"
        few = {"softmax's perplexity": splits.test.with_logits, "top-10 error": splits.test.ranked}
        fewer = "".join(f", {what} of {len(rows):,} of them" for what, rows in few.items() if len(rows) < len(splits.test))
        print(f"{files}: {words}{fewer}; vocabulary of {splits.train.D:,}")
    names = {name: getattr(settings, name) for name in ("file", "valid", "test")}
    found: dict[str, Any] = {
        name: file and os.path.normpath(file) for name, file in names.items()
    }  # ./corpus.txt is corpus.txt
    found["corpus"] = hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:12]
    return dataclasses.replace(settings, vocabulary=settings.vocabulary or splits.train.D, **found)


def load(find: Find, settings: LanguageSettings, quiet: bool = True) -> TextSplits:
    """Training, validation and test sets."""
    source = find(settings)
    groups = [group for group in source[:3] if group]
    counted = len(groups) if source.whole_vocabulary else 1
    corpus = read_corpus(groups, counted, settings.tokens, settings.vocabulary, settings.min_count, encoded_folder(), quiet)
    pairs = vocabulary_pairs(tuple(corpus.words))
    parts = iter(corpus.parts)
    train, valid, test = (np.asarray(next(parts)) if group else None for group in source[:3])
    assert train is not None
    return split(corpus, train, valid, test, pairs, settings)


def encoded_folder() -> Path:
    """``encoded`` in the data folder, or, if that is read-only, in the user's cache folder."""
    folder = data_folder() / "encoded"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return folder if os.access(there, os.W_OK) else Path(pooch.os_cache("spherical-loss")) / "encoded"


def split(
    corpus: Corpus,
    train: np.ndarray,
    valid: np.ndarray | None,
    test: np.ndarray | None,
    pairs: Pairs,
    settings: LanguageSettings,
) -> TextSplits:
    """A missing set is cut from the end of the training text: a tenth of it, at most ``HELD_OUT`` words."""
    tail, last = min(HELD_OUT, len(train) // 10), len(train)
    if tail == 0:
        raise UserError(f"a text of {len(train)} words is too short to train on: it needs a few hundred at least")

    def part(array: np.ndarray, first: int, last: int, budget: Budget) -> TextSet:
        return TextSet(torch.from_numpy(array), first, last, settings.context, corpus.words, pairs, budget)

    sets: list[TextSet] = []
    for array, budget in ((test, TEST), (valid, VALID)):
        if array is None:
            sets.append(part(train, last - tail, last, budget))
            last -= tail
        else:
            # An online corpus is large, and its test set may be, too: the beginning of the test set is enough.
            sets.append(part(array, 0, min(len(array), HELD_OUT) if settings.online else len(array), budget))
    if settings.words is not None:
        last = min(last, settings.words)
    if settings.online and last < settings.epochs:
        raise UsageError(
            f"{last} words to train on cannot be cut in {settings.epochs} pieces: lower --epochs, or raise --words"
        )
    whole = part(train, 0, last, VALID)
    return TextSplits(dataclasses.replace(whole, pieces=settings.epochs if settings.online else 0), sets[1], sets[0])


@lru_cache(maxsize=4)
def vocabulary_pairs(words: tuple[str, ...]) -> Pairs:
    return pairs_in(words, read_simlex(data_folder() / "SimLex-999" / "SimLex-999.txt"))
