"""Every head with every loss of the family, against autograd on the dense float64 formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import spherical_loss as sl
from spherical_loss.heads import DenseHead, FactoredHead, FactoredSGD, GramHead, Head, TieredHead, TieredSGD
from tests.support.cases import CASES, FAMILY, every_member

from .reference import DenseReference, random_batch


class MixedTiers(TieredHead):
    """Tiers of all kinds, as many as the classes allow, over classes in no order."""

    def __init__(self, in_features, num_classes, *args, **options):
        cuts = sorted({num_classes // 8, num_classes // 4, num_classes // 2} - {0})
        frequencies = 1 / (1 + torch.randperm(max(1, num_classes), generator=torch.Generator().manual_seed(0)))
        kinds = ["factored", "dense", "gram", "factored"][-1 - len(cuts) :]
        super().__init__(in_features, num_classes, *args, cuts=cuts, kinds=kinds, frequencies=frequencies, **options)


HEADS: list[type[Head]] = [DenseHead, GramHead, FactoredHead, MixedTiers]
every_head = pytest.mark.parametrize("Kind", HEADS)

SHAPES = {  # N, d, D, and how many targets are ignored
    "usual": (12, 6, 30, 0),
    "one example": (1, 6, 30, 0),
    "N > d": (40, 3, 30, 0),
    "N < d / 2": (5, 20, 30, 0),
    "one class": (7, 4, 1, 0),
    "D < d": (7, 9, 4, 0),
    "some ignored": (12, 6, 30, 5),
}


def optimizer_of(head: Head, lr: float, **options: float) -> torch.optim.Optimizer:
    """Exact SGD with one rate for all classes."""
    if isinstance(head, TieredHead):
        return TieredSGD(head, lr, power=0.0, **options)
    return (
        FactoredSGD(head, lr, **options)
        if isinstance(head, FactoredHead)
        else torch.optim.SGD(head.parameters(), lr, **options)
    )


def train_step(
    head: Head, loss: sl.Loss, optimizer: torch.optim.Optimizer, hidden: Tensor, *target: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the hidden vectors."""
    H = hidden.clone().requires_grad_()
    optimizer.zero_grad()
    value = loss(head(H, *target))
    value.backward()
    optimizer.step()
    return value.detach(), H.grad


def assert_same_weights(head: Head, reference: DenseReference, **tolerance: float) -> None:
    torch.testing.assert_close(head.weight.detach().double(), reference.W, **tolerance)
    if reference.b is not None:
        torch.testing.assert_close(head.bias.detach().double(), reference.b, **tolerance)


# A head sees only the three derivatives of a loss, so that one loss with all three stands for all in every shape. With one
# class, formulas divide by what may be zero.
GRID = [("taylor", shape, bias) for shape in SHAPES for bias in (True, False)]
GRID += [(name, shape, True) for name in FAMILY if name != "taylor" for shape in ("usual", "one class")]


@every_head
@pytest.mark.parametrize(("name", "shape", "bias"), GRID)
def test_values_gradients_and_steps(Kind, name, shape, bias):
    case, (N, d, D, ignored) = FAMILY[name], SHAPES[shape]
    torch.manual_seed(1)
    head = Kind(d, D, bias=bias).double()
    if bias:  # away from o = 0, where the cosine of one class has no derivative
        head.set_bias(1 + torch.rand(D, dtype=torch.float64))
    reference, loss, optimizer = DenseReference(head.weight, head.bias), case.make(), optimizer_of(head, lr=0.05)
    for step in range(6):
        hidden, target, _ = random_batch(N, d, D, seed=step, ignored=ignored)
        hidden += 0.1  # no example is all zeros, where the cosine is not differentiable
        expected, grad_H, grads = reference.gradients(case.oracle, hidden, target)
        value, grad = train_step(head, loss, optimizer, hidden, target)
        reference.step(grads, lr=0.05)
        torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(grad, grad_H, rtol=1e-6, atol=1e-8)
    assert_same_weights(head, reference, rtol=1e-6, atol=1e-8)


@every_head
@every_member
def test_several_weighted_targets(Kind, case):
    N, d, D, K = 9, 5, 20, 3
    torch.manual_seed(2)
    head = Kind(d, D).double()
    reference, optimizer = DenseReference(head.weight, head.bias), optimizer_of(head, lr=0.05)
    for step in range(4):
        hidden, target, target_weight = random_batch(N, d, D, seed=step, K=K)
        hidden += 0.1
        expected, grad_H, grads = reference.gradients(case.oracle, hidden, target, target_weight)
        value, grad = train_step(head, case.make(), optimizer, hidden, target, target_weight)
        reference.step(grads, lr=0.05)
        torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(grad, grad_H, rtol=1e-6, atol=1e-8)
    assert_same_weights(head, reference, rtol=1e-6, atol=1e-8)


