"""One training of the language model with a contender as its output layer, and how it is measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, SparseAdam
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.quality.contenders import CONTENDERS, Layer
from spherical_loss.experiments.data.corpora import TextSet, TextSplits, imdb, load
from spherical_loss.experiments.training.settings import LanguageSettings

BATCH, HIDDEN, EMBEDDING = 250, 300, 100
MEASURED = 20_000  # words of the test set, evenly spaced, that every contender is measured on in the end
ON_THE_WAY = 5_000  # of them that make the curves
MEASURED_IN_SEARCH = 2_500  # of the validation set
BLOCK = 50  # words that are measured at once: larger temporaries would be paged in anew each time
LOOK = 50  # steps between looks at the loss
CURVE = (0.125, 0.25, 0.5, 1.0)  # of the training, after which it is measured
VOCABULARIES: dict[
    str, dict[str, Any]
] = {  # of the IMDB reviews, cased: the most frequent words, or all that occur often enough
    "100": {"vocabulary": 100},
    "1,000": {"vocabulary": 1_000},
    "10,000": {"vocabulary": 10_000},
    "100,000": {"vocabulary": 100_000},
    "115,519": {"vocabulary": "full", "min_count": 2},
    "all": {"vocabulary": "full", "min_count": 1},
}


@dataclass(frozen=True)
class Training:
    """What decides a training: ``steps`` minibatches at rates that fall linearly to zero."""

    vocabulary: str
    contender: str
    seed: int
    steps: int
    lr: float
    output_lr: float
    options: dict[str, float] = field(default_factory=dict)


class Model(nn.Module):
    """The embeddings of six words, a hidden layer of ReLUs, and an output layer."""

    def __init__(self, layer: Layer, D: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(D, EMBEDDING, sparse=True)
        self.hidden_layer = nn.Linear(context * EMBEDDING, HIDDEN)
        nn.init.kaiming_normal_(self.hidden_layer.weight, nonlinearity="relu")
        nn.init.zeros_(self.hidden_layer.bias)
        self.layer = layer

    def hidden(self, words: Tensor) -> Tensor:
        return self.hidden_layer(self.embedding(words).flatten(1)).relu()


class Session:
    """A model in training: ``step()`` makes one step."""

    def __init__(self, training: Training) -> None:
        torch.manual_seed(training.seed)
        contender, self.vocabulary = CONTENDERS[training.contender], training.vocabulary
        self.train = corpus(training.vocabulary).train
        layer = contender.make(HIDDEN, frequencies(training.vocabulary), **training.options)
        self.model = Model(layer, self.train.D, self.train.context)
        words, hidden = self.model.embedding.parameters(), self.model.hidden_layer.parameters()
        trunk = [SparseAdam(words, training.lr), Adam(hidden, training.lr)]  # SGD needs some five times the steps
        self.optimizers = [*trunk, *layer.optimizers(training.output_lr)]
        self.schedulers = [LambdaLR(o, lambda step: max(0.0, 1 - step / training.steps)) for o in self.optimizers]
        self.steps = 0
        self.generator = torch.Generator().manual_seed(training.seed)

    def step(self) -> Tensor:
        words, target = self.train.batch(torch.randint(len(self.train), (BATCH,), generator=self.generator))
        value = self.model.layer.objective(self.model.hidden(words), target)
        value.backward()
        self.steps += 1
        for optimizer in self.optimizers:
            if self.model.layer.is_due(optimizer, self.steps):
                optimizer.step()
                optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        return value.detach()


def trained(training: Training, in_search: bool) -> dict[str, Any]:
    """Train and measure: on the test set, also on the way; in the search, in the end only, on the validation set."""
    torch.set_num_threads(1)
    session = Session(training)
    splits = corpus(training.vocabulary)
    stops = [] if in_search else [math.ceil(part * training.steps) for part in CURVE]
    curve = []
    try:
        for step in range(1, training.steps + 1):
            value = session.step()
            if step % LOOK == 0 and not math.isfinite(float(value)):
                raise FloatingPointError(f"the loss is {float(value)} at step {step}")
            if step in stops:
                curve.append({"step": step, **measured(session.model, splits.test, ON_THE_WAY)})
        end = measured(session.model, *((splits.valid, MEASURED_IN_SEARCH) if in_search else (splits.test, MEASURED)))
    except (FloatingPointError, ValueError) as error:  # of a step so large that the head refuses it
        return {**asdict(training), "diverged": str(error)}
    return {**asdict(training), "curve": curve, "end": end}


@torch.no_grad()
def measured(model: Model, data: TextSet, count: int) -> dict[str, Any]:
    """Perplexity under the exact distribution, and how often the target is not among the best 1, 10 and 100."""
    model.eval()
    measure = model.layer.measure()
    count = min(count, len(data))
    total, missed = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    normalized = True
    for rows in (torch.arange(count) * len(data) // count).split(BLOCK):
        words, target = data.batch(rows)
        log_p, rank = measure(model.hidden(words), target)
        missed += torch.stack([(rank >= k).sum() for k in (1, 10, 100)])
        if log_p is None:
            normalized = False
        else:
            total -= log_p.double().sum()
    model.train()
    top1, top10, top100 = (missed.double() / count).tolist()
    nll = float(total) / count
    return {"perplexity": math.exp(min(nll, 700.0)) if normalized else None, "top1": top1, "top10": top10, "top100": top100}


@lru_cache(maxsize=2)
def corpus(vocabulary: str) -> TextSplits:
    """The IMDB reviews."""
    return load(imdb, LanguageSettings(tokens="words", **VOCABULARIES[vocabulary]))


@lru_cache(maxsize=2)
def frequencies(vocabulary: str) -> Tensor:
    return corpus(vocabulary).train.frequencies
