"""Vocabulary and encoding of text files."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spherical_loss.experiments.data import text
from spherical_loss.experiments.data.text import count_words, read_corpus
from spherical_loss.experiments.errors import UserError
from tests.support.damage import flip_bit


def corpus_of(path: Path, cache: Path, vocabulary: int | str = "full", tokens: str = "words", min_count: int = 1, **options):
    return read_corpus([[path]], 1, tokens, vocabulary, min_count, cache, **options)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_numbers_lead_back_to_the_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "The cat sat.\nThe dog didn't: 1,000.5 cafés<br />No")
    corpus = corpus_of(path, tmp_path / "cache")
    (ids,) = corpus.parts
    back = " ".join(corpus.words[i] for i in ids)
    assert back == "The cat sat . <eos> The dog didn't : 1,000.5 caf é s No <eos>"
    assert corpus.types == 12 == corpus.D - 2


def test_most_frequent_words_are_kept_and_the_others_are_unknown(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "a b a c\nb a d <unk>\n")
    corpus = corpus_of(path, tmp_path / "cache", vocabulary=4, tokens="spaces")
    assert corpus.words == ["<unk>", "<eos>", "a", "b"]
    assert corpus.parts[0].tolist() == [2, 3, 2, 0, 1, 3, 2, 0, 0, 1]
    assert corpus.types == 4  # the marker in the text does not count


def test_min_count(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "a b a c b a d\n")
    assert corpus_of(path, tmp_path / "cache", min_count=2).words == ["<unk>", "<eos>", "a", "b"]
    with pytest.raises(UserError, match="no word that occurs 9 times; lower --min-count"):
        corpus_of(path, tmp_path / "cache", min_count=9)


@pytest.mark.parametrize("tokens", ["words", "spaces"])
@pytest.mark.parametrize("lines", [True, False])
def test_blocks_do_not_change_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: str, lines: bool) -> None:
    random = np.random.default_rng(0)
    words = ["it's", "ein", "Käse", "1,5", "<br />", "x" * 30, "(", "日本", "ok."]
    pieces = [words[i] + ("\n" if lines and i % 4 == 0 else " ") for i in random.integers(0, len(words), 3000)]
    content = "".join(pieces)
    path = written(tmp_path / "a.txt", content)
    whole = corpus_of(path, tmp_path / "whole", tokens=tokens)
    monkeypatch.setattr(text, "BLOCK", 64)  # far less than a line without line ends
    blocks = corpus_of(path, tmp_path / "blocks", tokens=tokens)
    assert blocks.words == whole.words
    np.testing.assert_array_equal(blocks.parts[0], whole.parts[0])
    # The same from the definition, on the whole text at once.
    pattern = r"[A-Za-z]+(?:'[A-Za-z]+)*|[0-9]+(?:[.,][0-9]+)*|\S" if tokens == "words" else r"\S+"
    plain = content.replace("<br />", " ") if tokens == "words" else content
    expected = [t for line in plain.split("\n") for t in [*re.findall(pattern, line), "<eos>"]]
    if content.endswith("\n"):
        expected.pop()
    assert [whole.words[i] for i in whole.parts[0]] == expected


def test_the_second_time_is_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.txt", "a b c a b\n")
    first = corpus_of(path, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(text, "count_words", lambda *a: pytest.fail("counted again"))
        patch.setattr(text, "encode", lambda *a: pytest.fail("encoded again"))
        again = corpus_of(path, tmp_path / "cache")
        assert isinstance(again.parts[0], np.memmap)
        assert (again.words, again.types, again.parts[0].tolist()) == (first.words, first.types, first.parts[0].tolist())
        copy = written(tmp_path / "elsewhere.txt", path.read_bytes())  # the content is the key, not the name
        assert corpus_of(copy, tmp_path / "cache").words == first.words
    written(path, "a b c a d\n")
    assert "d" in corpus_of(path, tmp_path / "cache").words
    assert corpus_of(path, tmp_path / "cache", vocabulary=3).D == 3


@pytest.mark.parametrize(("name", "content"), [("words.json", ""), ("words.json", "{}"), ("0.i32", "123"), ("0.i32", "1234")])
def test_a_damaged_cache_is_made_again(tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.txt", "a b c a b\n")
    first = corpus_of(path, tmp_path / "cache")
    words, numbers = first.words, first.parts[0].tolist()
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / name).write_text(content)
    again = corpus_of(path, tmp_path / "cache")
    assert (again.words, again.parts[0].tolist()) == (words, numbers)
    assert f"{folder / name} is damaged" in capsys.readouterr().err
    (folder / "0.i32").unlink()
    assert corpus_of(path, tmp_path / "cache").words == words


@pytest.mark.parametrize("name", ["words.json", "0.i32"])
def test_a_flipped_bit_anywhere_in_the_cache_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.txt", "a b c a b\n")
    first = corpus_of(path, tmp_path / "cache")
    words, numbers, types = first.words, first.parts[0].tolist(), first.types
    (folder,) = (tmp_path / "cache").iterdir()
    for byte in range((folder / name).stat().st_size):
        flip_bit(folder / name, byte, byte % 8)
        again = corpus_of(path, tmp_path / "cache")
        assert f"{folder / name} is damaged" in capsys.readouterr().err
        assert (again.words, again.parts[0].tolist(), again.types) == (words, numbers, types)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.txt", "a b c a b\n")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(text, "encode", full)
    with pytest.raises(OSError, match=r"No space left on device: .*cache"):
        corpus_of(path, tmp_path / "cache")


def test_letters_of_all_scripts() -> None:
    assert text.TOKENS["unicode"]("don\u2019t 日本語 e\u0301te\u0301 x_1,5<br />1.000,5\n") == [
        *("don\u2019t", "日本語", "e\u0301te\u0301", "x", "_", "1,5", "1.000,5", "<eos>")
    ]


def test_a_failure_leaves_no_half_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.txt", "a b c a b\n")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text, "encode", fail)
        with pytest.raises(KeyboardInterrupt):
            corpus_of(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert corpus_of(path, tmp_path / "cache").D == 5


def test_the_memory_of_counting_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    rare = [f"w{i}" for i in range(3000)]
    common = [f"c{i}" for i in random.integers(0, 10, 3000)]
    path = written(tmp_path / "a.txt", " ".join(word for pair in zip(rare, common, strict=True) for word in pair))
    monkeypatch.setattr(text, "BLOCK", 512)
    largest = 0
    original = text.pruned

    def watched(counts: Counter[str], most: int) -> Counter[str]:
        nonlocal largest
        largest = max(largest, len(counts))
        result = original(counts, most)
        assert len(result) <= most
        return result

    monkeypatch.setattr(text, "pruned", watched)
    counts = count_words([path], "spaces", most=100)
    assert 100 < largest < 250
    exact = Counter(common)
    assert {word: counts[word] for word in exact} == exact


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "a.txt is empty"),
        (" \n \n", "a.txt is empty"),
        (b"fine\nna\xefve\n", "line 2 is not valid UTF-8 (byte 0xef)"),
        ("a b c\n", "--vocabulary is 50, but a.txt has only 3 words, 5 with <unk> and <eos>"),
    ],
)
def test_bad_texts(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = written(tmp_path / "a.txt", content)
    with pytest.raises(UserError, match=re.escape(said)):
        corpus_of(path, tmp_path / "cache", vocabulary=50)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.txt is not a file"):
        corpus_of(tmp_path / "nothing.txt", tmp_path / "cache")


def test_a_word_longer_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK", 100)
    monkeypatch.setattr(text, "MAX_WORD", 1000)
    path = written(tmp_path / "a.txt", "a line\n" + "x" * 2000 + "\n")
    with pytest.raises(UserError, match=r"line 2 has 1,093 bytes without a space.*its spaces and line ends are missing"):
        corpus_of(path, tmp_path / "cache")


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.txt", "a b c\n")
    bars = []
    original = text.progress_bar
    monkeypatch.setattr(text, "progress_bar", lambda *arguments: bars.append(original(*arguments)) or bars[-1])
    corpus_of(path, tmp_path / "cache", quiet=False)
    assert [(bar.desc, bar.n, bar.total) for bar in bars] == [("counting words", 6, 6), ("encoding", 6, 6)]
    corpus_of(path, tmp_path / "quiet", quiet=True)
    assert [bar.n for bar in bars] == [6, 6, 0, 0]
