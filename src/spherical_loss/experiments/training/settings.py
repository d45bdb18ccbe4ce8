"""The settings of a run. These dataclasses define the command line, and a run's folder records them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from spherical_loss.experiments.errors import UsageError
from spherical_loss.experiments.models.loss_names import LOSS_OPTIONS, LOSSES, make_loss

HeadName = Literal["dense", "gram", "factored", "tiered", "adaptive-spherical", "sampled", "adaptive"]
"""The output layers of the language models."""


@dataclass(frozen=True)
class Settings:
    """How any task is trained. ``None`` means the tuned value (``spherical-loss tune``), or else the default."""

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
    decay: Literal["cosine"] | None = None
    """Instead of halving, lower the learning rate from epoch to epoch along a cosine, from --lr to 0 after --epochs."""
    monitor: Literal["error", "loss", "nll"] = "error"
    """What "better" means: validation error rate, training loss, or negative log-likelihood."""
    activation: Literal["relu", "softmax", "exp"] = "relu"
    """Hidden activations: ReLU; a softmax in the last hidden layer; truncated exponentials with batch normalization."""
    device: str = "cpu"
    """Where to train, as torch names it: cpu, cuda, cuda:1, ..."""
    threads: int | None = None
    """CPU threads; they affect the last bits of the results, so they are part of the run. By default torch's choice."""


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Settings of the image tasks."""

    width: int = 0
    """Width of the network: units per hidden layer (digits), or feature maps of the first convolution."""
    split: Literal["random", "official"] = "random"
    """A new random split of all images for every run, or the official test set."""


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Settings of the language models."""

    head: Annotated[HeadName, tyro.conf.Suppress] = "dense"
    """The output layer. A comparison may train with several; a run has one."""
    layers: int | None = None
    """Hidden layers."""
    width: int | None = None
    """Units per hidden layer."""
    normalize: Literal["rms"] | None = None
    """Scale the hidden vectors that enter the output layer to a mean square of 1 (RMS normalization): then they cannot grow
    until the steps of the output layer are too large."""
    context: int = 6
    """Number of words from which the next one is predicted."""
    embedding: int = 250
    """Size of a word's embedding."""
    embedding_std: float | None = None
    """Standard deviation of the embeddings at the start; by default the tuned one, or 1."""
    embedding_rate: float | None = None
    """Learning rate of the embeddings, as a multiple of --lr; by default the tuned one, or that of the other layers."""
    output_rate: float | None = None
    """Learning rate of the output layer, as a multiple of --lr; by default the tuned one, and for the Taylor and the spherical
    softmax that of suggested_lr (with the tiered head, it is that of the rarest words)."""
    tail_rate: float | None = None
    """Learning rate of the tail of the adaptive-spherical head, as a multiple of --lr; by default from suggested_lr."""
    tier_power: float | None = None
    """How the rate of the tiered head grows with the frequency of the words: 0 is one rate for all; by default 0.5."""
    vocabulary: int | Literal["full"] | None = 10_000
    """Size of the vocabulary, with <unk> and <eos>; full: all words that occur --min-count times; None (for the task text): the
    same, but 10,000 at most."""
    min_count: int = 2
    """Fewest occurrences of a word of the full vocabulary."""
    tokens: Literal["spaces", "words", "unicode"] = "spaces"
    """What a word is: the text between spaces, or, in raw text, letters with inner apostrophes, digits with inner
    points and commas, and every other character alone. For words, letters are those from a to z; for unicode, those of all
    scripts."""
    file: str | None = None
    """The text, in UTF-8 (for the task text)."""
    valid: str | None = None
    """A text to validate on; by default the end of --file (for the task text)."""
    test: str | None = None
    """A text to test on; by default the end of --file (for the task text)."""
    words: int | None = None
    """Train on this many words only, from the beginning of the text."""
    online: bool = False
    """Make a single pass over the text, of which each epoch is a piece; otherwise every epoch is a pass."""
    corpus: Annotated[str | None, tyro.conf.Suppress] = None
    """Checksum of the files, filled in by the task, so that runs on different texts are different runs."""


@dataclass(frozen=True)
class Run:
    """One training: a task, a loss, a seed, and settings with nothing left open. The seed gives split and initial weights."""

    task: str
    loss: str
    seed: int
    settings: Settings
    ranks: int = 1
    """Processes that share each batch, under torchrun; like threads, they affect the last bits."""

    def as_dict(self) -> dict[str, Any]:
        """What decides the run's numbers. Settings that are None are left out, so that new ones do not rename old runs."""
        settings = {key: value for key, value in as_recorded(self.settings).items() if value is not None}
        ranks = {"ranks": self.ranks} if self.ranks > 1 else {}
        return {"task": self.task, "loss": self.loss, "seed": self.seed, "settings": settings, **ranks}

    @property
    def name(self) -> str:
        """A readable name, and a hash of everything in :meth:`as_dict`.

        >>> Run("digits", "taylor", 3, Settings(lr=0.1)).name[:13]
        'taylor-seed3-'
        """
        text = json.dumps(self.as_dict(), sort_keys=True)
        return f"{self.loss}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def label(self) -> str:
        """Its label in a comparison: the loss, and the head if it is not the dense one.

        >>> Run("ptb", "taylor", 3, LanguageSettings(head="gram")).label
        'taylor/gram'
        """
        return label_of(self.loss, getattr(self.settings, "head", "dense"))

    @property
    def loss_options(self) -> dict[str, float | None]:
        return {key: getattr(self.settings, key) for key in LOSS_OPTIONS}


