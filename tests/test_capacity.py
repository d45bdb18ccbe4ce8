"""The bound ``sum_c max_h p(c | h) <= d + 2``, on random and on trained layers, and the best perplexity that follows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spherical_loss import DenseHead, SphericalSoftmaxLoss, TaylorSoftmaxLoss
from spherical_loss.capacity import best_perplexity, leverages


def taylor(o: Tensor) -> Tensor:
    g = 1 + o + o**2 / 2
    return g / g.sum(-1, keepdim=True)


def spherical(o: Tensor) -> Tensor:
    g = o**2 + 0.01
    return g / g.sum(-1, keepdim=True)


def most_probable(W: Tensor, b: Tensor, shift: float, probabilities) -> Tensor:
    """For each class, the highest probability found: with random hidden vectors, and with those that its own row favours."""
    generator = torch.Generator().manual_seed(0)
    V = torch.cat([W, (b + shift).unsqueeze(1)], 1)
    favoured = V @ torch.linalg.pinv(V.T @ V)
    hidden = [favoured[:, :-1] / favoured[:, -1:]]
    hidden += [scale * torch.randn(300, W.shape[1], generator=generator, dtype=W.dtype) for scale in (0.1, 1.0, 10.0, 1e3)]
    hidden += [scale * W for scale in (1.0, -1.0, 100.0, -100.0)]
    h = torch.cat(hidden)
    return probabilities(h[h.isfinite().all(1)] @ W.T + b).max(0).values


@pytest.mark.parametrize(("probabilities", "shift"), [(taylor, 1.0), (spherical, 0.0)])
@given(D=st.integers(1, 60), d=st.integers(1, 12), seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_no_class_is_more_probable_than_its_leverage_allows(probabilities, shift, D, d, seed, scale) -> None:
    generator = torch.Generator().manual_seed(seed)
    W, b = (scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((D, d), (D,)))
    best, bound = most_probable(W, b, shift, probabilities), leverages(W, b, shift)
    assert (best <= bound.clamp_min(1 / D) + 1e-9).all()
    assert best.sum() <= d + 2 + 1e-9
    assert bound.sum() <= d + 1 + 1e-9


def test_the_bound_is_reached() -> None:
    """With outputs far above sqrt(eps), a class is as probable as its leverage."""
    W = torch.randn(50, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    favoured = 1e6 * W @ torch.linalg.inv(W.T @ W)  # row c: the hidden vector at which p(c | h) is largest
    p = spherical(favoured @ W.T).diagonal()
    torch.testing.assert_close(p, leverages(W, shift=0.0), rtol=1e-4, atol=1e-6)
    assert p.sum() == pytest.approx(4, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "probabilities", "shift"), [(TaylorSoftmaxLoss(), taylor, 1.0), (SphericalSoftmaxLoss(), spherical, 0.0)]
)
def test_trained_layers_keep_the_bound(loss, probabilities, shift) -> None:
    """Classes of their own hidden vectors, so that training wants all 40 to be certain, and d = 6 forbids it."""
    torch.manual_seed(0)
    means, head = torch.randn(40, 6), DenseHead(6, 40)
    optimizer = torch.optim.Adam(head.parameters(), 0.03)
    for _ in range(500):
        optimizer.zero_grad()
        loss(head(means, torch.arange(40))).backward()
        optimizer.step()
    W, b = head.weight.detach().double(), head.bias.detach().double()
    own = probabilities(means.double() @ W.T + b).diagonal()
    assert own.sum() > 1.5  # something was learned: a layer that knows nothing has 1
    best = torch.maximum(own, most_probable(W, b, shift, probabilities))
    assert best.sum() <= 6 + 2
    assert (best <= leverages(W, b, shift).clamp_min(1 / 40) + 1e-9).all()


@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=60).filter(any), d=st.integers(1, 20))
def test_best_perplexity_by_bisection(counts: list[int], d: int) -> None:
    f = [count / sum(counts) for count in counts if count]

    def total(t: float) -> float:
        return sum(min(1.0, t * x) for x in f)

    low, high = 0.0, 1 / min(f)  # at which all are 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) <= d + 2 else (low, middle)
    expected = math.exp(-sum(x * math.log(min(1.0, high * x)) for x in f))
    assert best_perplexity(torch.tensor(counts), d) == pytest.approx(expected, rel=1e-9)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        leverages(torch.ones(3))
    with pytest.raises(ValueError, match=r"and bias \(2,\)"):
        leverages(torch.ones(3, 4), torch.ones(2))
    with pytest.raises(ValueError, match="not all zero"):
        best_perplexity(torch.zeros(3), 2)
    with pytest.raises(ValueError, match="not negative"):
        best_perplexity(torch.tensor([1.0, -1.0]), 2)
    with pytest.raises(ValueError, match="d is 0"):
        best_perplexity(torch.ones(3), 0)
