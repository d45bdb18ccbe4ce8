"""The kernel: blocks, memory, no waiting for the device, and the logits overwritten by their gradient."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spherical_loss as sl
from spherical_loss.statistics import dense_statistics
from tests.support.cases import FAMILY, data, every_loss, every_member
from tests.support.oracle import expected

# (N, D, M): many rows of one block, several blocks, one row over many blocks of columns, one row above the block size
SHAPES = [(7, 5, 1), (50, 50_000, 1), (3, 100, 10_000), (2, 300_000, 5), (2, 1_500_000, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_cover_everything(shape, dtype):
    N, D, M = shape
    o = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    target = torch.randint(D, (N, M), generator=torch.Generator().manual_seed(1))
    exact = o.detach().double()
    s, q, o_c = dense_statistics(o, target)
    torch.testing.assert_close(s, exact.sum(1), rtol=0, atol=1e-12 * D)
    torch.testing.assert_close(q, exact.square().sum(1), rtol=1e-12, atol=0)
    assert torch.equal(o_c, exact.gather(1, target.unsqueeze(1)).squeeze(1))
    assert {x.dtype for x in (s, q, o_c)} == {torch.float64}
    g_s, g_q, g_c = torch.randn(3, N, M, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (grad,) = torch.autograd.grad((s, q, o_c), o, (g_s, g_q, g_c))
    wanted = g_s.unsqueeze(1) + 2 * g_q.unsqueeze(1) * exact
    wanted.scatter_add_(1, target.unsqueeze(1), g_c.unsqueeze(1))
    resolution = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(grad.double(), wanted, rtol=resolution, atol=resolution)


def test_equal_outputs_have_no_spread():
    """In float32, 1000 * 0.1 and 1000 * 0.1^2 are rounded; what q - s^2 / D leaves must not look like a spread."""
    for D in (10, 1000, 10_007):
        o = torch.full((2, D), 0.1, requires_grad=True)
        loss = sl.ZLoss(1, 0)(o, torch.tensor([0, 1]))
        torch.testing.assert_close(loss, torch.tensor(2.0).log())
        assert torch.equal(torch.autograd.grad(loss, o)[0], torch.zeros(2, D))


def test_from_logits_takes_any_batch_shape():
    o, _ = data(2, 3, 4, 5)
    target = torch.randint(5, (2, 3, 4))
    statistics = sl.Statistics.from_logits(o, target)
    torch.testing.assert_close(statistics.s, o.sum(-1))
    torch.testing.assert_close(statistics.q, o.square().sum(-1))
    assert torch.equal(statistics.o_c, o.gather(-1, target.unsqueeze(-1)).squeeze(-1))
    assert (statistics.D, statistics.target_weight) == (5, None)
    assert statistics.target is target


class Allocations(TorchDispatchMode):
    """Counts new storages of at least ``size`` bytes among the outputs of all operations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.large = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() in known:
                continue
            if x.untyped_storage().nbytes() >= self.size:
                self.large.append((str(func), tuple(x.shape)))
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FAMILY), ("taylor", torch.float64), ("taylor", torch.bfloat16)],
    ids=str,
)
def test_memory_is_the_gradient_and_nothing_else(name, dtype):
    o, target = data(512, 20_000, dtype=dtype)
    o.requires_grad_()
    with Allocations(o.numel() * o.element_size() // 2) as allocations:
        FAMILY[name].make()(o, target).backward()
    assert [math.prod(shape) for _, shape in allocations.large] == [o.numel()]  # the gradient
    assert o.grad.shape == o.shape


@pytest.mark.slow
@every_member
def test_overwriting_needs_no_memory(case):
    o, target = data(256, 20_000, dtype=torch.float32)
    o.requires_grad_()
    with Allocations(o.numel() * o.element_size() // 2) as allocations:
        case.make(overwrite_logits=True)(o * 1.0, target).backward()
    assert [name for name, _ in allocations.large] == ["aten.mul.Tensor"] * 2  # o * 1.0 itself, and its backward


@every_loss
def test_values_are_not_looked_at(case):
    """No operation that waits for a device, forward or backward: on the meta device there is no value to look at."""
    for shape in ((8, 5), (4, 5, 3), (40, 500)):
        o, target = (x.to("meta") for x in data(*shape, dtype=torch.float32))
        o.requires_grad_()
        for options in ({}, {"label_smoothing": 0.1}, {"weight": torch.ones(shape[1], device="meta")}):
            case.make(**options)(o, target).backward()
            assert o.grad.shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_member
def test_overwriting_gives_the_same_gradient(case, dtype):
    for shape in ((5,), (6, 5), (2, 5, 3), (30, 1000)):
        o, target = data(*shape, dtype=dtype)
        x, exact = o.clone().requires_grad_(), o.double().requires_grad_()
        loss, wanted = case.make(overwrite_logits=True)(x, target), expected(case.oracle, exact, target)
        assert torch.equal(x, o)  # untouched until the backward pass
        (grad,), (grad_wanted,) = torch.autograd.grad(loss, x), torch.autograd.grad(wanted, exact)
        assert grad.data_ptr() == x.data_ptr()
        for actual, right, eps in ((loss, wanted, torch.finfo(loss.dtype).eps), (grad, grad_wanted, torch.finfo(dtype).eps)):
            assert (actual.double() - right).abs().max() <= 4 * max(eps, 1e-14) * right.abs().max()


@every_member
def test_overwriting_changes_no_bit(case):
    for shape in ((30, 1000), (10, 1000, 3)):
        o, target = data(*shape, dtype=torch.float32)
        x, kept = o.clone().requires_grad_(), o.clone().requires_grad_()
        loss, wanted = case.make(overwrite_logits=True)(x, target), case.make()(kept, target)
        assert torch.equal(loss, wanted)
        assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(wanted, kept)[0])


def test_overwriting_cannot_be_differentiated_twice():
    o, target = data(6, 5)
    loss = sl.TaylorSoftmaxLoss(overwrite_logits=True)
    with pytest.raises(RuntimeError, match=r"overwrite_logits=True.*create_graph"):
        torch.autograd.grad(loss(o.requires_grad_(), target), o, create_graph=True)
    with pytest.raises(RuntimeError, match=r"overwrite_logits=True.*create_graph"):
        torch.func.grad(loss)(o.detach(), target)
    with pytest.raises(RuntimeError, match=r"overwrite_logits=True.*vmap"):
        torch.vmap(loss)(o.detach().reshape(6, 1, 5), target.reshape(6, 1))


def test_overwriting_is_caught_where_the_logits_are_still_needed():
    o, target = data(6, 5)
    o.requires_grad_()
    logits = o * 2
    penalty = logits.square().sum()  # saves the logits, and its backward pass comes after that of the loss
    loss = sl.TaylorSoftmaxLoss(overwrite_logits=True)(logits, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # a second time, the logits are gone


def test_overwriting_works_with_class_indices_only():
    o, _ = data(6, 5)
    y = torch.softmax(o, 1)
    with pytest.raises(ValueError, match=r"overwrite_logits=True works with class indices only"):
        sl.TaylorSoftmaxLoss(overwrite_logits=True)(o, y)
    with pytest.raises(ValueError, match=r"overwrite_logits=True needs.*label_smoothing \(0.1\)"):
        sl.TaylorSoftmaxLoss(overwrite_logits=True, label_smoothing=0.1)


def test_overwriting_in_training_updates_as_without():
    o, target = data(6, 4)
    for options in ({}, {"ignore_index": 1}, {"reduction": "sum", "weight": torch.linspace(1, 2, 4, dtype=torch.float64)}):
        grads = []
        for overwrite in (False, True):
            torch.manual_seed(0)
            layer = torch.nn.Linear(4, 4, dtype=torch.float64)
            sl.TaylorSoftmaxLoss(overwrite_logits=overwrite, **options)(layer(o), target).backward()
            grads.append(layer.weight.grad)
        torch.testing.assert_close(*grads)
        weight = layer.weight.detach().requires_grad_()
        logits = o @ weight.T + layer.bias.detach()
        wanted = expected(
            lambda x: -torch.log((1 + x + x * x / 2) / (1 + x + x * x / 2).sum(-1, keepdim=True)), logits, target, **options
        )
        torch.testing.assert_close(grads[1], torch.autograd.grad(wanted, weight)[0])


@pytest.mark.slow
def test_overwriting_when_compiled_is_the_same_gradient_elsewhere():
    torch.compiler.reset()
    o, target = data(6, 5)
    x = o.clone().requires_grad_()
    torch.compile(sl.SquaredErrorLoss(overwrite_logits=True), fullgraph=True, backend="aot_eager")(x, target).backward()
    assert torch.equal(x, o)
    torch.testing.assert_close(x.grad, 2 * (o - torch.nn.functional.one_hot(target, 5)) / 6)