def label_of(loss: str, head: str) -> str:
    """See :attr:`Run.label`."""
    return loss if head == "dense" else f"{loss}/{head}"


def as_recorded(settings: Settings) -> dict[str, Any]:
    """The settings as a run's folder and the store have them. The head is a list of one: names of stored runs depend on it."""
    values = dataclasses.asdict(settings)
    return {**values, "head": [values["head"]]} if "head" in values else values


def with_threads(settings: Settings, workers: int | None, cluster: str | None) -> Settings:
    """``settings`` for runs on workers: one thread each, unless they say otherwise.

    Threads affect the last bits of the results, so they are part of the run and must not depend on the number of workers.
    """
    if settings.threads is not None or (workers is None and cluster is None):
        return settings
    return dataclasses.replace(settings, threads=1)


def resolved(settings: Settings, loss: str, values: dict[str, Any]) -> Settings:
    """``settings`` with what they leave open (None) filled in from ``values``, which must have a learning rate.

    Options of a loss other than this one become None, so that they do not distinguish runs that are the same.

    >>> s = resolved(Settings(eps=0.5, momentum=0.5), "taylor", {"lr": 0.3, "momentum": 0.9})
    >>> s.lr, s.momentum, s.eps
    (0.3, 0.5, None)
    """
    names = [field.name for field in dataclasses.fields(settings)]
    filled = {name: values.get(name) for name in names if getattr(settings, name) is None}
    foreign: dict[str, Any] = {name: None for name in LOSS_OPTIONS if name not in LOSSES[loss].defaults}
    return dataclasses.replace(settings, **{**filled, **foreign})


def check(settings: Settings) -> None:
    """Raise a :class:`UsageError` for a value that makes no sense."""
    positive = {"lr", "eps", "a", "batch_size", "epochs", "patience", "halve_after", "width", "threads"}
    positive |= {"context", "embedding", "embedding_std", "embedding_rate", "output_rate", "tail_rate", "min_count", "words"}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        option = "--" + field.name.replace("_", "-")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{option} is {value}, but must be a finite number")
        if field.name in positive and value is not None and not value > 0:
            raise UsageError(f"{option} is {value}, but must be greater than 0")
        if field.name in ("weight_decay", "tier_power") and value is not None and not value >= 0:
            raise UsageError(f"{option} is {value}, but must not be negative")
        if field.name == "device":
            check_device(value)
        if field.name == "momentum" and not 0 <= value < 1:
            raise UsageError(f"{option} is {value}, but must be at least 0 and below 1")

    if isinstance(settings, LanguageSettings):
        check_language(settings)


def check_language(settings: LanguageSettings) -> None:
    if isinstance(settings.vocabulary, int) and settings.vocabulary < 3:
        raise UsageError(f"--vocabulary is {settings.vocabulary}, but must be at least 3: <unk>, <eos> and a word")
    if settings.layers is not None and settings.layers < 0:
        raise UsageError(f"--layers is {settings.layers}, but must not be negative")
    if settings.momentum or settings.weight_decay:
        raise UsageError(
            f"--momentum is {settings.momentum} and --weight-decay {settings.weight_decay}, but the language models train with "
            "plain SGD, whose steps touch the words of the batch only; both must be 0"
        )


def check_device(name: str) -> None:
    if name == "cpu":
        return
    import torch  # only now, so that an error in the command line does not wait for the import

    try:
        torch.zeros(1, device=name).item()  # fails on the device meta
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device is {name!r}, which torch cannot use here ({reason}); cpu works everywhere") from error


def check_loss(loss: str, settings: Settings) -> None:
    """Raise a :class:`UsageError` if the loss refuses an option, or the head."""
    if isinstance(settings, LanguageSettings) and settings.head not in LOSSES[loss].heads:
        raise no_head(loss, [settings.head])
    given = {key: getattr(settings, key) for key in LOSSES[loss].defaults if getattr(settings, key) is not None}
    try:
        make_loss(loss, given)
    except ValueError as error:
        raise UsageError(f"{loss}: {error}") from error


def no_head(loss: str, heads: Sequence[str]) -> UsageError:
    return UsageError(
        f"--head is {' '.join(heads)}, but {loss} works only with {', '.join(LOSSES[loss].heads)}: add one of them to --head, "
        "or choose other --losses"
    )
