"""The model of the guide to transformers: its loss in parts, greedy and beam search, against the dense formula in float64."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from tests.support import oracle
from tests.test_docs import blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # transformers' own, while it is imported
    from transformers import GPT2Config

D, EPS = 7, 0.01


@pytest.fixture(scope="module")
def model():
    """The class as the guide defines it, with random weights."""
    namespace = {}
    for _, text in blocks("docs/guides/transformers.md"):
        if text.startswith(("import torch\n", "from transformers import GPT2LMHeadModel")):
            exec(compile(text, "transformers.md", "exec"), namespace)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=D, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    config.initializer_range = 1.0  # so that the most probable tokens are clear, and some have a negative output
    return namespace["SphericalGPT2"](config).double().eval()


def log_p(model, tokens):
    """Of every next token, from the dense formula."""
    o = model.transformer(tokens).last_hidden_state @ model.transformer.wte.weight.T
    return -oracle.quadratic(EPS, 0, 1)(o)


def test_loss_and_its_parts(model):
    labels = torch.randint(D, (4, 10))
    labels[1, 5:] = -100
    tokens = labels.clamp_min(0)
    each = -log_p(model, tokens)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2) * (labels[:, 1:] != -100)
    count = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(model(tokens, labels=labels).loss, each.sum() / count)
    parts = [model(tokens[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss for i in (0, 2)]
    torch.testing.assert_close(sum(parts), each.sum() / count)


@torch.no_grad()
def test_logits_are_log_probabilities_and_greedy_search_follows_them(model):
    tokens = torch.randint(D, (3, 4))
    expected = log_p(model, tokens)
    torch.testing.assert_close(model(tokens).logits, expected)
    torch.testing.assert_close(model(tokens).logits.log_softmax(-1), expected)
    found = model.generate(tokens, max_new_tokens=6, do_sample=False)
    for _ in range(6):
        tokens = torch.cat([tokens, log_p(model, tokens)[:, -1].argmax(1, keepdim=True)], 1)
    assert torch.equal(found, tokens)
    o = model.lm_head.logits(model.transformer(tokens).last_hidden_state)
    assert (o.argmax(-1) != log_p(model, tokens).argmax(-1)).any()  # the outputs themselves would find something else


@torch.no_grad()
def test_beam_search_finds_the_most_probable_sequence(model):
    """With a beam for every prefix it is exhaustive."""
    prompt = torch.randint(D, (1, 4))
    every = torch.tensor(list(itertools.product(range(D), repeat=3)))
    tokens = torch.cat([prompt.expand(len(every), -1), every], 1)
    total = log_p(model, tokens)[:, 3:-1].gather(2, every.unsqueeze(2)).sum((1, 2))
    found = model.generate(
        prompt, max_new_tokens=3, num_beams=D**2, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    assert found.sequences[0].tolist() == tokens[total.argmax()].tolist()
    torch.testing.assert_close(found.sequences_scores[0].double() * 3, total.max(), rtol=1e-5, atol=0)
