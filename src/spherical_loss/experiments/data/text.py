"""Text as numbers: tokens, a vocabulary, and encoded corpora that are cached as memory-mapped arrays.

Three kinds of tokens (``--tokens``):

- ``spaces``: split at spaces, for corpora that are already tokenized.
- ``words``: for raw English text; a word is a run of letters a-z in either case with inner apostrophes (``don't``), or of
  digits with inner points and commas (``1,000.50``); every other character but a space is a token of its own, and ``<br />`` is
  a space. The usual word counts of the IMDB reviews are counts of such words.
- ``unicode``: the same with the letters and digits of all scripts, and with combining accents.

Case is kept, and the end of every line is the token ``<eos>``. Files are read twice, in blocks: once to count the words, and
once to write their numbers. So neither the text nor a line needs to fit into memory. Only the vocabulary does, which is kept
below ``MAX_TYPES`` words while counting.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from typing import IO

import numpy as np
from tqdm import tqdm

from spherical_loss.experiments.errors import UsageError, UserError
from spherical_loss.experiments.files.atomic import named
from spherical_loss.experiments.files.failures import warn
from spherical_loss.files import DamagedFileError, load_json, save_json, sha256_of

EOS, UNK = "<eos>", "<unk>"
BLOCK = 2**22  # bytes that are read at once
MAX_WORD = 2**26  # bytes: a longer stretch without a space is not text
MAX_TYPES = 2**22  # word types that are counted at once: about 500 MB
LARGEST = 10_000  # words of a vocabulary whose size is not given
FORMAT = 2  # version of the cached files; part of their key

WORDS = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*|[0-9]+(?:[.,][0-9]+)*|\n|\S")
LETTER = r"(?:[^\W\d_][\u0300-\u036f]*)"  # and the accents after it
UNICODE_WORDS = re.compile(rf"{LETTER}+(?:['\u2019]{LETTER}+)*|\d+(?:[.,]\d+)*|\n|\S")


def split_spaces(text: str) -> list[str]:
    """
    >>> split_spaces("the cat\\n sat .\\n")
    ['the', 'cat', '<eos>', 'sat', '.', '<eos>']
    """
    return text.replace("\n", f" {EOS} ").split()


def split_words(text: str, words: re.Pattern[str] = WORDS) -> list[str]:
    """
    >>> split_words("It's 1,000.50 (naïve)<br />No\\n")
    ["It's", '1,000.50', '(', 'na', 'ï', 've', ')', 'No', '<eos>']
    >>> split_words("(naïve) Größe привет_1\\n", UNICODE_WORDS)
    ['(', 'naïve', ')', 'Größe', 'привет', '_', '1', '<eos>']
    """
    return [EOS if token == "\n" else token for token in words.findall(text.replace("<br />", " "))]


TOKENS: dict[str, Callable[[str], list[str]]] = {
    "spaces": split_spaces,
    "words": split_words,
    "unicode": partial(split_words, words=UNICODE_WORDS),
}


@dataclass(frozen=True)
class Corpus:
    """An encoded corpus: the vocabulary, most frequent first after the two markers, and an array of numbers per group."""

    words: list[str]
    parts: Sequence[np.ndarray]
    types: int
    """Number of word types in the counted files, in the vocabulary or not, without the markers."""

    @property
    def D(self) -> int:
        return len(self.words)


def blocks(path: Path, bar: tqdm | None = None) -> Iterator[str]:
    """The text in pieces that end between tokens; every line ends in a newline, the last one too."""
    lines, left, ended = 0, b"", True
    with open(path, "rb") as file:
        while chunk := file.read(BLOCK):
            if bar is not None:
                bar.update(len(chunk))
            left += chunk
            cut = last_gap(left)
            if cut == 0:
                if len(left) > MAX_WORD:
                    raise UserError(
                        f"{path}: line {lines + 1} has {len(left):,} bytes without a space, more than the {MAX_WORD:,} that a "
                        "word may have; this is not text, or its spaces and line ends are missing"
                    )
                continue
            yield decoded(left[:cut], path, lines)
            lines, ended = lines + left.count(b"\n", 0, cut), left[cut - 1 : cut] == b"\n"
            left = left[cut:]
    if left.strip() or not ended:
        yield decoded(left, path, lines) + "\n"


def last_gap(data: bytes) -> int:
    """Where to cut: after the last line end, or else after the last space outside ``<br />``; 0 if there is neither.

    >>> last_gap(b"a b\\nc d"), last_gap(b"a b<br /"), last_gap(b"ab")
    (4, 2, 0)
    """
    newline = data.rfind(b"\n")
    if newline >= 0:
        return newline + 1
    space = data.rfind(b" ")
    while space >= 0 and data[:space].endswith(b"<br"):
        space = data.rfind(b" ", 0, space)
    return space + 1


def decoded(data: bytes, path: Path, lines: int) -> str:
    try:
        return data.decode("utf-8").lstrip("\ufeff")
    except UnicodeDecodeError as error:
        line = lines + data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}: line {line} is not valid UTF-8 (byte 0x{data[error.start]:02x}); convert the file first, for example "
            "with 'iconv -f latin1 -t utf-8'"
        ) from error


def count_words(paths: Sequence[Path], tokens: str, quiet: bool = True, most: int | None = None) -> Counter[str]:
    """How often each word occurs. Whenever there are more than ``most`` types (``MAX_TYPES``), the rarest are dropped.

    Words that have occurred at most k times so far are dropped, with the smallest k that leaves at most half of ``most`` types.
    A dropped word that occurs again is counted from zero. So the counts of frequent words are exact, and those of rare words
    are too small by at most k each time they were dropped.
    """
    most = MAX_TYPES if most is None else most
    counts: Counter[str] = Counter()
    split = TOKENS[tokens]
    with progress_bar("counting words", paths, quiet) as bar:
        for path in paths:
            for text in blocks(path, bar):
                counts.update(split(text))
                if len(counts) > most:
                    counts = pruned(counts, most // 2)
    return counts


def pruned(counts: Counter[str], most: int) -> Counter[str]:
    """
    >>> sorted(pruned(Counter("aaabbcd"), 2).items())
    [('a', 3), ('b', 2)]
    """
    k = sorted(counts.values(), reverse=True)[most]
    return Counter({word: n for word, n in counts.items() if n > k})


def choose_words(counts: Counter[str], vocabulary: int | str | None, min_count: int, name: str) -> list[str]:
    """``<unk>``, ``<eos>`` and the most frequent words, ``vocabulary`` in all; or, for "full", all seen ``min_count`` times;
    for None, these, but ``LARGEST`` in all at most.

    >>> choose_words(Counter({"a": 3, "b": 1, "c": 3, "<eos>": 2}), 4, 1, "corpus.txt")
    ['<unk>', '<eos>', 'a', 'c']
    >>> choose_words(Counter({"a": 3, "b": 1, "c": 3, "<eos>": 2}), "full", 2, "corpus.txt")
    ['<unk>', '<eos>', 'a', 'c']
    """
    words = [word for word in counts if word not in (UNK, EOS)]
    if not words:
        raise UserError(f"{name} is empty: it has no words")
    words.sort(key=lambda word: (-counts[word], word))
    if vocabulary is None or isinstance(vocabulary, str):
        words = [word for word in words if counts[word] >= min_count]
        if not words:
            raise UsageError(f"{name} has no word that occurs {min_count} times; lower --min-count")
        return [UNK, EOS, *words] if vocabulary else [UNK, EOS, *words[: LARGEST - 2]]
    if vocabulary > len(words) + 2:
        raise UsageError(
            f"--vocabulary is {vocabulary}, but {name} has only {len(words)} words, {len(words) + 2} with {UNK} and {EOS}; use "
            f"--vocabulary {len(words) + 2} or less, or --vocabulary full; if it should have more words, the file is incomplete"
        )
    return [UNK, EOS, *words[: vocabulary - 2]]


def encode(path: Path, words: Sequence[str], tokens: str, file: IO[bytes], bar: tqdm) -> None:
    """Write the number of every token of ``path`` to ``file``, int32 each; words outside the vocabulary are ``<unk>``."""
    numbers = {word: i for i, word in enumerate(words)}
    split, number, unknown = TOKENS[tokens], numbers.get, numbers[UNK]
    for text in blocks(path, bar):
        found = split(text)
        file.write(np.fromiter(map(number, found, repeat(unknown)), np.int32, len(found)).tobytes())


def progress_bar(text: str, paths: Sequence[Path], quiet: bool) -> tqdm:
    """A progress bar in bytes; written to a file or a pipe, it is updated only every ten seconds."""
    size, every = sum(path.stat().st_size for path in paths), 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=size, desc=text, unit="B", unit_scale=True, leave=False, disable=quiet, mininterval=every, delay=1.0)


def read_corpus(
    groups: Sequence[Sequence[Path]],
    counted: int,
    tokens: str,
    vocabulary: int | str | None,
    min_count: int,
    cache: Path,
    quiet: bool = True,
) -> Corpus:
    """Groups of files as arrays of word numbers. The vocabulary is counted on the first ``counted`` groups.

    The cache has a folder per corpus, named by the files' checksums and these options. It holds ``words.json`` and an array
    per group. The second time, it is only opened.
    """
    key = hashlib.sha256(json.dumps([FORMAT, checksums(groups), counted, tokens, vocabulary, min_count]).encode()).hexdigest()
    folder = cache / key[:20]
    if folder.is_dir():
        try:
            return open_corpus(folder, len(groups))
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            warn(f"{error}; encoding the text again")
            shutil.rmtree(folder)
    files = [path for group in groups[:counted] for path in group]
    counts = count_words(files, tokens, quiet)
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    words = choose_words(counts, vocabulary, min_count, name)
    write_corpus(folder, groups, words, len(counts.keys() - {EOS, UNK}), tokens, quiet)
    return open_corpus(folder, len(groups))


def open_corpus(folder: Path, groups: int) -> Corpus:
    stored = load_json(folder / "words.json")
    for i, expected in zip(range(groups), stored["checksums"], strict=True):
        if checksum(folder / f"{i}.i32") != expected:
            raise DamagedFileError(f"{folder / f'{i}.i32'} is damaged: its checksum should be {expected[:12]}")
    # Copy-on-write, since torch takes no read-only arrays. Nothing writes, so nothing is copied.
    parts = [np.memmap(folder / f"{i}.i32", np.int32, "c") for i in range(groups)]
    return Corpus(stored["words"], parts, stored["types"])


def write_corpus(
    folder: Path, groups: Sequence[Sequence[Path]], words: list[str], types: int, tokens: str, quiet: bool
) -> None:
    """Write to a temporary folder and rename it at the end, so that a killed process leaves no incomplete corpus."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    unfinished.mkdir(parents=True)
    try:
        with progress_bar("encoding", [path for group in groups for path in group], quiet) as bar:
            for i, group in enumerate(groups):
                with open(unfinished / f"{i}.i32", "wb") as file:
                    for path in group:
                        before = file.tell()
                        encode(path, words, tokens, file, bar)
                        if file.tell() == before:
                            raise UserError(f"{path} is empty: it has no words")
                    file.flush()
                    os.fsync(file.fileno())
        sums = [checksum(unfinished / f"{i}.i32") for i in range(len(groups))]
        save_json({"types": types, "checksums": sums, "words": words}, unfinished / "words.json")
        if not folder.is_dir():  # another process may have been faster
            os.replace(unfinished, folder)
    except OSError as error:
        if error.filename is not None:
            raise
        raise named(error, folder) from error  # the error of a full disk does not name the file
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def checksums(groups: Sequence[Sequence[Path]]) -> list[list[str]]:
    """SHA-256 of every file; a path that is not a file is an error."""
    for path in (path for group in groups for path in group):
        if not path.is_file():
            raise UserError(f"{path} is not a file; give a text file in UTF-8")
    return [[checksum(path) for path in group] for group in groups]


def checksum(path: Path) -> str:
    """SHA-256 of the content; computed once while the file's size and time of modification stay the same."""
    status = path.stat()
    return _checksum(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _checksum(path: Path, size: int, modified: int) -> str:
    return sha256_of(path)