@every_head
@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(1, 40),
    d=st.integers(1, 20),
    D=st.integers(1, 50),
    bias=st.booleans(),
    lr=st.floats(0, 2).map(lambda lr: 0.987 * lr),  # round ones make I - lr A singular here and there, which is refused
    seed=st.integers(0, 99),
)
def test_any_shape(Kind, N, d, D, bias, lr, seed):
    torch.manual_seed(seed)
    case, head = CASES["taylor"], Kind(d, D, bias=bias).double()
    reference, optimizer = DenseReference(head.weight, head.bias), optimizer_of(head, lr)
    for step in range(3):
        hidden, target, _ = random_batch(N, d, D, seed + step)
        expected, grad_H, grads = reference.gradients(case.oracle, hidden, target)
        value, grad = train_step(head, case.make(), optimizer, hidden, target)
        reference.step(grads, lr)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(grad, grad_H, rtol=1e-5, atol=1e-8)
    assert_same_weights(head, reference, rtol=1e-5, atol=1e-7)


@every_head
def test_leading_dimensions(Kind):
    head, loss = Kind(5, 20).double(), sl.TaylorSoftmaxLoss(reduction="none")
    hidden, target, _ = random_batch(24, 5, 20, seed=0)
    flat = loss(head(hidden, target))
    assert torch.equal(loss(head(hidden.reshape(2, 3, 4, 5), target.reshape(2, 3, 4))), flat.reshape(2, 3, 4))
    torch.testing.assert_close(loss(head(hidden[0], target[0])), flat[0])
    assert head.logits(hidden.reshape(2, 3, 4, 5)).shape == (2, 3, 4, 20)


@every_head
def test_logits_statistics_and_topk_agree_with_the_dense_layer(Kind, monkeypatch):
    monkeypatch.setattr("spherical_loss.heads.base.CHUNK", 64)  # so that the search takes many chunks
    torch.manual_seed(0)
    head = Kind(6, 57).double()
    head.set_bias(torch.randn(57, dtype=torch.float64))
    hidden, _, _ = random_batch(8, 6, 57, seed=0)
    o = DenseReference(head.weight, head.bias).logits(hidden)
    torch.testing.assert_close(head.logits(hidden), o)
    s, q = head.sums(hidden)
    torch.testing.assert_close(s, o.sum(-1))
    torch.testing.assert_close(q, o.square().sum(-1))
    for case in CASES.values():
        best = case.oracle(o).topk(5, largest=False).indices  # the least loss is the most probable class
        assert torch.equal(head.topk(hidden, 5, case.make()).classes, best)
    with pytest.raises(ValueError, match="between 1 and the 57 classes"):
        head.topk(hidden, 58, sl.TaylorSoftmaxLoss())


def test_a_class_whose_output_is_nan_is_found_in_any_chunk(monkeypatch):
    monkeypatch.setattr("spherical_loss.heads.base.CHUNK", 64)
    head = sl.DenseHead(6, 57)
    with torch.no_grad():
        head.weight[50] = torch.nan
    found = head.topk(torch.randn(8, 6), 3, sl.TaylorSoftmaxLoss())
    assert torch.equal(found.classes[:, 0], torch.full((8,), 50))


@every_head
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_of_some_classes(Kind, bias):
    torch.manual_seed(0)
    head = Kind(6, 57, bias=bias).double()
    optimizer = optimizer_of(head, lr=0.1)
    for step in range(3):
        hidden, target, _ = random_batch(8, 6, 57, seed=step)
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        if isinstance(head, FactoredHead):
            head.close_frame()
    classes = torch.randint(57, (8, 5))
    expected = DenseReference(head.weight, head.bias).logits(hidden).gather(1, classes)
    torch.testing.assert_close(head.outputs_of(hidden, classes), expected)


@every_head
@pytest.mark.parametrize("bias", [True, False])
def test_conversion_from_and_to_linear(Kind, bias):
    linear = torch.nn.Linear(6, 20, bias=bias)
    head = Kind.from_linear(linear, ignore_index=-1)
    back = head.to_linear()
    assert torch.equal(back.weight, linear.weight)
    assert torch.equal(back.bias, linear.bias) if bias else back.bias is None
    assert head.ignore_index == -1


@every_head
@pytest.mark.parametrize("Source", HEADS)
@pytest.mark.parametrize("bias", [True, False])
def test_conversion_from_any_head(Source, Kind, bias):
    torch.manual_seed(0)
    source = Source(6, 20, bias=bias, ignore_index=-1).double()
    hidden, target, _ = random_batch(12, 6, 20, seed=0)
    train_step(source, sl.TaylorSoftmaxLoss(), optimizer_of(source, lr=0.1), hidden, target)
    head = Kind.from_linear(source)
    torch.testing.assert_close(head.weight.detach(), source.weight.detach(), rtol=0, atol=0)
    assert torch.equal(head.bias, source.bias) if bias else head.bias is None
    assert (head.ignore_index, Kind.from_linear(source, ignore_index=7).ignore_index) == (-1, 7)


@every_head
def test_conversion_from_something_else(Kind):
    with pytest.raises(TypeError, match=r"nn.Linear or a head, not Embedding"):
        Kind.from_linear(torch.nn.Embedding(6, 20))


