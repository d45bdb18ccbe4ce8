"""The GPT-2 example at a tiny size: the gradient of the tied weight is the dense one, it learns, it is saved and loaded."""

from __future__ import annotations

import warnings

import pytest
import torch

from spherical_loss import SphericalSoftmaxLoss
from tests.support import oracle

from .scripts import script

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # transformers' own, while it is imported
    gpt2 = script("transformers_gpt2")

SIZES = ["--vocabulary=60", "--width=16", "--layers=1", "--heads=2", "--length=12", "--batch-size=4", "--steps=30", "--lr=0.01"]
TEXT = "the cat sat on the mat, the dog sat on the cat. " * 20


@pytest.fixture
def options(tmp_path):
    return gpt2.arguments([*SIZES, "--folder", str(tmp_path)])


def test_gradient_of_the_tied_weight_is_that_of_the_dense_formula(options):
    torch.manual_seed(0)
    model = gpt2.GramGPT2(gpt2.config(options), SphericalSoftmaxLoss(eps=0.02)).double().eval()
    assert model.head.weight is model.transformer.wte.weight
    tokens = torch.randint(60, (4, 12))
    value = model(tokens)
    value.backward()

    weight = model.transformer.wte.weight
    o = model.transformer(input_ids=tokens).last_hidden_state[:, :-1] @ weight.T
    losses = oracle.quadratic(0.02, 0.0, 1.0)(o).gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(value, losses.mean())
    for parameter in (weight, model.transformer.wpe.weight):
        (expected,) = torch.autograd.grad(losses.mean(), parameter, retain_graph=True)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["gram", "lm_head"])
def test_learns(options, kind):
    report = gpt2.train(kind, gpt2.Words(TEXT, 60), options)
    assert report.losses[-1] < 0.7 * report.losses[0]
    assert len(report.seconds) == options.steps
    assert report.peak_mib > 0


def test_saved_and_loaded_and_generating(options):
    words = gpt2.Words(TEXT, 60)
    gpt2.train("gram", words, options)
    first, second = (gpt2.GramGPT2(gpt2.config(options), SphericalSoftmaxLoss()).eval() for _ in range(2))
    for model in (first, second):
        model.load_state_dict(torch.load(options.folder / "gram.pt", weights_only=True))
        assert model.head.weight is model.transformer.wte.weight
    tokens = words.tokens[:12].unsqueeze(0)
    assert torch.equal(first(tokens), second(tokens))

    greedy = first.generate(tokens, 8, k=1)
    assert torch.equal(greedy, second.generate(tokens, 8, k=1))
    assert greedy.shape == (1, 20)
    assert first.generate(tokens, 8).max() < 60
    assert words.text(tokens[0]).startswith("the cat sat on")
