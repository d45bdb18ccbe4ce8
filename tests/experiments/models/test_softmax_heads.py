"""The adaptive softmax as a likelihood layer, and that the language model trains with every such layer, and with tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spherical_loss.experiments.models import language_model
from spherical_loss.experiments.models.softmax_heads import AdaptiveSoftmax
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.train import train
from spherical_loss.learning_rate import suggested_lr
from tests.experiments.small_texts import make_run, start

N = 30


def test_adaptive_softmax_is_a_distribution_and_its_own_loss() -> None:
    torch.manual_seed(0)
    layer, target = AdaptiveSoftmax(16, 3000), torch.randint(3000, (N,))
    hidden = torch.randn(N, 16)
    log_p = layer.log_prob(hidden)
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(N))
    picked = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(layer(hidden, target).output, picked)
    torch.testing.assert_close(layer(hidden, target).loss, -picked.mean())
    best = layer.topk(hidden, 4)
    torch.testing.assert_close(best.scores, log_p.topk(4).values)
    assert torch.equal(best.classes, log_p.topk(4).indices)


LAYERS = [
    ("softmax", "sampled"),
    ("softmax", "adaptive"),
    ("taylor", "adaptive-spherical"),
    ("spherical", "adaptive-spherical"),
    ("taylor", "tiered"),
]


@pytest.mark.parametrize(("loss", "head"), LAYERS)
def test_the_language_model_learns_with_them(texts: Path, tmp_path: Path, loss: str, head: str) -> None:
    run = make_run(loss=loss, head=head, lr=0.1, output_rate=1.0)
    assert run.label == f"{loss}/{head}"
    result = train(run, tmp_path, Display())
    assert result["valid"]["perplexity"] < 0.8 * result["start"]["perplexity"]
    assert (result["test"]["simlex_output"] is None) == ("adaptive" in head)


@pytest.mark.parametrize("head", ["dense", "gram", "factored", "tiered"])
@pytest.mark.parametrize("loss", ["taylor", "spherical"])
def test_the_output_layer_has_the_suggested_rate(texts: Path, tmp_path: Path, loss: str, head: str) -> None:
    """Unless another is given."""

    def output_rate(optimizer: torch.optim.Optimizer) -> float:
        groups = optimizer.factored_groups() if head in ("factored", "tiered") else optimizer.param_groups[2:]
        return min(group["lr"] for group in groups)  # of tiers, that of the rarest words

    run = make_run(loss=loss, head=head, lr=0.1, output_rate=None)
    network, criterion, optimizer, _ = start(run)
    assert output_rate(optimizer) == pytest.approx(suggested_lr(network.head, criterion, run.settings.batch_size))
    result = train(run, tmp_path, Display())
    assert result["valid"]["perplexity"] < result["start"]["perplexity"]
    _, _, given, _ = start(make_run(loss=loss, head=head, lr=0.1, output_rate=7.0))
    assert output_rate(given) == pytest.approx(0.7)
    assert make_run(loss="z", head=head, lr=0.1, output_rate=None).settings.output_rate == 1.0  # none is suggested


@pytest.mark.parametrize(("power", "ratio"), [(None, 0.5), (0.0, 0.0), (0.2, 0.2)])
def test_rates_of_tiers_grow_with_the_given_power(texts: Path, power: float | None, ratio: float) -> None:
    run = make_run(loss="taylor", head="tiered", lr=0.1, output_rate=None, tier_power=power)
    network, criterion, optimizer, _ = start(run)
    rates = [group["lr"] for group in optimizer.factored_groups()]
    frequencies = network.head.tier_frequencies
    assert len(rates) > 1
    assert [rate / rates[-1] for rate in rates] == pytest.approx([(p / frequencies[-1]) ** ratio for p in frequencies])
    assert rates[-1] == pytest.approx(suggested_lr(network.head, criterion, run.settings.batch_size, power=ratio))


def test_the_language_model_of_many_words_has_two_softmaxes_and_two_tails(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MANY_CLASSES": 30, "FREQUENT_OF_MANY": (5, 10), "TAIL_CUTOFFS": (20, 1_000)}.items():
        monkeypatch.setattr(language_model, name, value)
    made, make = [], language_model.made_head
    monkeypatch.setattr(language_model, "made_head", lambda *arguments: made.append(make(*arguments)) or made[-1])
    run = make_run(loss="taylor", head="adaptive-spherical", lr=0.1, output_rate=1.0)
    result = train(run, tmp_path, Display())
    assert made[0].cutoffs == (5, 10, 20)  # a tail from rank 1,000 would be too small
    assert all(tail.weight.any() for tail in made[0].tails)  # they start from zero: all have learned
    assert result["valid"]["perplexity"] < 0.8 * result["start"]["perplexity"]