@every_head
def test_prior_bias_and_zero_weights_give_the_frequencies(Kind):
    frequencies = 1 / torch.arange(1, 101, dtype=torch.float64)
    frequencies /= frequencies.sum()
    head, hidden = Kind(7, 100, init="zero"), torch.randn(3, 7)
    for loss in (sl.TaylorSoftmaxLoss(), sl.SphericalSoftmaxLoss(0.1)):
        head.set_bias(loss.prior_bias(frequencies))
        each = torch.stack([loss(head(hidden[:1], torch.tensor([c]))) for c in range(100)])
        torch.testing.assert_close(torch.exp(-each).double(), frequencies, rtol=1e-5, atol=0)


@every_head
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_hidden_vectors(Kind, dtype):
    head, loss = Kind(6, 30), sl.TaylorSoftmaxLoss()
    head.set_weight(
        head.weight.detach().to(dtype).float()
    )  # so that a head that computes in half precision rounds nothing here
    hidden, target, _ = random_batch(10, 6, 30, seed=0)
    H = hidden.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=Kind is DenseHead):  # F.linear wants one dtype; the other heads widen
        value = loss(head(H, target))
    value.backward()
    reference = DenseReference(head.weight, head.bias)
    expected, grad_H, _ = reference.gradients(CASES["taylor"].oracle, H.detach(), target)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if Kind is DenseHead else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(value.double(), expected, **tolerance)
    torch.testing.assert_close(H.grad.double(), grad_H, rtol=2e-2, atol=2e-3)
    assert H.grad.dtype == dtype


@pytest.mark.parametrize("Kind", [GramHead, FactoredHead])
def test_autocast_does_not_reach_the_products(Kind):
    head, loss = Kind(16, 40), sl.TaylorSoftmaxLoss()
    hidden, target, _ = random_batch(30, 16, 40, seed=0)
    plain = loss(head(hidden.float(), target))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(head(hidden.float(), target)), plain)


@every_head
def test_bad_input(Kind):
    head, hidden, target = Kind(4, 10), torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"\(3, 5\).*in_features=4"):
        head(torch.randn(3, 5), target)
    with pytest.raises(TypeError, match="int64"):
        head(hidden, target.float())
    with pytest.raises(TypeError, match="floating point"):
        head(hidden.long(), target)
    with pytest.raises(ValueError, match=r"\(2,\).*needs \(3,\)"):
        head(hidden, target[:2])
    with pytest.raises(ValueError, match="target_weight"):
        head(hidden, target.unsqueeze(1), torch.ones(3, 2))
    for wrong in (10, -1):
        with pytest.raises(IndexError, match=rf"target {wrong} at position \(1,\).*0 to 9.*ignore_index=-100"):
            head(hidden, torch.tensor([0, wrong, -100]))
    with pytest.raises(ValueError, match="at least 1"):
        Kind(0, 10)
    with pytest.raises(ValueError, match="he, zero"):
        Kind(4, 10, init="ones")
    with pytest.raises(ValueError, match="bias=True"):
        Kind(4, 10, bias=False).set_bias(torch.zeros(10))
    with pytest.raises(ValueError, match=r"\(10,\)"):
        head.set_bias(torch.zeros(9))
    with pytest.raises(ValueError, match=r"\(10, 4\)"):
        head.set_weight(torch.zeros(9, 4))
    for outside in (sl.SoftmaxLoss(), sl.AbsSoftmaxLoss()):
        with pytest.raises(TypeError, match="outside the spherical family"):
            outside(head(hidden, target))
    with pytest.raises(ValueError, match="label_smoothing"):
        sl.TaylorSoftmaxLoss(label_smoothing=0.1)(head(hidden, target))


@every_head
def test_the_ignored_index_may_be_a_class(Kind):
    """Padding is often class 0: every target is in range, and some are ignored all the same."""
    head, loss = Kind(4, 10, ignore_index=0).double(), sl.TaylorSoftmaxLoss()  # the head marks them
    hidden, target, _ = random_batch(6, 4, 10, seed=0)
    target[:2], target[2:] = 0, target[2:].clamp_min(1)
    H, kept = hidden.clone().requires_grad_(), hidden[2:].clone().requires_grad_()
    value, expected = loss(head(H, target)), loss(head(kept, target[2:]))
    torch.testing.assert_close(value, expected)
    torch.autograd.backward([value, expected])
    torch.testing.assert_close(H.grad, torch.cat([torch.zeros(2, 4, dtype=torch.float64), kept.grad]))


@every_head
def test_class_weight_and_every_target_ignored(Kind):
    head, weight = Kind(4, 10).double(), torch.rand(10, dtype=torch.float64)
    hidden, target, _ = random_batch(6, 4, 10, seed=0, ignored=2)
    loss = sl.TaylorSoftmaxLoss(weight=weight)
    torch.testing.assert_close(loss(head(hidden, target)), loss(head.logits(hidden), target))
    assert loss(head(hidden, torch.full((6,), -100))).isnan()
    assert sl.TaylorSoftmaxLoss(reduction="sum")(head(hidden[:0], target[:0])) == 0
