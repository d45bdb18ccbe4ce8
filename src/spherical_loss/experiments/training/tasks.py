"""The tasks: each is data, a network and default settings. A new task is an entry in ``TASKS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import distribution
from typing import Any

import numpy as np
import torch

from spherical_loss import Loss
from spherical_loss.experiments.data import corpora
from spherical_loss.experiments.data import image_files as data
from spherical_loss.experiments.data.folder import data_folder
from spherical_loss.experiments.data.images import Images, Splits, split_images
from spherical_loss.experiments.models import image_networks as models
from spherical_loss.experiments.models.image_networks import Network
from spherical_loss.experiments.models.language_model import evaluate_language, language_model, language_optimizer
from spherical_loss.experiments.models.loss_names import LOSSES
from spherical_loss.experiments.training.metrics import evaluate_classifier
from spherical_loss.experiments.training.settings import ImageSettings, LanguageSettings, Settings
from spherical_loss.experiments.tuning.tuned import tuned_values


def unchanged(settings: Settings, quiet: bool) -> Settings:
    return settings


@dataclass(frozen=True)
class Task:
    """What the training loop needs to know of a task.

    ``load(settings, seed)`` gives the training, validation and test sets: objects with ``len``, ``batch(rows, generator)``,
    ``D``, ``frequencies`` and ``to(device)``, as :class:`~spherical_loss.experiments.data.images.Images` has them; to train,
    ``order(epoch, generator)``: the rows of an epoch, which need not be all (a run is saved and validated between epochs).
    ``network(settings, train_set, loss)`` gives the network at its start, ``optimizer(network, settings)`` its optimizer,
    and ``evaluate(network, loss, set)`` the metrics, which hold at least ``settings.monitor`` and "loss".
    """

    summary: str
    settings: Settings
    losses: tuple[str, ...]
    runs: int
    load: Callable[[Any, int], Any]
    network: Callable[[Any, Any, Loss], Any]
    lr: float = 0.01
    """Initial learning rate of a loss that has not been tuned."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For some losses, values of other settings that a run leaves open, where they have not been tuned."""
    shallow: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same for a network without hidden layers."""
    lr_range: tuple[float, float] = (1e-3, 1.0)
    """Where ``tune`` looks for the learning rate."""
    search: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Other settings that ``tune`` searches, such as layers and widths, and their ranges; integers, on a log scale."""
    optimizer: Callable[[Any, Any], torch.optim.Optimizer] = models.sgd
    evaluate: Callable[[Any, Loss, Any], dict[str, float | None]] = evaluate_classifier
    prepare: Callable[[Any, bool], Any] = unchanged
    """``prepare(settings, quiet)`` makes the data ready, before any run, and gives the settings with what depends on them."""
    start: bool = False
    """Whether the network is validated before the first step, too."""


def open_values(task: str, loss: str, settings: Settings) -> dict[str, Any]:
    """Values for what ``settings`` leave open: the task's and the loss's defaults, and over them the tuned ones."""
    entry = TASKS[task]
    shallow = entry.shallow.get(loss, {}) if getattr(settings, "layers", None) == 0 else {}
    tuned = tuned_values(task, loss, settings)
    return {"lr": entry.lr, **LOSSES[loss].defaults, **entry.values.get(loss, {}), **shallow, **tuned}


@lru_cache(maxsize=1)
def digits_data() -> data.TrainTest:
    """scikit-learn's 1,797 digits of 8 x 8; there is no official test set, so the last fifth stands for one.

    From its file, since importing scikit-learn takes two seconds.
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",", dtype=np.uint8)
    images, labels = table[:, :64].reshape(-1, 8, 8, 1), table[:, 64]
    return data.TrainTest(data.Pixels(images[:1437], labels[:1437]), data.Pixels(images[1437:], labels[1437:]))


def load_digits(settings: ImageSettings, seed: int) -> Splits:
    return split_images(digits_data(), 10, settings.split, 360, seed)


def load_mnist(settings: ImageSettings, seed: int) -> Splits:
    """50,000, 10,000 and 10,000 images: a sixth of the official training set validates."""
    images = data.read_mnist(data_folder())
    return split_images(images, 10, settings.split, len(images.train.labels) // 6, seed)


def load_cifar10(settings: ImageSettings, seed: int) -> Splits:
    """45,000, 5,000 and 10,000 images: a tenth of the official training set validates."""
    images = data.read_cifar10(data_folder())
    return split_images(images, 10, settings.split, len(images.train.labels) // 10, seed, flip=True)


def load_cifar100(settings: ImageSettings, seed: int) -> Splits:
    images = data.read_cifar100(data_folder())
    return split_images(images, 100, settings.split, len(images.train.labels) // 10, seed, flip=True)


def digits_network(settings: ImageSettings, train: Images, loss: Loss) -> Network:
    return models.start(models.perceptron(64, settings.width, train.D, settings.activation), loss, train.frequencies)


def mnist_network(settings: ImageSettings, train: Images, loss: Loss) -> Network:
    return models.start(models.mnist_network(settings.width, train.D, settings.activation), loss, train.frequencies)


def cifar_network(settings: ImageSettings, train: Images, loss: Loss) -> Network:
    return models.start(models.cifar_network(settings.width, train.D, settings.activation), loss, train.frequencies)


def language_task(
    summary: str, find: corpora.Find, settings: LanguageSettings, losses: tuple[str, ...], values: dict[str, dict[str, Any]]
) -> Task:
    """A task of the language model on the files that ``find`` finds; ``values`` are the losses' learning rates and layers."""
    return Task(
        summary,
        settings,
        losses,
        runs=1,
        load=lambda settings, seed: corpora.load(find, settings),
        network=language_model,
        lr=1.0,
        values=values,
        shallow=SHALLOW,
        lr_range=(0.01, 300.0),
        search={"layers": (1, 4), "width": (200, 2000)},
        optimizer=language_optimizer,
        evaluate=evaluate_language,
        prepare=partial(corpora.prepared, find),
        start=True,
    )


