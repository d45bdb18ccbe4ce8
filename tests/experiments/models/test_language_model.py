"""The language model: heads, losses and metrics, against dense float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from spherical_loss.experiments.data.corpora import Budget
from spherical_loss.experiments.models.language_model import evaluate_language
from tests.experiments.small_texts import make_run, start

FAMILY = ("spherical", "taylor", "z", "bound")


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
    metrics = evaluate_language(network, loss, dataclasses.replace(splits.valid, budget=Budget(5 * splits.valid.D, 0)))
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


@pytest.mark.parametrize(("head", "loss"), [("dense", "softmax"), ("factored", "taylor"), ("adaptive-spherical", "taylor")])
@pytest.mark.parametrize("layers", [0, 1])
def test_embeddings_have_their_own_rate(texts: Path, head: str, loss: str, layers: int) -> None:
    """Embeddings move by that multiple of their step, all else as without it. Two steps: output weights start at zero."""
    moved = {}
    for rate in (None, 8.0):
        run = make_run(loss=loss, head=head, layers=layers, lr=0.1, output_rate=1.0, embedding_rate=rate)
        network, loss_module, optimizer, splits = start(run)
        before = {name: value.clone() for name, value in network.state_dict().items() if value.is_floating_point()}
        for rows in torch.arange(40).split(20):
            optimizer.zero_grad()
            network.objective(*splits.train.batch(rows), loss_module).backward()
            optimizer.step()
        moved[rate] = {name: network.state_dict()[name] - value for name, value in before.items()}
        assert optimizer.param_groups[0]["lr"] == 0.1  # that of the hidden layers: the history of a run has it
    plain, faster = moved[None], moved[8.0]
    assert plain["embedding.weight"].any()
    rounding = 8 * 4 * torch.finfo(torch.float32).eps  # of the difference of two embeddings of up to 4, eight times
    torch.testing.assert_close(faster.pop("embedding.weight"), 8 * plain.pop("embedding.weight"), rtol=1e-4, atol=rounding)
    for name, value in plain.items():
        torch.testing.assert_close(faster[name], value)


def test_embeddings_start_with_the_standard_deviation_that_is_given(texts: Path) -> None:
    plain, smaller = (start(make_run(embedding_std=std))[0].embedding.weight for std in (None, 0.25))
    assert torch.equal(smaller, 0.25 * plain)


@pytest.mark.parametrize("layers", [0, 2])
def test_normalized_hidden_vectors_have_a_mean_square_of_one(texts: Path, layers: int) -> None:
    plain, *_, splits = start(make_run(layers=layers))
    network, *_ = start(make_run(layers=layers, normalize="rms"))
    words, _ = splits.train.batch(torch.arange(30))
    hidden = plain.hidden(words).double()  # of the same weights
    expected = hidden / hidden.square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(network.hidden(words).double(), expected, rtol=1e-5, atol=1e-6)
