"""How the tasks are trained: their data, network, optimizer and metrics. Their default settings: :mod:`tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Generator, Tensor

from spherical_loss import Loss
from spherical_loss.experiments.data import corpora, image_files
from spherical_loss.experiments.data.folder import data_folder
from spherical_loss.experiments.data.images import Images, Splits, split_images
from spherical_loss.experiments.errors import UsageError
from spherical_loss.experiments.models import image_networks
from spherical_loss.experiments.models.language_model import (
    LanguageModel,
    evaluate_language,
    language_model,
    language_optimizer,
)
from spherical_loss.experiments.models.network import Network
from spherical_loss.experiments.training.metrics import evaluate_classifier
from spherical_loss.experiments.training.settings import ImageSettings, LanguageSettings, Settings

N = TypeVar("N", bound=Network)


class Examples(Protocol):
    """A training, validation or test set, such as :class:`~spherical_loss.experiments.data.images.Images`."""

    def __len__(self) -> int: ...

    @property
    def D(self) -> int:
        """The number of classes."""

    @property
    def frequencies(self) -> Tensor:
        """How often each class occurs, ``(D,)``; the output bias starts from it."""

    def order(self, epoch: int, generator: Generator) -> Tensor:
        """The rows of a training epoch, which may be a part of all rows: a run is saved and validated between epochs."""

    def batch(self, rows: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these rows; with a ``generator``, augmented for training."""

    def to(self, device: torch.device) -> Examples: ...


class Load(Protocol):
    """Training, validation and test sets. The seed of the run decides a random split."""

    def __call__(self, settings: Any, seed: int) -> tuple[Examples, Examples, Examples]: ...


class MakeNetwork(Protocol):
    """The network at its start."""

    def __call__(self, settings: Any, train: Any, loss: Loss) -> Network: ...


class MakeOptimizer(Protocol):
    def __call__(self, network: Any, settings: Any) -> torch.optim.Optimizer: ...


class Evaluate(Protocol):
    """Metrics, which include at least ``settings.monitor`` and "loss"; None for one that the loss does not have."""

    def __call__(self, network: Any, loss: Loss, data: Any) -> dict[str, float | None]: ...


class Prepare(Protocol):
    """Prepares the data before any run, and returns the settings with the values that depend on the data."""

    def __call__(self, settings: Any, quiet: bool) -> Any: ...


def nothing_to_prepare(settings: Settings, quiet: bool) -> Settings:
    return settings


@dataclass(frozen=True)
class Recipe:
    """What the training loop needs from a task. Each callable takes the task's own kind of settings, set and network."""

    load: Load
    network: MakeNetwork
    optimizer: MakeOptimizer = image_networks.sgd
    evaluate: Evaluate = evaluate_classifier
    prepare: Prepare = nothing_to_prepare
    start: bool = False
    """Whether the network is validated before the first step, too."""


def load_digits(settings: ImageSettings, seed: int) -> Splits:
    return split_images(image_files.read_digits(), 10, settings.split, 360, seed)


def load_mnist(settings: ImageSettings, seed: int) -> Splits:
    """50,000, 10,000 and 10,000 images: a sixth of the official training set is for validation."""
    images = image_files.read_mnist(data_folder())
    return split_images(images, 10, settings.split, len(images.train.labels) // 6, seed)


def load_cifar10(settings: ImageSettings, seed: int) -> Splits:
    """45,000, 5,000 and 10,000 images: a tenth of the official training set is for validation."""
    images = image_files.read_cifar10(data_folder())
    return split_images(images, 10, settings.split, len(images.train.labels) // 10, seed, flip=True)


def load_cifar100(settings: ImageSettings, seed: int) -> Splits:
    images = image_files.read_cifar100(data_folder())
    return split_images(images, 100, settings.split, len(images.train.labels) // 10, seed, flip=True)


def digits_network(settings: ImageSettings, train: Images, loss: Loss) -> Network:
    network = image_networks.perceptron(64, settings.width, train.D, settings.activation)
    return checked(image_networks.start(network, loss, train.frequencies), settings)


def mnist_network(settings: ImageSettings, train: Images, loss: Loss) -> Network:
    network = image_networks.mnist_network(settings.width, train.D, settings.activation)
    return checked(image_networks.start(network, loss, train.frequencies), settings)


def cifar_network(settings: ImageSettings, train: Images, loss: Loss) -> Network:
    network = image_networks.cifar_network(settings.width, train.D, settings.activation)
    return checked(image_networks.start(network, loss, train.frequencies), settings)


def text_network(settings: LanguageSettings, train: corpora.TextSet, loss: Loss) -> LanguageModel:
    return checked(language_model(settings, train, loss), settings)


def checked(network: N, settings: Settings) -> N:
    """The network, if batches of this size are enough for it."""
    if settings.batch_size < network.smallest_batch:
        raise UsageError(
            f"--batch-size is {settings.batch_size}, but this network has batch normalization, which needs "
            f"at least {network.smallest_batch} examples"
        )
    return network


def language_recipe(find: corpora.Find) -> Recipe:
    """The language model on the files that ``find`` finds."""

    def load(settings: LanguageSettings, seed: int) -> corpora.TextSplits:
        return corpora.load(find, settings)

    prepare = partial(corpora.prepared, find)
    return Recipe(load, text_network, language_optimizer, evaluate_language, prepare, start=True)


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(load_digits, digits_network),
    "mnist": Recipe(load_mnist, mnist_network),
    "cifar10": Recipe(load_cifar10, cifar_network),
    "cifar100": Recipe(load_cifar100, cifar_network),
    "ptb": language_recipe(corpora.ptb),
    "bounds": language_recipe(corpora.ptb),
    "one-billion-word": language_recipe(corpora.one_billion_word),
    "imdb": language_recipe(corpora.imdb),
    "text": language_recipe(corpora.text),
}
