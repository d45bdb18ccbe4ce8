"""Corpora of the language models: contexts and targets, what is trained and validated on, and where it is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from spherical_loss.experiments.data import corpora
from spherical_loss.experiments.data.folder import VARIABLE
from spherical_loss.experiments.data.simlex import read_simlex
from spherical_loss.experiments.errors import UserError
from tests.experiments.small_texts import command, make_run, start


def test_contexts_and_targets(texts: Path) -> None:
    _, _, _, splits = start(make_run())
    words = [w for line in (texts / "ptb/ptb.train.txt").read_text().splitlines() for w in [*line.split(), "<eos>"]]
    assert len(splits.train) == len(words)
    rows = torch.tensor([0, 1, 5, len(words) - 1])
    x, target = splits.train.batch(rows)
    padded = ["<eos>"] * 3 + words
    for row, context, word in zip(rows.tolist(), x.tolist(), target.tolist(), strict=True):
        assert [splits.train.words[i] for i in context] == padded[row : row + 3]
        assert splits.train.words[word] == words[row]
    counts = {w: words.count(w) for w in splits.train.words}
    assert splits.train.frequencies.tolist() == [max(1, counts[w]) for w in splits.train.words]


@pytest.mark.parametrize("task", ["one-billion-word", "imdb"])
def test_online_sees_every_word_once(texts: Path, task: str) -> None:
    _, _, _, splits = start(make_run(task, tokens="spaces"))
    train_set = splits.train
    rows = torch.cat([train_set.order(epoch, torch.Generator().manual_seed(epoch)) for epoch in range(3)])
    assert rows.sort().values.tolist() == list(range(len(train_set)))
    assert rows.tolist() != sorted(rows.tolist())
    if task == "imdb":  # validation is cut from the end of the training text
        assert splits.valid.last == len(splits.valid.ids) == len(train_set) + len(splits.valid)


def test_one_billion_word_takes_what_there_is(texts: Path) -> None:
    settings = make_run("one-billion-word").settings
    both = corpora.load(corpora.one_billion_word, settings)
    for shard in (texts / "one-billion-word/a").iterdir():
        shard.unlink()
    held_out = corpora.load(corpora.one_billion_word, settings)
    assert len(held_out.train) < len(both.train)
    assert len(held_out.test) == len(both.test)
    (texts / "one-billion-word/news.en.heldout-00001-of-00050").unlink()
    with pytest.raises(UserError, match="no shards of the One Billion Word benchmark"):
        corpora.load(corpora.one_billion_word, settings)


def test_words_limits_training(texts: Path) -> None:
    assert len(start(make_run(words=100))[3].train) == 100


@pytest.mark.parametrize(("part", "of_many"), [("valid", 3 * 10**8), ("test", 10**9)])
def test_many_words_are_validated_on_fewer_examples(texts: Path, part: str, of_many: int) -> None:
    data = getattr(start(make_run())[3], part)
    long = dataclasses.replace(data, last=data.first + 100_000)
    for D, examples in ((10_000, 100_000), (20_000, of_many // 20_000)):
        rows = dataclasses.replace(long, words=["word"] * D).with_logits
        assert len(rows) == examples
        assert rows[0] == 0
        assert rows[-1] >= 100_000 - 100_000 / examples - 1  # evenly, to the end


def test_a_read_only_folder_of_data(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora.pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    assert corpora.encoded_folder() == texts / "encoded"
    monkeypatch.setattr(corpora.os, "access", lambda path, mode: False)  # root may write everywhere
    assert corpora.encoded_folder() == tmp_path / "cache/spherical-loss/encoded"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"word1\tword2\n"])
def test_what_is_not_simlex(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "SimLex-999.txt").write_bytes(content)
    with pytest.raises(UserError, match="is not the SimLex-999 file"):
        read_simlex(tmp_path / "SimLex-999.txt")


def test_missing_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for task in ("ptb", "imdb", "one-billion-word"):
        assert command("compare", task) == 1
        assert VARIABLE in capsys.readouterr().err
