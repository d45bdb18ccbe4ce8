"""What users of torch.nn.CrossEntropyLoss expect of every loss: derivatives, transforms, compilation, dtypes, modules."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spherical_loss as sl
from tests.support.cases import CASES, data, every_function, every_loss, every_member
from tests.support.oracle import expected

WEIGHT = torch.linspace(0.2, 2, 5, dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "weighted": {"weight": WEIGHT, "ignore_index": 1, "reduction": "none"},
    "smoothed": {"label_smoothing": 0.2, "reduction": "sum"},
}
torchs_own_warning = pytest.mark.filterwarnings("ignore:`torch.jit")  # torch calls what it deprecates itself
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.slow
@with_options
@every_loss
def test_first_and_second_derivatives(case, options):
    for shape in ((5,), (3, 5), (2, 5, 3)):
        o, target = data(*shape)
        loss = case.make(**options)
        target.view(-1)[0] = 2  # at least one that is not ignored
        assert gradcheck(loss, (o.requires_grad_(), target))
        assert gradgradcheck(loss, (o.requires_grad_(), target))


@every_loss
def test_derivatives_with_class_probabilities(case):
    o, _ = data(3, 5)
    y = torch.softmax(data(3, 5, seed=1)[0], 1)
    assert gradcheck(case.make(weight=WEIGHT), (o.requires_grad_(), y.requires_grad_()))
    assert gradgradcheck(case.make(weight=WEIGHT), (o, y))


@every_member
def test_derivatives_of_statistics(case):
    o, target = data(4, 5)
    assert gradgradcheck(lambda x: case.make()(sl.Statistics.from_logits(x, target)), (o.requires_grad_(),))


@torchs_own_warning
@every_loss
def test_forward_mode(case):
    o, target = data(3, 5)
    direction = data(3, 5, seed=1)[0]
    value, tangent = torch.func.jvp(lambda x: case.make()(x, target), (o,), (direction,))
    x = o.clone().requires_grad_()
    wanted = expected(case.oracle, x, target)
    torch.testing.assert_close(value, wanted.detach())
    torch.testing.assert_close(tangent, (torch.autograd.grad(wanted, x)[0] * direction).sum())


@with_options
@every_loss
def test_func_grad_and_jacobian(case, options):
    o, target = data(3, 5)
    loss = case.make(**options)
    x = o.clone().requires_grad_()
    total = expected(case.oracle, x, target, **options).sum()
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, target).sum())(o), torch.autograd.grad(total, x)[0])
    jacobian = torch.autograd.functional.jacobian(lambda x: expected(case.oracle, x, target, **options), o)
    torch.testing.assert_close(torch.func.jacrev(lambda x: loss(x, target))(o), jacobian)


@torchs_own_warning
@every_loss
def test_hessians_agree(case):
    """Reverse over reverse and forward over reverse, against finite differences of the oracle's gradient."""
    o, target = data(2, 4)

    def oracle_gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(expected(case.oracle, x, target), x)[0]

    h = 1e-5
    columns = [(oracle_gradient(o + h * e) - oracle_gradient(o - h * e)) / (2 * h) for e in torch.eye(8).reshape(8, 2, 4).to(o)]
    wanted = torch.stack(columns, -1).reshape(2, 4, 2, 4)
    loss = case.make()
    for transform in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        torch.testing.assert_close(transform(lambda x: loss(x, target))(o), wanted, rtol=1e-5, atol=1e-6)


@every_loss
def test_third_derivatives(case):
    o, target = data(1, 4)

    def second(x):
        (first,) = torch.autograd.grad(case.make()(x, target), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]

    assert gradcheck(second, o.requires_grad_())


