"""Sampled and adaptive softmax: what they compute, and that the language model trains with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from spherical_loss import SoftmaxLoss
from spherical_loss.experiments.models.softmax_heads import AdaptiveSoftmaxHead, SampledSoftmaxHead
from spherical_loss.experiments.running.progress import Reporter
from spherical_loss.experiments.training.train import train
from tests.experiments.models.test_language_model import make_run, texts  # noqa: F401

D, d, N = 60, 5, 30


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, d, generator=generator), torch.randint(D, (N,), generator=generator)


def test_sampled_loss_and_gradient_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    head = SampledSoftmaxHead(d, D, negatives=20)
    head.set_bias(torch.randn(D))
    hidden, target = example()
    torch.manual_seed(5)
    value = head.training_loss(hidden, target)
    value.backward()

    torch.manual_seed(5)  # the same draws
    noise = [min(D - 1, int(math.exp(u * math.log(D + 1)) - 1)) for u in torch.rand(20).tolist()]
    W, b = head.weight.detach().double().requires_grad_(), head.bias.detach().double()
    expected = [20 * math.log((c + 2) / (c + 1)) / math.log(D + 1) for c in range(D)]
    total = torch.zeros((), dtype=torch.float64)
    for h, c in zip(hidden.double(), target.tolist(), strict=True):
        among = [c, *(k for k in noise if k != c)]
        o = torch.stack([W[k] @ h + b[k] - (math.log(expected[k]) if i else 0) for i, k in enumerate(among)])
        total = total + torch.logsumexp(o, 0) - o[0]
    (total / N).backward()
    assert math.isclose(value.item(), total.item() / N, rel_tol=1e-5)
    assert head.weight.grad.is_sparse
    torch.testing.assert_close(head.weight.grad.to_dense().double(), W.grad, rtol=1e-4, atol=1e-6)


def test_many_negatives_come_close_to_the_softmax() -> None:
    torch.manual_seed(0)
    head, (hidden, target) = SampledSoftmaxHead(d, D, negatives=200_000), example()
    exact = torch.nn.functional.cross_entropy(hidden.double() @ head.weight.detach().double().T, target)
    assert math.isclose(head.training_loss(hidden, target).item(), exact.item(), rel_tol=0.01)
    few = SampledSoftmaxHead(d, D, negatives=1)
    few.set_weight(head.weight.detach())
    assert not math.isclose(few.training_loss(hidden, target).item(), exact.item(), rel_tol=0.1)


def test_adaptive_logits_are_log_probabilities_of_its_loss() -> None:
    torch.manual_seed(0)
    head, (hidden, target) = AdaptiveSoftmaxHead(16, 3000), example()
    hidden = torch.randn(N, 16)
    log_p = head.logits(hidden)
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(N))
    assert math.isclose(head.training_loss(hidden, target).item(), SoftmaxLoss()(log_p, target).item(), rel_tol=1e-5)
    best = head.topk(hidden, 4, SoftmaxLoss())
    torch.testing.assert_close(best.scores, log_p.gather(1, best.classes))
    assert bool((best.scores[:, -1:] >= log_p).sum(1).eq(D * 50 - 3).all())


@pytest.mark.parametrize("head", ["sampled", "adaptive"])
def test_the_language_model_learns_with_them(texts: Path, tmp_path: Path, head: str) -> None:  # noqa: F811
    run = make_run(loss="softmax", head=head, lr=0.1, output_rate=1.0)
    assert run.label == f"softmax/{head}"
    result = train(run, tmp_path, Reporter())
    assert result["valid"]["perplexity"] < 0.8 * result["start"]["perplexity"]
    assert (result["test"]["simlex_output"] is None) == (head == "adaptive")
