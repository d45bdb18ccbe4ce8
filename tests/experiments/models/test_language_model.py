"""The language model and its corpora, on small texts: heads, losses, metrics, resuming."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from spherical_loss.experiments import cli
from spherical_loss.experiments.data import corpora
from spherical_loss.experiments.data.folder import VARIABLE
from spherical_loss.experiments.data.simlex import read_simlex
from spherical_loss.experiments.data.text import UNICODE_WORDS, split_words
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.models.language_model import evaluate_language, language_model, language_optimizer
from spherical_loss.experiments.models.loss_names import make_loss
from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.running.compare import plan
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import LanguageSettings, Run, resolved
from spherical_loss.experiments.training.tasks import TASKS, open_values
from spherical_loss.experiments.training.train import train
from tests.experiments.training.test_train import numbers
from tests.support.processes import exit_code
from tests.support.processes import start as start_process

SMALL = {"layers": 1, "width": 16, "embedding": 8, "context": 3, "batch_size": 20, "vocabulary": 42, "epochs": 3, "threads": 1}
FAMILY = ("spherical", "taylor", "z", "bound")


def chain(n: int, seed: int) -> str:
    """Sentences in which every word has three successors out of 40, some words being far more frequent than others."""
    random = np.random.default_rng(seed)
    successors = np.random.default_rng(7).integers(0, 40, (40, 3)) // np.array([1, 2, 8])
    words, word = [], 0
    for i in range(n):
        word = int(successors[word][random.choice(3, p=[0.2, 0.3, 0.5])]) if i % 50 else i % 40
        words.append(f"w{word}" if i < 40 or i % 12 else f"w{word}\n")
    return " ".join([*(f"w{k}" for k in range(40)), *words]) + "\n"


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    for seed, (name, n) in enumerate(
        {
            "ptb/ptb.train.txt": 3000,
            "ptb/ptb.valid.txt": 400,
            "ptb/ptb.test.txt": 400,
            "one-billion-word/a/news.en-00001-of-00100": 2000,
            "one-billion-word/a/news.en-00002-of-00100": 1000,
            "one-billion-word/news.en.heldout-00000-of-00050": 400,
            "one-billion-word/news.en.heldout-00001-of-00050": 300,
            "imdb/imdb.train.txt": 3000,
            "imdb/imdb.test.txt": 400,
        }.items()
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(chain(n, seed))
    (folder / "SimLex-999").mkdir()
    pairs = [f"w{i}\tw{i + 1}\tN\t{(7 * i) % 10}" for i in range(30)] + ["w1\tabsent\tN\t3"]
    (folder / "SimLex-999/SimLex-999.txt").write_text("\n".join(["word1\tword2\tPOS\tSimLex999", *pairs]) + "\n")
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def make_run(task: str = "ptb", loss: str = "taylor", seed: int = 0, head: str = "dense", **changes) -> Run:
    settings = dataclasses.replace(TASKS[task].settings, **{**SMALL, "head": head, **changes})
    return Run(task, loss, seed, resolved(settings, loss, open_values(task, loss, settings)))


def start(run: Run):
    """The network at its start, its loss, optimizer and data."""
    loss = make_loss(run.loss, run.loss_options)
    splits = RECIPES[run.task].load(run.settings, run.seed)
    torch.manual_seed(run.seed)
    network = language_model(run.settings, splits.train, loss)
    return network, loss, language_optimizer(network, run.settings), splits


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


@pytest.mark.parametrize("loss", ["softmax", "abs", "spherical", "taylor"])
def test_the_start_has_the_frequencies_of_the_words(texts: Path, loss: str) -> None:
    network, loss_module, _, splits = start(make_run(loss=loss))
    p = splits.train.frequencies.double() / splits.train.frequencies.sum()
    log_p = loss_module.log_probabilities(network(splits.valid.batch(torch.arange(5))[0]))
    torch.testing.assert_close(log_p.double(), p.log().expand(5, -1), rtol=1e-4, atol=1e-4)
    target = splits.valid.batch(torch.arange(len(splits.valid)))[1]
    metrics = evaluate_language(network, loss_module, splits.valid)
    assert math.isclose(metrics["perplexity"], float((-p.log()[target].mean()).exp()), rel_tol=1e-4)


@pytest.mark.parametrize("loss", FAMILY)
@pytest.mark.parametrize("layers", [0, 2])
def test_every_head_gives_the_same_losses(texts: Path, loss: str, layers: int) -> None:
    curves, ends = {}, {}
    for head in ("dense", "gram", "factored"):
        network, loss_module, optimizer, splits = start(make_run(loss=loss, head=head, layers=layers, lr=0.1, output_rate=1.0))
        generator = torch.Generator().manual_seed(0)
        values = []
        for rows in splits.train.order(0, generator).split(20)[:60]:
            optimizer.zero_grad()
            value = network.objective(*splits.train.batch(rows), loss_module)
            value.backward()
            optimizer.step()
            values.append(float(value.detach()))
        curves[head], ends[head] = values, evaluate_language(network, loss_module, splits.valid)
    assert curves["dense"][-1] != curves["dense"][0]
    for head in ("gram", "factored"):
        np.testing.assert_allclose(curves[head], curves["dense"], rtol=2e-4)
        for metric, value in ends["dense"].items():
            assert ends[head][metric] == (value if value is None else pytest.approx(value, rel=2e-3, abs=6e-3)), metric


def test_a_step_with_a_closure_is_the_same_step(texts: Path) -> None:
    ends = []
    for with_closure in (False, True):
        network, loss, optimizer, splits = start(make_run(head="factored"))
        batch = splits.train.batch(torch.arange(20))

        def closure(network=network, loss=loss, optimizer=optimizer, batch=batch) -> torch.Tensor:
            optimizer.zero_grad()
            value = network.objective(*batch, loss)
            value.backward()
            return value.detach()

        if with_closure:
            assert float(optimizer.step(closure)) > 0
        else:
            closure()
            optimizer.step()
        ends.append([network.head.weight, network.embedding.weight])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("head", ["gram", "factored"])
def test_neither_training_nor_validation_loss_computes_the_logits(
    texts: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, loss, optimizer, splits = start(make_run(head=head))
    monkeypatch.setattr(type(network.head), "logits", lambda *a: pytest.fail("computed the logits"))
    ranked = []
    topk = type(network.head).topk
    monkeypatch.setattr(type(network.head), "topk", lambda *a: ranked.append(len(a[1])) or topk(*a))
    network.objective(*splits.train.batch(torch.arange(20)), loss).backward()
    optimizer.step()
    metrics = evaluate_language(network, loss, dataclasses.replace(splits.valid, budget=5 * splits.valid.D))
    assert ranked == [5] == [metrics["ranked"]]


def test_embedding_gradients_are_sparse(texts: Path) -> None:
    network, loss, _, splits = start(make_run())
    x, target = splits.train.batch(torch.arange(2))
    network.objective(x, target, loss).backward()
    grad = network.embedding.weight.grad
    assert grad.is_sparse
    assert set(grad.coalesce().indices().flatten().tolist()) == set(x.flatten().tolist())


@pytest.mark.parametrize("loss", ["softmax", "taylor", "spherical", "bound", "z"])
def test_metrics_against_dense_float64(texts: Path, loss: str) -> None:
    run = make_run(loss=loss, head="dense" if loss == "softmax" else "factored")
    network, loss_module, optimizer, splits = start(run)
    for rows in torch.arange(400).split(20):
        optimizer.zero_grad()
        network.objective(*splits.train.batch(rows), loss_module).backward()
        optimizer.step()
    metrics = evaluate_language(network, loss_module, splits.valid)
    x, target = splits.valid.batch(torch.arange(len(splits.valid)))
    with torch.no_grad():
        linear = network.head.to_linear().double()
        o = linear(network.hidden(x).double())
    o_c = o.gather(1, target.unsqueeze(1))
    if loss in ("softmax", "bound", "z"):
        score, p = o, o.softmax(1)
    else:
        p = (o + 1) ** 2 + 1 if loss == "taylor" else o**2 + run.settings.eps
        score, p = p, p / p.sum(1, keepdim=True)
    better = (score > score.gather(1, target.unsqueeze(1))).sum(1)
    assert metrics["error"] == pytest.approx((better >= 1).double().mean().item(), abs=2e-3)
    assert metrics["top10"] == pytest.approx((better >= 10).double().mean().item(), abs=2e-3)
    if loss == "z":
        assert metrics["perplexity"] is None
        z = (o_c.squeeze(1) - o.mean(1)) / o.std(1, correction=0)
        a, b = run.settings.a, run.settings.b
        assert metrics["loss"] == pytest.approx(float((torch.log1p((a * (b - z)).exp()) / a).mean()), rel=1e-4)
    else:
        nll = -p.gather(1, target.unsqueeze(1)).log().mean().item()
        assert metrics["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)
        assert (metrics["loss"] > metrics["nll"]) if loss == "bound" else (metrics["loss"] == metrics["nll"])


def test_simlex_against_its_definition(texts: Path) -> None:
    network, loss, _, splits = start(make_run(loss="z"))  # whose output weights are not zero
    metrics = evaluate_language(network, loss, splits.valid)
    numbers_of = {w: i for i, w in enumerate(splits.train.words)}
    scores = [(7 * i) % 10 for i in range(30)]
    for name, vectors in (("simlex_input", network.embedding.weight), ("simlex_output", network.head.weight)):
        v = vectors.detach().double().numpy()
        rows = [(v[numbers_of[f"w{i}"]], v[numbers_of[f"w{i + 1}"]]) for i in range(30)]
        cosine = [a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in rows]
        assert metrics[name] == pytest.approx(scipy.stats.spearmanr(cosine, scores).statistic, abs=1e-6)
    assert metrics["simlex_pairs"] == 30
    network, loss, _, splits = start(make_run())  # zero output weights have no similarities
    assert evaluate_language(network, loss, splits.valid)["simlex_output"] is None


@pytest.mark.parametrize(
    ("loss", "head"), [("softmax", "dense"), ("abs", "dense"), ("spherical", "factored"), ("taylor", "gram"), ("z", "factored")]
)
def test_every_loss_learns(texts: Path, tmp_path: Path, loss: str, head: str) -> None:
    result = train(make_run(loss=loss, head=head, epochs=4, **LEARNING[loss]), tmp_path, Display())
    assert result["status"] == "finished"
    if loss == "z":
        assert result["test"]["top10"] < result["start"]["top10"] - 0.1
    else:
        assert result["valid"]["perplexity"] < 0.7 * result["start"]["perplexity"]
    assert result["seconds_to_best"] > 0


LEARNING: dict[str, dict[str, float]] = {
    "softmax": {"lr": 0.3},
    "abs": {"lr": 0.3},
    "spherical": {"lr": 0.3, "output_rate": 1.0},
    "taylor": {"lr": 0.3, "output_rate": 3.0},
    "z": {"lr": 0.03, "a": 0.5, "b": 6.0},
}


def test_a_rate_too_large_is_divergence(texts: Path, tmp_path: Path) -> None:
    result = train(make_run(head="factored", lr=1e9), tmp_path, Display())
    assert result["status"] == "diverged"


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


def train_with_checkpoints(root: Path) -> None:
    train(make_run(head="factored", epochs=4), root, Display(), checkpoint_seconds=0)


def test_a_killed_factored_run_comes_to_the_same_bits(texts: Path, tmp_path: Path) -> None:
    run = make_run(head="factored", epochs=4)
    train(run, tmp_path / "whole", Display())
    process = start_process(train_with_checkpoints, tmp_path / "killed")
    checkpoint = RunFolder(tmp_path / "killed", run).path / "checkpoint.pt"
    while not checkpoint.exists() and process.is_alive():
        time.sleep(0.005)
    process.kill()
    assert exit_code(process) == -signal.SIGKILL
    assert RunFolder(tmp_path / "killed", run).result() is None
    train(run, tmp_path / "killed", Display())
    assert numbers(tmp_path / "killed", run) == numbers(tmp_path / "whole", run)


OPTIONS = ("--layers", "1", "--width", "8", "--embedding", "4", "--context", "2", "--epochs", "1", "--threads", "1")


def command(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


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


def test_defaults_of_a_text(texts: Path, tmp_path: Path) -> None:
    """The vocabulary is what the text has; the network suits a text of ordinary size."""
    (tmp_path / "corpus.txt").write_text(chain(3000, seed=5))
    settings = dataclasses.replace(TASKS["text"].settings, file=str(tmp_path / "corpus.txt"))
    (run,) = plan("text", ["taylor"], [0], settings)
    words = split_words((tmp_path / "corpus.txt").read_text(), UNICODE_WORDS)
    repeated = {word for word in words if words.count(word) > 1}
    assert run.settings.vocabulary == len(repeated | {"<eos>", "<unk>"})
    assert (run.settings.layers, run.settings.width, run.settings.embedding) == (1, 300, 100)


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


def test_what_softmax_is_measured_on_is_said(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora, "DENSE_OUTPUTS", 42 * 100)
    options = ("--vocabulary", "42", "--losses", "softmax", "taylor", "--out", str(tmp_path / "runs"), *OPTIONS)
    assert command("compare", "imdb", *options) == 0
    assert "softmax's perplexity of 100 of them" in capsys.readouterr().out
    header, _, *rows = (tmp_path / "runs/imdb/table.md").read_text().splitlines()[2:5]
    column = [cell.strip() for cell in header.split("|")].index("on words")
    assert rows[0].split("|")[column].strip() == "100"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ptb", "--head", "--losses", "taylor"), "--head needs at least one head"),
        (("imdb", "--vocabulary", "42", "--words", "1", "--epochs", "2"), "1 words to train on cannot be cut in 2 pieces"),
        (("ptb", "--losses", "softmax", "--head", "gram"), "softmax works only with dense, sampled, adaptive"),
        (("text",), "give it with --file"),
        (("text", "--file", "nowhere.txt"), "nowhere.txt is not a file"),
        (("ptb", "--vocabulary", "50"), "--vocabulary is 50, but ptb.train.txt has only 40 words"),
        (("ptb", "--momentum", "0.9"), "--momentum is 0.9"),
        (("ptb", "--layers", "-1"), "--layers is -1"),
        (("ptb", "--head", "sparse"), "sparse"),
    ],
)
def test_messages(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple, said: str) -> None:
    assert command("compare", *arguments, "--out", str(tmp_path / "runs")) in (1, 2)
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.out + captured.err


def test_missing_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for task in ("ptb", "imdb", "one-billion-word"):
        assert command("compare", task) == 1
        assert VARIABLE in capsys.readouterr().err


def test_the_papers_architectures_are_the_defaults() -> None:
    found = {}
    for loss in ("softmax", "spherical", "taylor", "abs"):
        settings = resolved(TASKS["ptb"].settings, loss, open_values("ptb", loss, TASKS["ptb"].settings))
        assert isinstance(settings, LanguageSettings)
        found[loss] = (settings.layers, settings.width)
        assert (settings.context, settings.embedding, settings.batch_size, settings.momentum) == (6, 250, 250, 0.0)
        assert settings.eps == (0.0198 if loss == "spherical" else None)
    assert found == {"softmax": (2, 809), "spherical": (3, 1264), "taylor": (3, 1427), "abs": (2, 809)}


def test_the_bounds_are_judged_as_softmax_perplexity(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compare", "bounds", "--vocabulary", "42", "--out", str(tmp_path / "runs"), *OPTIONS) == 0
    table = (tmp_path / "runs/bounds/table.md").read_text()
    header, _, *rows = table.splitlines()[2:]
    column = [cell.strip() for cell in header.split("|")].index("valid. perplexity at start")
    starts = {row.split("|")[1].strip(): float(row.split("|")[column]) for row in rows if row}
    assert set(starts) == {"Log softmax", "Bound of log softmax", "Bound of log softmax, fixed xi"}
    assert max(starts.values()) == pytest.approx(min(starts.values()), rel=1e-3)  # all start from the frequencies


def test_rates_of_a_model_without_hidden_layers() -> None:
    """Unless they are given, they are smaller; with hidden layers they are the task's own."""
    settings = TASKS["one-billion-word"].settings
    deep, shallow = (dataclasses.replace(settings, layers=layers) for layers in (1, 0))
    for loss in ("softmax", "spherical", "taylor"):
        rates = [resolved(each, loss, open_values("one-billion-word", loss, each)).lr for each in (deep, shallow)]
        assert rates[0] == TASKS["one-billion-word"].values[loss]["lr"] > rates[1]
    given = dataclasses.replace(shallow, lr=7.0)
    assert resolved(given, "taylor", open_values("one-billion-word", "taylor", given)).lr == 7.0