@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5), (6, 2, 5, 3)], ids=str)
@every_loss
def test_vmap(case, shape):
    """A mapped loss is the loss of each slice, whichever of the inputs is mapped and along which dimension."""
    o = data(*shape)[0]
    targets = torch.stack([data(*shape[1:], seed=n)[1] for n in range(6)])
    loss = case.make()
    wanted = torch.stack([loss(x, t) for x, t in zip(o, targets, strict=True)])
    torch.testing.assert_close(torch.vmap(loss)(o, targets), wanted)
    torch.testing.assert_close(torch.vmap(loss, in_dims=(-1, 0))(o.movedim(0, -1), targets), wanted)
    torch.testing.assert_close(torch.vmap(loss, (0, None))(o, targets[2]), torch.stack([loss(x, targets[2]) for x in o]))
    torch.testing.assert_close(torch.vmap(loss, (None, 0))(o[2], targets), torch.stack([loss(o[2], t) for t in targets]))
    per_example = torch.vmap(torch.func.grad(loss))(o, targets)
    torch.testing.assert_close(per_example, torch.stack([torch.func.grad(loss)(x, t) for x, t in zip(o, targets, strict=True)]))
    nested = torch.vmap(torch.vmap(loss))(torch.stack([o, 2 * o]), torch.stack([targets, targets]))
    torch.testing.assert_close(nested[0], wanted)


@pytest.mark.slow
@every_loss
def test_compile_without_graph_breaks(case):
    torch.compiler.reset()
    o, target = data(3, 5, 2)
    o.requires_grad_()
    actual = torch.compile(case.make(), fullgraph=True, backend="aot_eager")(o, target)
    wanted = expected(case.oracle, o, target)
    torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(torch.autograd.grad(actual, o), torch.autograd.grad(wanted, o))


@pytest.mark.slow
@with_options
@every_loss
def test_compile_with_options(case, options):
    torch.compiler.reset()
    o, target = data(4, 5)
    target[0] = 2  # at least one that is not ignored
    actual = torch.compile(case.make(**options), fullgraph=True, backend="eager")(o, target)
    torch.testing.assert_close(actual, expected(case.oracle, o, target, **options))


@pytest.mark.slow
@every_function
def test_compile_of_the_function(case):
    torch.compiler.reset()
    o, target = data(40, 500)  # above the size up to which inputs take torch's cross-entropy
    compiled = torch.compile(case.function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(o, target, reduction="sum"), expected(case.oracle, o, target, reduction="sum"))


