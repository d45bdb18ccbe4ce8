"""The autograd function of the likelihoods: every option and shape of large logits, in blocks and as rows, against float64."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spherical_loss as sl
from spherical_loss.quadratic import Quadratic, QuadraticLikelihoodFunction, in_one_function, normalizer
from spherical_loss.statistics import affine
from tests.support.cases import CASES, data
from tests.support.oracle import expected

NAMES = ["taylor", "spherical", "quadratic"]
# One block, several, one row above a block.
SHAPES = [(300, 100), (300, 1_000), (60, 10_000), (2, 300_000), (40, 100, 9), (20_000,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_options_of_large_logits(name, shape):
    case, D = CASES[name], shape[0] if len(shape) == 1 else shape[1]
    for reduction, weighted, ignore in itertools.product(("none", "mean", "sum"), (False, True), (-100, 3)):
        o, target = data(*shape, dtype=torch.float32)
        if target.dim():
            target.view(-1)[::3] = ignore
        options = {"reduction": reduction, "ignore_index": ignore}
        if weighted:
            options["weight"] = torch.linspace(0.2, 2.0, D, dtype=torch.float64)
        o.requires_grad_()
        exact = o.detach().double().requires_grad_()
        loss, wanted = case.make(**options)(o, target), expected(case.oracle, exact, target, **options)
        assert loss.dtype == torch.float32
        direction = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)
        (grad,) = torch.autograd.grad(loss, o, direction)
        (grad_wanted,) = torch.autograd.grad(wanted, exact, direction.double())
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
        assert (grad.double() - grad_wanted).abs().max() <= 1e-6 * grad_wanted.abs().max()


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_ignored(overwrite):
    o, target = data(200, 100, dtype=torch.float32)
    o.requires_grad_()
    loss = sl.TaylorSoftmaxLoss(overwrite_logits=overwrite)(1 * o, torch.full_like(target, -100))
    assert loss.isnan()
    loss.backward()
    assert torch.equal(o.grad, torch.zeros_like(o))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_passes_share_no_memory(shape):
    """The memory of the first gradient is reserved by the forward pass: a second gradient must have its own."""
    o, target = data(*shape, dtype=torch.float32)
    loss = sl.TaylorSoftmaxLoss()(o.requires_grad_(), target)
    (first,) = torch.autograd.grad(loss, o, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(2 * loss, o)
    assert torch.equal(first, kept)
    torch.testing.assert_close(second, 2 * kept)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("g", [Quadratic(1.0, 1.0, 0.5), Quadratic(0.3, 0.0, 1.0), Quadratic(1.5, -1.0, 0.7)], ids=str)
def test_derivatives_of_the_function(g, reduction):
    o, target = data(4, 5, 2)
    o.requires_grad_()
    target[0, 1] = -100
    weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)

    def loss(x):
        assert in_one_function(x)
        return QuadraticLikelihoodFunction.apply(x, target, g, weight, -100, reduction, False)

    assert gradcheck(loss, (o,))
    assert gradgradcheck(loss, (o,))


def test_transforms_take_another_way():
    """Large logits under vmap and torch.func, which see the operations one by one."""
    x, target = data(3, 40, 500)[0].movedim(1, 2), torch.arange(3 * 500).reshape(3, 500) % 40
    loss = sl.TaylorSoftmaxLoss()
    torch.testing.assert_close(torch.vmap(loss)(x, target), torch.stack([loss(a, t) for a, t in zip(x, target, strict=True)]))
    a = x[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(a, target[0]), a)
    torch.testing.assert_close(torch.func.grad(lambda a: loss(a, target[0]))(x[0]), grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_normalizer_of_blocks(dtype):
    g = Quadratic(1.0, 1.0, 0.5)
    for shape in ((7, 5, 1), (50, 50_000, 1), (3, 100, 4_000), (2, 1_500_000, 1)):
        o = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact = (1 + o.double() + o.double().square() / 2).sum(1, keepdim=True) / g.a3
        wide = max(dtype, torch.float32, key=lambda x: x.itemsize)
        torch.testing.assert_close(normalizer(g, o, wide), exact, rtol=4 * torch.finfo(wide).eps, atol=0)


def test_affine_rows():
    """Large float32 matrices take one pass, others two, in blocks: the same numbers."""
    for shape in ((6000, 100, 1), (2, 300_000, 1), (600, 10, 100)):
        generator = torch.Generator().manual_seed(0)
        o, slope = torch.randn(shape, generator=generator), torch.randn(shape[0], 1, shape[2], generator=generator).double()
        exact = slope * o + 2 * slope
        for out in (None, torch.empty_like(o)):
            found = affine(o, slope, 2 * slope, out)
            assert (found - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(6, 5), (3, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_small_batches(name, shape, reduction):
    """Without weights and ignored examples they have a function of their own; its loss, gradient and second derivatives."""
    case, (o, target) = CASES[name], data(*shape)
    loss = case.make(reduction=reduction)
    o.requires_grad_()
    torch.testing.assert_close(loss(o, target), expected(case.oracle, o, target, reduction=reduction), rtol=1e-12, atol=1e-12)
    assert "Small" in type(loss(o, target).grad_fn).__name__ or reduction == "none"
    assert gradcheck(lambda x: loss(x, target), (o,))
    assert gradgradcheck(lambda x: loss(x, target), (o,))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(30, 1_000), (300, 1_000), (200, 100, 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_batches_in_cache(name, shape, dtype, overwrite):
    """The same function above the smallest sizes, where the numbers per example are float64."""
    case, (o, target) = CASES[name], data(*shape, dtype=dtype)
    for reduction in ("none", "mean", "sum"):
        x, exact = o.clone().requires_grad_(), o.double().requires_grad_()
        loss = case.make(reduction=reduction, overwrite_logits=overwrite)(x, target)
        wanted = expected(case.oracle, exact, target, reduction=reduction)
        direction = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)
        (grad,) = torch.autograd.grad(loss, x, direction)
        (grad_wanted,) = torch.autograd.grad(wanted, exact, direction.double())
        assert (grad.data_ptr() == x.data_ptr()) is overwrite
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        assert (grad.double() - grad_wanted).abs().max() <= torch.finfo(dtype).eps * grad_wanted.abs().max()


def test_small_batches_of_large_outputs():
    """Squares of 1e19 overflow float32, and the digits of the target's gradient are lost where the loss is 2e-6."""
    o, target = torch.tensor([[1e19, 3e19, -2e19], [1e3, 0.0, -1.0]], requires_grad=True), torch.tensor([1, 0])
    exact = o.detach().double().requires_grad_()
    loss, wanted = sl.TaylorSoftmaxLoss()(o, target), expected(CASES["taylor"].oracle, exact, target)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(o.grad.double(), exact.grad, rtol=1e-6, atol=0)
