"""Whole runs of the language model: they learn, diverge, resume, and start from the settings of the paper."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

import pytest

from spherical_loss.experiments.data.text import UNICODE_WORDS, split_words
from spherical_loss.experiments.running.compare import plan
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import LanguageSettings, resolved
from spherical_loss.experiments.training.tasks import TASKS, open_values
from spherical_loss.experiments.training.train import train
from tests.experiments.small_texts import chain, make_run
from tests.experiments.training.test_train import numbers
from tests.support.processes import exit_code
from tests.support.processes import start as start_process

LEARNING: dict[str, dict[str, float]] = {
    "softmax": {"lr": 0.3},
    "abs": {"lr": 0.3},
    "spherical": {"lr": 0.3, "output_rate": 1.0},
    "taylor": {"lr": 0.3, "output_rate": 3.0},
    "z": {"lr": 0.03, "a": 0.5, "b": 6.0},
}


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


def test_a_rate_too_large_is_divergence(texts: Path, tmp_path: Path) -> None:
    result = train(make_run(head="factored", lr=1e30), tmp_path, Display())
    assert result["status"] == "diverged"


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


def test_the_papers_architectures_are_the_defaults() -> None:
    found = {}
    for loss in ("softmax", "spherical", "taylor", "abs"):
        settings = resolved(TASKS["ptb"].settings, loss, open_values("ptb", loss, TASKS["ptb"].settings))
        assert isinstance(settings, LanguageSettings)
        found[loss] = (settings.layers, settings.width)
        assert (settings.context, settings.embedding, settings.batch_size, settings.momentum) == (6, 250, 250, 0.0)
        assert settings.eps == (0.0198 if loss == "spherical" else None)
    assert found == {"softmax": (2, 809), "spherical": (3, 1264), "taylor": (3, 1427), "abs": (2, 809)}


def test_rates_of_a_model_without_hidden_layers() -> None:
    """Unless they are given, they are smaller; with hidden layers they are the task's own."""
    settings = TASKS["one-billion-word"].settings
    deep, shallow = (dataclasses.replace(settings, layers=layers) for layers in (1, 0))
    for loss in ("softmax", "spherical", "taylor"):
        rates = [resolved(each, loss, open_values("one-billion-word", loss, each)).lr for each in (deep, shallow)]
        assert rates[0] == TASKS["one-billion-word"].values[loss]["lr"] > rates[1]
    given = dataclasses.replace(shallow, lr=7.0)
    assert resolved(given, "taylor", open_values("one-billion-word", "taylor", given)).lr == 7.0


def test_defaults_of_a_text(texts: Path, tmp_path: Path) -> None:
    """The vocabulary is what the text has; the network suits a text of ordinary size."""
    (tmp_path / "corpus.txt").write_text(chain(3000, seed=5))
    settings = dataclasses.replace(TASKS["text"].settings, file=str(tmp_path / "corpus.txt"))
    (run,) = plan("text", ["taylor"], [0], settings)
    words = split_words((tmp_path / "corpus.txt").read_text(), UNICODE_WORDS)
    repeated = {word for word in words if words.count(word) > 1}
    assert run.settings.vocabulary == len(repeated | {"<eos>", "<unk>"})
    assert (run.settings.layers, run.settings.width, run.settings.embedding) == (1, 300, 100)
