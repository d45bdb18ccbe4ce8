"""The settings of a run. These dataclasses are the command line, and what a run's folder records."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.losses import LOSS_OPTIONS, LOSSES, make_loss


@dataclass(frozen=True)
class Settings:
    """How any task is trained. ``None`` stands for the tuned value (``spherical-loss tune``), or else the default."""

    lr: float | None = None
    """Initial learning rate; by default the tuned one of this task and loss."""
    eps: float | None = None
    """eps of the spherical softmax."""
    a: float | None = None
    """a of the Z-loss."""
    b: float | None = None
    """b of the Z-loss."""
    xi: float | None = None
    """xi of the bound of log-softmax; by default the tightest one of each example."""
    batch_size: int = 200
    """Examples per step."""
    momentum: float = 0.9
    """Nesterov momentum; 0 is plain SGD."""
    weight_decay: float = 0.0
    """L2 penalty on weights; biases and batch normalization have none."""
    epochs: int = 200
    """Train for at most this many epochs."""
    patience: int = 20
    """Stop after this many epochs without a better validation."""
    halve_after: int = 5
    """Halve the learning rate every time this many epochs in a row brought no better validation."""
    monitor: Literal["error", "loss", "nll"] = "error"
    """What "better" means: validation error rate, training loss, or negative log-likelihood."""
    activation: Literal["relu", "softmax", "exp"] = "relu"
    """Hidden activations: rectifiers; a softmax in the last hidden layer; truncated exponentials with batch normalization."""
    device: str = "cpu"
    """Where to train, as torch names it: cpu, cuda, cuda:1, ..."""
    threads: int | None = None
    """CPU threads; they decide the last bits of the numbers, so they belong to the run. By default torch's choice."""


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Settings of the image tasks."""

    width: int = 0
    """Width of the network: units per hidden layer (digits), or feature maps of the first convolution."""
    split: Literal["random", "official"] = "random"
    """A new random split of all images for every run, or the official test set."""


@dataclass(frozen=True)
class Run:
    """One training: a task, a loss, a seed, and settings with nothing left open. The seed gives split and initial weights."""

    task: str
    loss: str
    seed: int
    settings: Settings

    def as_dict(self) -> dict[str, Any]:
        """What decides the run's numbers. Settings that are None are left out, so that new ones do not rename old runs."""
        settings = {key: value for key, value in dataclasses.asdict(self.settings).items() if value is not None}
        return {"task": self.task, "loss": self.loss, "seed": self.seed, "settings": settings}

    @property
    def name(self) -> str:
        """A readable name, and a hash of everything in :meth:`as_dict`.

        >>> Run("digits", "taylor", 3, Settings(lr=0.1)).name[:13]
        'taylor-seed3-'
        """
        text = json.dumps(self.as_dict(), sort_keys=True)
        return f"{self.loss}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def loss_options(self) -> dict[str, float | None]:
        return {key: getattr(self.settings, key) for key in LOSS_OPTIONS}


def resolved(settings: Settings, loss: str, values: dict[str, Any]) -> Settings:
    """``settings`` with what they leave open (None) filled in from ``values``, which must have a learning rate.

    Options of a loss other than this one become None, so that they do not tell apart runs that are the same.

    >>> s = resolved(Settings(eps=0.5, momentum=0.5), "taylor", {"lr": 0.3, "momentum": 0.9})
    >>> s.lr, s.momentum, s.eps
    (0.3, 0.5, None)
    """
    names = [field.name for field in dataclasses.fields(settings)]
    filled = {name: values.get(name) for name in names if getattr(settings, name) is None}
    foreign: dict[str, Any] = {name: None for name in LOSS_OPTIONS if name not in LOSSES[loss].defaults}
    return dataclasses.replace(settings, **{**filled, **foreign})


def check(settings: Settings) -> None:
    """Raise a :class:`UserError` for a value that makes no sense."""
    positive = {"lr", "eps", "a", "batch_size", "epochs", "patience", "halve_after", "width", "threads"}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        option = "--" + field.name.replace("_", "-")
        if field.name in positive and value is not None and not value > 0:
            raise UserError(f"{option} is {value}, but must be greater than 0")
        if field.name == "weight_decay" and not value >= 0:
            raise UserError(f"{option} is {value}, but must not be negative")
        if field.name == "device":
            check_device(value)
        if field.name == "momentum" and not 0 <= value < 1:
            raise UserError(f"{option} is {value}, but must be at least 0 and below 1")


def check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device is {name!r}, which torch cannot use here ({reason}); cpu works everywhere") from error


def check_loss(loss: str, settings: Settings) -> None:
    """Raise a :class:`UserError` if the loss refuses an option."""
    given = {key: getattr(settings, key) for key in LOSSES[loss].defaults if getattr(settings, key) is not None}
    try:
        make_loss(loss, given)
    except ValueError as error:
        raise UserError(f"{loss}: {error}") from error
