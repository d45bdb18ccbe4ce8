"""Hidden vectors with a large common part that the weights do not see: errors are those of the dense head in float32.

They are compared with four times the error of dense float32, since both are random; they were thousands of times larger.
"""

from __future__ import annotations

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads import DenseHead, FactoredHead, FactoredSGD, GramHead, TieredHead
from spherical_loss.heads.split import split
from tests.support.cases import CASES

from .reference import DenseReference
from .test_heads import train_step

d, D, N = 16, 2_000, 64
Z = CASES["z"]


def weights_without(direction: torch.Tensor) -> torch.Tensor:
    W = torch.randn(D, d)
    return W - torch.outer(W @ direction, direction) / direction.square().sum()


def hidden_vectors(how: str, size: float) -> torch.Tensor:
    """Around a mean, around a mean of either sign, or around it with one that is tiny; (N, d)."""
    H = torch.randn(N, d) + size * (torch.randn(N, 1).sign() if how == "either sign" else 1)
    if how == "one is tiny":
        H[0] *= 1e-3 / size
    return H


def errors(head: sl.Head, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Relative errors of q and of the gradients of hidden vectors and, where there are parameters, weights; Z-loss."""
    reference = DenseReference(head.weight, head.bias)
    H = hidden.clone().requires_grad_()
    statistics = head(H, target)
    Z.make()(statistics).backward()
    _, grad_H, (grad_W, _) = reference.gradients(Z.oracle, hidden, target)
    q = reference.logits(hidden.double()).square().sum(1)
    found = [((statistics.q.detach() - q) / q).abs().max(), (H.grad - grad_H).norm() / grad_H.norm()]
    if isinstance(head.weight, torch.nn.Parameter):
        found.append((head.weight.grad - grad_W).norm() / grad_W.norm())
    return torch.stack(found)


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("how", ["mean", "either sign", "one is tiny"])
@pytest.mark.parametrize("kind", [GramHead, FactoredHead, TieredHead])
def test_a_large_mean_that_the_weights_do_not_see(kind, how, size):
    """q was off by 5e-4, 4e-2 and 6, and the gradient of the Z-loss by 140%."""
    torch.manual_seed(0)
    weight, bias, hidden = weights_without(torch.ones(d)), 0.1 * torch.randn(D), hidden_vectors(how, size)
    target, found = torch.randint(D, (N,)), []
    for head in (kind(d, D), DenseHead(d, D)):
        head.set_weight(weight)
        head.set_bias(bias)
        found.append(errors(head, hidden, target))
    ours, of_dense = found
    assert (ours <= 4 * of_dense[: len(ours)] + 1e-6).all(), found


@pytest.mark.parametrize("rows", [8, 64])  # of the Gram head: through the logits, and through the Gram matrix
def test_both_forms_of_the_gram_head(rows):
    torch.manual_seed(0)
    head, dense = GramHead(d, D, bias=False), DenseHead(d, D, bias=False)
    head.set_weight(weights_without(torch.ones(d)))
    dense.set_weight(head.weight)
    H, target = 1e3 + torch.randn(rows, d), torch.randint(D, (rows,))
    assert head.plan(rows).form == ("logits" if rows == 8 else "gram")
    _, _, (grad_W,) = DenseReference(head.weight, None).gradients(Z.oracle, H, target)
    others = torch.eye(d, dtype=torch.float64) - 1 / d  # the directions other than the mean
    found = []
    for h in (head, dense):
        Z.make()(h(H, target)).backward()
        found.append(float(((h.weight.grad - grad_W) @ others).norm() / (grad_W @ others).norm()))
    assert found[0] <= 4 * found[1], found


@pytest.mark.parametrize(("size", "lr"), [(1e2, 1e-1), (1e3, 1e-3), (1e4, 1e-5)])
def test_training_with_a_large_mean(size, lr):
    """The rate is about the largest that is stable, 1 / |h|^2; each step changes Q in float32."""
    torch.manual_seed(0)
    head = FactoredHead(d, D)
    head.set_weight(0.3 * weights_without(torch.ones(d)))
    reference, in_float32 = DenseReference(head.weight, head.bias), DenseReference(head.weight, head.bias)
    in_float32.W, in_float32.b = in_float32.W.float(), in_float32.b.float()
    optimizer, worst = FactoredSGD(head, lr), torch.zeros(2)
    for _ in range(100):
        hidden, target = hidden_vectors("mean", size), torch.randint(D, (N,))
        q = reference.logits(hidden.double()).square().sum(1)
        found = torch.stack([head.sums(hidden)[1], in_float32.logits(hidden).double().square().sum(1)])
        worst = torch.maximum(worst, ((found - q) / q).abs().amax(1))
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        for dense in (reference, in_float32):
            o = dense.logits(hidden.to(dense.W.dtype)).requires_grad_()
            (grad_o,) = torch.autograd.grad(CASES["taylor"].oracle(o).gather(1, target.unsqueeze(1)).mean(), o)
            dense.step([grad_o.T @ hidden.to(o.dtype), grad_o.sum(0)], lr)
    assert worst[0] <= 4 * worst[1] + 1e-6, worst


def test_an_example_that_is_not_finite_does_not_affect_the_others():
    torch.manual_seed(0)
    hidden, target = torch.randn(N, d), torch.randint(D, (N,))
    for head in (GramHead(d, D), FactoredHead(d, D), TieredHead(d, D, cuts=(10, 100))):
        expected = head(hidden, target).q
        for value in (float("nan"), float("inf")):
            broken = hidden.clone()
            broken[3, 5] = value
            q = head(broken, target).q
            assert not q[3].isfinite()
            others = torch.arange(N) != 3
            torch.testing.assert_close(q[others], expected[others], rtol=2e-6, atol=0.0)  # float32


def test_hidden_vectors_of_zero():
    for head in (GramHead(d, D, bias=False), FactoredHead(d, D, bias=False)):
        statistics = head(torch.cat([torch.zeros(1, d), 100 + torch.randn(3, d)]), torch.arange(4))
        assert statistics.q[0] == statistics.s[0] == statistics.o_c[0] == 0
        assert head(torch.zeros(2, d), torch.arange(2)).q.tolist() == [0, 0]


def test_the_parts_are_no_larger_than_the_vectors():
    torch.manual_seed(0)
    for X in (torch.randn(N, d), 1e3 + torch.randn(N, d), 1e-10 * torch.rand(N, d), torch.zeros(N, d), torch.zeros(0, d)):
        u, alpha, R = split(X)
        torch.testing.assert_close(torch.outer(alpha, u) + R, X, rtol=0.0, atol=1e-6 * float(X.norm()))
        assert (R.norm(dim=1) <= X.norm(dim=1) * (1 + 1e-6)).all()
