"""Small texts under the names of the corpora, and runs of a small language model on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from spherical_loss.experiments import cli
from spherical_loss.experiments.models.language_model import language_model, language_optimizer
from spherical_loss.experiments.models.loss_names import make_loss
from spherical_loss.experiments.training.recipes import RECIPES
from spherical_loss.experiments.training.settings import Run, resolved
from spherical_loss.experiments.training.tasks import TASKS, open_values

SMALL = {"layers": 1, "width": 16, "embedding": 8, "context": 3, "batch_size": 20, "vocabulary": 42, "epochs": 3, "threads": 1}


OPTIONS = ("--layers", "1", "--width", "8", "--embedding", "4", "--context", "2", "--epochs", "1", "--threads", "1")


def chain(n: int, seed: int) -> str:
    """Sentences in which every word has three successors out of 40, some words being far more frequent than others."""
    random = np.random.default_rng(seed)
    successors = np.random.default_rng(7).integers(0, 40, (40, 3)) // np.array([1, 2, 8])
    words, word = [], 0
    for i in range(n):
        word = int(successors[word][random.choice(3, p=[0.2, 0.3, 0.5])]) if i % 50 else i % 40
        words.append(f"w{word}" if i < 40 or i % 12 else f"w{word}\n")
    return " ".join([*(f"w{k}" for k in range(40)), *words]) + "\n"


def write_texts(folder: Path) -> None:
    """Every corpus, and SimLex-999, in the folder of data."""
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


def command(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
