"""The command line on texts: what is printed, stored and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spherical_loss.experiments.data import corpora
from spherical_loss.experiments.data.text import UNICODE_WORDS, split_words
from spherical_loss.experiments.results.paper import TABLES
from tests.experiments.small_texts import OPTIONS, chain, command


def test_compare_any_text_with_all_heads(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = texts / "imdb/imdb.train.txt"
    compare = ("compare", "text", "--file", str(file), "--vocabulary", "42", "--out", str(tmp_path / "runs"), *OPTIONS)
    assert command(*compare, "--losses", "softmax", "taylor", "--head", "dense", "factored") == 0
    out = capsys.readouterr().out
    assert "words to train" in out
    table = (tmp_path / "runs/text/table.md").read_text()
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| Log")]
    assert rows == ["Log softmax", "Log Taylor softmax", "Log Taylor softmax, factored head"]
    assert "perplexity" in table
    assert (tmp_path / "runs/text/curves.png").read_bytes().startswith(b"\x89PNG")
    assert command(*compare, "--losses", "softmax", "taylor", "--head", "dense", "factored") == 0
    assert capsys.readouterr().out.count("(stored)") == 3
    file.write_text(chain(3000, seed=99))  # another text under the same name is another run
    assert command(*compare, "--losses", "taylor") == 0
    assert "(stored)" not in capsys.readouterr().out


def test_texts_of_ones_own_validate_and_test(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"file": "my corpus.txt", "valid": "mine.valid.txt", "test": "mine.test.txt"}
    for (name, file), n in zip(names.items(), (3000, 700, 500), strict=True):
        (tmp_path / file).write_text(chain(n, seed=n))
        names[name] = str(tmp_path / file)
    options = [word for name, file in names.items() for word in (f"--{name}", file)]
    assert command("compare", "text", *options, "--losses", "taylor", "--out", str(tmp_path / "runs"), *OPTIONS) == 0
    out = capsys.readouterr().out
    sizes = [len(split_words((tmp_path / Path(file)).read_text(), UNICODE_WORDS)) for file in names.values()]
    assert "{:,} words to train, {:,} words to validate, {:,} words to test".format(*sizes) in out
    assert "my corpus.txt: the next word" in out
    (result,) = (tmp_path / "runs/text").glob("taylor-*/result.json")
    assert [json.loads(result.read_text())["data"][part] for part in ("train", "valid", "test")] == sizes


def test_a_text_that_is_too_small_to_mean_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.txt").write_text(chain(300, seed=5))
    assert command("compare", "text", "--file", str(tmp_path / "corpus.txt"), "--out", str(tmp_path / "runs"), *OPTIONS) == 1
    err = capsys.readouterr().err
    assert "too few to mean anything" in err
    assert "--valid" in err
    assert err.count("\n") == 1


def test_the_default_architecture_is_a_table_of_the_paper(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although the number of layers is None until the loss is known."""
    for name in ("one-billion-word-1", "one-billion-word-2"):
        monkeypatch.setitem(TABLES[name].settings, "vocabulary", 42)
    options = (*OPTIONS[2:], "--vocabulary", "42", "--losses", "softmax", "--out", str(tmp_path / "runs"))
    assert command("compare", "one-billion-word", *options) == 0
    assert "19.4" in capsys.readouterr().out  # the paper's perplexity with one layer
    assert command("compare", "one-billion-word", *options, "--layers", "2") == 0
    assert "19.2" in capsys.readouterr().out


def test_a_study_is_about_one_text(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "corpus.txt"
    options = ("--vocabulary", "42", "--trials", "1", "--runs", "1")
    search = ("tune", "text", "--loss", "taylor", "--file", str(file), *options, "--out", str(tmp_path / "runs"), *OPTIONS)
    counts = []
    for seed in (1, 1, 2):
        file.write_text(chain(1500, seed))
        assert command(*search) == 0
        counts.append(len(list((tmp_path / "runs/text").glob("taylor-*/result.json"))))
    assert counts == [1, 1, 2]
    stored = json.loads((tmp_path / "runs/tuned.json").read_text())["text"]["taylor"]["found"]["settings"]
    assert stored["layers"] == 1


def test_what_softmax_is_measured_on_is_said(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora, "TEST", corpora.Budget(10**6, 42 * 100))
    options = ("--vocabulary", "42", "--losses", "softmax", "taylor", "--out", str(tmp_path / "runs"), *OPTIONS)
    assert command("compare", "imdb", *options) == 0
    assert "softmax's perplexity of 100 of them" in capsys.readouterr().out
    header, _, *rows = (tmp_path / "runs/imdb/table.md").read_text().splitlines()[2:5]
    column = [cell.strip() for cell in header.split("|")].index("on words")
    assert rows[0].split("|")[column].strip() == "100"


def test_the_bounds_are_judged_as_softmax_perplexity(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compare", "bounds", "--vocabulary", "42", "--out", str(tmp_path / "runs"), *OPTIONS) == 0
    table = (tmp_path / "runs/bounds/table.md").read_text()
    header, _, *rows = table.splitlines()[2:]
    column = [cell.strip() for cell in header.split("|")].index("valid. perplexity at start")
    starts = {row.split("|")[1].strip(): float(row.split("|")[column]) for row in rows if row}
    assert set(starts) == {"Log softmax", "Bound of log softmax", "Bound of log softmax, fixed xi"}
    assert max(starts.values()) == pytest.approx(min(starts.values()), rel=1e-3)  # all start from the frequencies


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ptb", "--head", "--losses", "taylor"), 2, "--head needs at least one head"),
        (("imdb", "--vocabulary", "42", "--words", "1", "--epochs", "2"), 2, "1 words to train on cannot be cut in 2 pieces"),
        (("ptb", "--losses", "softmax", "--head", "gram"), 2, "softmax works only with dense, sampled, adaptive"),
        (("text",), 2, "give it with --file"),
        (("text", "--file", "nowhere.txt"), 1, "nowhere.txt is not a file"),
        (("ptb", "--vocabulary", "50"), 2, "--vocabulary is 50, but ptb.train.txt has only 40 words"),
        (("ptb", "--vocabulary", "2"), 2, "--vocabulary is 2, but must be at least 3"),
        (("ptb", "--tier-power", "-0.5"), 2, "--tier-power is -0.5, but must not be negative"),
        (("ptb", "--vocabulary", "-5"), 2, "--vocabulary is -5, but must be at least 3"),
        (("ptb", "--vocabulary", "many"), 2, "--vocabulary is 'many', but must be a whole number or full"),
        (("ptb", "--vocabulary", "full", "--min-count", "9999"), 2, "no word that occurs 9999 times"),
        (("ptb", "--momentum", "0.9"), 2, "--momentum is 0.9"),
        (("ptb", "--layers", "-1"), 2, "--layers is -1"),
        (("ptb", "--head", "sparse"), 2, "sparse"),
    ],
)
def test_messages(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple, code: int, said: str
) -> None:
    """One line, and the code of its kind: 2 for a value that makes no sense, 1 for what is missing."""
    assert command("compare", *arguments, "--quiet", "--out", str(tmp_path / "runs")) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