@pytest.mark.slow
@every_loss
def test_compiled_statistics_keep_a_small_spread(case):
    """Outputs far from zero and close to each other: q - s^2 / D must not drown in the rounding of q."""
    torch.compiler.reset()
    o, target = data(4, 50, dtype=torch.float32)
    o = 0.01 * o + 10
    compiled = torch.compile(case.make(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(o, target).double(), expected(case.oracle, o.double(), target), rtol=1e-5, atol=1e-6)


@every_loss
def test_autocast(case):
    """Under autocast the logits come out of the last layer in bfloat16, and the loss is float32."""
    h, W = data(8, 6, dtype=torch.float32)[0], data(5, 6, dtype=torch.float32, seed=1)[0].requires_grad_()
    target = torch.arange(8) % 5
    with torch.autocast("cpu", torch.bfloat16):
        o = h @ W.T
        loss = case.make()(o, target)
    assert (o.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    exact = o.detach().double().requires_grad_()
    wanted = expected(case.oracle, exact, target)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    (grad_o,) = torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(W.grad.double(), grad_o.T @ h.double(), rtol=0.03, atol=0.03 * float(grad_o.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_loss
def test_dtypes(case, dtype):
    """float32 at least inside and out; the gradient has the dtype of the logits."""
    o, target = data(6, 5, dtype=dtype)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": WEIGHT.to(dtype)}):
        x, exact = o.clone().requires_grad_(), o.double().requires_grad_()
        loss, wanted = case.make(**options)(x, target), expected(case.oracle, exact, target, **options)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
        (grad,), (grad_wanted,) = torch.autograd.grad(loss, x), torch.autograd.grad(wanted, exact)
        assert grad.dtype == dtype
        resolution = max(2 * torch.finfo(dtype).eps, 1e-6)  # the oracle's own xi is good to 1e-7
        torch.testing.assert_close(
            grad.double(), grad_wanted, rtol=resolution, atol=resolution * float(grad_wanted.abs().max())
        )


@pytest.mark.parametrize("target_dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@every_loss
def test_integer_targets_of_any_width(case, target_dtype):
    o, target = data(6, 5)
    target[1] = 3
    for options in ({"ignore_index": 3}, {"label_smoothing": 0.1}):
        wanted = expected(case.oracle, o, target, **options)
        torch.testing.assert_close(case.make(**options)(o, target.to(target_dtype)), wanted)


@pytest.mark.parametrize("D", [10, 20_000])
@every_loss
def test_float16_of_magnitude_1000_is_finite(case, D):
    o, target = data(3, D, dtype=torch.float16)
    o = (1000 * o.sign()).requires_grad_()
    for options in ({}, {"label_smoothing": 0.1}):
        loss = case.make(**options)(o, target)
        (grad,) = torch.autograd.grad(loss, o)
        assert loss.isfinite()
        assert grad.isfinite().all()


@every_loss
def test_noncontiguous_outputs(case):
    o, target = data(4, 5, 3, 2)
    strided = o.to(memory_format=torch.channels_last)
    transposed = o.movedim(1, -1).contiguous().movedim(-1, 1)
    every_second = torch.stack([o, o], -1).flatten(-2)[..., ::2]
    wanted = expected(case.oracle, o, target)
    for x in (strided, transposed, every_second):
        x = x.detach().requires_grad_()
        torch.testing.assert_close(case.make()(x, target), wanted)
        exact = o.clone().requires_grad_()
        grad = torch.autograd.grad(case.make()(x, target), x)[0]
        torch.testing.assert_close(grad, torch.autograd.grad(expected(case.oracle, exact, target), exact)[0])


@every_loss
def test_modules_travel(case):
    o, target = data(6, 5)
    loss = case.make(weight=WEIGHT, reduction="sum", ignore_index=2)
    wanted = loss(o, target)
    assert torch.equal(copy.deepcopy(loss)(o, target), wanted)
    assert set(loss.state_dict()) == {"weight"}
    other = case.make(weight=torch.ones(5, dtype=torch.float64), reduction="sum", ignore_index=2)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other(o, target), wanted)
    assert loss.to(torch.float32).weight.dtype == torch.float32
    torch.testing.assert_close(loss(o, target), wanted, rtol=1e-6, atol=0)
    loss.to("meta")(o.to("meta"), target.to("meta"))  # all tensors move, and no value is read


def test_pickle():
    o, target = data(6, 5)
    for name in ("taylor", "spherical", "bound-tightest", "z", "softmax", "cosine"):
        loss = CASES[name].make(weight=WEIGHT, ignore_index=2)
        assert torch.equal(pickle.loads(pickle.dumps(loss))(o, target), loss(o, target))


def test_repr_names_what_is_not_the_default():
    assert repr(sl.TaylorSoftmaxLoss()) == "TaylorSoftmaxLoss()"
    assert repr(sl.SphericalSoftmaxLoss(0.5, reduction="sum")) == "SphericalSoftmaxLoss(eps=0.5, reduction='sum')"
    assert repr(sl.QuadraticSoftmaxLoss(1, 0, 2, ignore_index=0)) == "QuadraticSoftmaxLoss(a1=1, a2=0, a3=2, ignore_index=0)"
    assert repr(sl.SquaredErrorLoss(label_smoothing=0.1)) == "SquaredErrorLoss(target_value=1, label_smoothing=0.1)"
    assert repr(sl.SoftmaxBoundLoss()) == "SoftmaxBoundLoss(xi=None)"
    assert repr(sl.ZLoss(1, 2, overwrite_logits=True)) == "ZLoss(a=1, b=2, overwrite_logits=True)"