def language_settings(**changes: Any) -> LanguageSettings:
    """Plain SGD on minibatches of 250, by negative log-likelihood."""
    common: dict[str, Any] = {"batch_size": 250, "momentum": 0.0, "monitor": "nll", "halve_after": 1}
    return LanguageSettings(**{**common, **changes})


# Learning rates are not comparable between losses: the outputs of the spherical ones start large, at their prior biases.
RATES: dict[str, dict[str, Any]] = {
    "softmax": {"lr": 0.3, "output_rate": 3.0},
    "abs": {"lr": 0.3, "output_rate": 3.0},
    "spherical": {"lr": 1.0, "output_rate": 3.0, "eps": 0.0198},
    "taylor": {"lr": 1.0, "output_rate": 30.0},
    "z": {"lr": 0.3, "output_rate": 1.0, "a": 0.1, "b": 30.0},
    "mse": {"lr": 0.1, "output_rate": 1.0},
    "bound": {"lr": 0.1, "output_rate": 1.0},
    "bound-fixed": {"lr": 0.1, "output_rate": 1.0, "xi": 10.0},
}
# At the rates above, a model without hidden layers ends worse than it starts. At these, the first 20,000 words of One Billion
# Word bring the perplexity from 594 to 474, 580 and 559; three times as much, to 873 (spherical) and 690 (Taylor).
SHALLOW: dict[str, dict[str, Any]] = {"softmax": {"lr": 0.1}, "spherical": {"lr": 0.03}, "taylor": {"lr": 0.1}}
# At its rate above, the spherical softmax with three layers collapses late in the first epoch of Penn Treebank (a validation
# perplexity of 14,800); at 0.3 it has 347 after it.
TABLE_5: dict[str, dict[str, Any]] = {
    "spherical": {"layers": 3, "width": 1264, "lr": 0.3},
    "taylor": {"layers": 3, "width": 1427},
}
PTB_VALUES = {loss: {"layers": 2, "width": 809, **rates, **TABLE_5.get(loss, {})} for loss, rates in RATES.items()}
ONLINE_VALUES = {loss: {"layers": 1, "width": 1000, **rates} for loss, rates in RATES.items()}
LANGUAGE_LOSSES = ("softmax", "abs", "spherical", "taylor", "z")

TASKS: dict[str, Task] = {
    "digits": Task(
        "scikit-learn's 1,797 digits of 8 x 8 and a small network: seconds, no download",
        # One thread: this network is too small to share, and two threads would wait for each other.
        ImageSettings(width=64, batch_size=100, epochs=40, patience=10, monitor="loss", threads=1),
        losses=("mse", "softmax", "abs", "spherical", "taylor", "z", "bound"),
        runs=3,
        load=load_digits,
        network=digits_network,
    ),
    "mnist": Task(
        "MNIST, the paper's convolutional network (tables 1 and 2)",
        ImageSettings(width=30),
        losses=("mse", "softmax", "abs", "spherical", "taylor"),
        runs=3,
        load=load_mnist,
        network=mnist_network,
        # The last hidden layer starts with a squared norm of some 10^4: the squared error needs very small steps.
        lr=0.003,
        values={"mse": {"lr": 1e-4}},
        lr_range=(1e-5, 0.3),
    ),
    "cifar10": Task(
        "CIFAR-10, 14 layers with batch normalization and random flips (table 3)",
        ImageSettings(width=16, weight_decay=5e-4),
        losses=("mse", "softmax", "spherical", "taylor"),
        runs=3,
        load=load_cifar10,
        network=cifar_network,
    ),
    "cifar100": Task(
        "CIFAR-100, the same network (table 4)",
        ImageSettings(width=16, weight_decay=5e-4, split="official"),
        losses=("softmax", "spherical", "taylor"),
        runs=3,
        load=load_cifar100,
        network=cifar_network,
    ),
    "ptb": language_task(
        "Penn Treebank, the paper's neural language model (table 5)",
        corpora.ptb,
        language_settings(epochs=20, patience=5),
        LANGUAGE_LOSSES,
        PTB_VALUES,
    ),
    "bounds": language_task(
        "Penn Treebank, trained with the upper bounds of log-softmax: does the perplexity get worse than at the start?",
        corpora.ptb,
        language_settings(epochs=5, patience=5),
        ("softmax", "bound", "bound-fixed"),
        PTB_VALUES,
    ),
    "one-billion-word": language_task(
        "One Billion Word, a vocabulary of 10,000, one pass over the shards that are there (table 6)",
        corpora.one_billion_word,
        language_settings(epochs=10, patience=10, online=True),
        ("softmax", "spherical", "taylor"),
        ONLINE_VALUES,
    ),
    "imdb": language_task(
        "IMDB reviews, 27 million words, one pass; --vocabulary full has 115,517 words",
        corpora.imdb,
        language_settings(epochs=20, patience=20, online=True, tokens="words"),
        ("softmax", "spherical", "taylor"),
        ONLINE_VALUES,
    ),
    "text": language_task(
        "any text file: --file corpus.txt --vocabulary 50000",
        corpora.text,
        language_settings(epochs=20, patience=5, tokens="unicode"),
        ("softmax", "spherical", "taylor"),
        ONLINE_VALUES,
    ),
}
