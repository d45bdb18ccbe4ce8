"""Values and gradients of every loss, with every option of torch's cross-entropy, against the dense float64 oracle."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import spherical_loss as sl
from tests.support.cases import data, every_function, every_loss, every_member
from tests.support.oracle import expected

SHAPES = [(5,), (4, 5), (3, 5, 2), (2, 5, 3, 2), (6, 1), (6, 2)]
GRID = [
    {"weighted": weighted, "reduction": reduction, "label_smoothing": smoothing, "ignore": ignore, "soft": soft}
    for weighted, reduction, smoothing, ignore, soft in itertools.product(
        (False, True), ("none", "mean", "sum"), (0.0, 0.1, 1.0), (None, -100, 0, -1), (False, True)
    )
    if not (soft and ignore is not None)
]


def grid_cell(shape, cell):
    """Outputs, target and options of one cell of the grid; ignore_index=0 is a class, and -1 is not the default."""
    o, target = data(*shape)
    D = shape[0] if len(shape) == 1 else shape[1]
    options = {"reduction": cell["reduction"], "label_smoothing": cell["label_smoothing"]}
    if cell["weighted"]:
        options["weight"] = torch.linspace(0.2, 2.0, D, dtype=torch.float64)
    if cell["ignore"] is not None:
        options["ignore_index"] = cell["ignore"]
        flat = target.view(-1)
        if flat.numel() > 1:  # a lone ignored example is the subject of a test of bad input
            flat[::2], flat[1] = cell["ignore"], D - 1
    if cell["soft"]:
        target = torch.softmax(data(*shape, seed=1)[0], 0 if len(shape) == 1 else 1)
    return o.requires_grad_(), target, options


def refuses(case, D):
    """The Z-loss has no gradient with two classes, and says so."""
    return D == 2 and isinstance(case.make(), sl.ZLoss)


def assert_same(actual, wanted, o):
    torch.testing.assert_close(actual, wanted, equal_nan=True)
    direction = torch.linspace(0.5, 1.5, actual.numel(), dtype=actual.dtype).reshape(actual.shape)
    (grad,), (grad_wanted,) = (torch.autograd.grad(x, o, direction) for x in (actual, wanted))
    torch.testing.assert_close(grad, grad_wanted, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_is_cross_entropy_for_all_options(shape):
    for cell in GRID:
        o, target, options = grid_cell(shape, cell)
        assert_same(sl.SoftmaxLoss(**options)(o, target), F.cross_entropy(o, target, **options), o)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_loss
def test_all_options(case, shape):
    if refuses(case, D=shape[1] if len(shape) > 1 else shape[0]):
        with pytest.raises(ValueError, match="no gradient with two classes"):
            case.make()(*data(*shape))
        return
    for cell in GRID:
        o, target, options = grid_cell(shape, cell)
        wanted = expected(case.oracle, o, target, **options)
        assert_same(case.make(**options)(o, target), wanted + 0 * o.sum(), o)  # a loss of one class may not depend on o


@every_function
def test_functional_form_is_the_module(case):
    for cell in GRID[::5]:
        o, target, options = grid_cell((4, 5), cell)
        assert_same(case.function(o, target, **options), case.make(**options)(o, target), o)


@every_function
def test_functions_build_no_module(case, monkeypatch):
    wanted = [(cell, case.make(**cell[2])(*cell[:2])) for cell in (grid_cell(shape, GRID[0]) for shape in ((4, 5), (40, 500)))]
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *a, **k: pytest.fail("built a module"))
    for (o, target, options), value in wanted:
        torch.testing.assert_close(case.function(o, target, **options), value)


@every_function
def test_functions_refuse_what_modules_refuse(case):
    o, target = data(4, 5)
    for options in ({"reduction": "average"}, {"label_smoothing": 1.5}, {"weight": torch.ones(5, 1)}):
        for call in (lambda options=options: case.make(**options), lambda options=options: case.function(o, target, **options)):
            with pytest.raises(ValueError, match=next(iter(options))):
                call()
    with pytest.raises(TypeError, match="Statistics of a head go to the loss as a module"):
        case.function(sl.DenseHead(3, 5)(torch.randn(4, 3), target), target)


@every_loss
@given(
    N=st.integers(1, 4),
    D=st.integers(2, 6),
    rest=st.lists(st.integers(1, 3), max_size=2),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    shift=st.sampled_from([0.0, -5.0, 3.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_shape_scale_and_shift(case, N, D, rest, scale, shift, seed):
    assume(not refuses(case, D))
    o, target = data(N, D, *rest, seed=seed)
    o = (o * scale + shift).requires_grad_()
    actual, wanted = case.make(reduction="none")(o, target), expected(case.oracle, o, target, reduction="none")
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-7)
    (grad,), (grad_wanted,) = (torch.autograd.grad(x.sum(), o) for x in (actual, wanted))
    torch.testing.assert_close(grad, grad_wanted, rtol=1e-6, atol=1e-7 * float(grad_wanted.abs().max()) + 1e-6 / scale)


@every_member
def test_statistics_give_the_same_loss(case):
    o, target = data(6, 5)
    for options in (
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"weight": torch.linspace(0.2, 2, 5, dtype=torch.float64)},
    ):
        x = o.clone().requires_grad_()
        statistics = sl.Statistics.from_logits(x, target)
        assert_same(case.make(**options)(statistics), expected(case.oracle, x, target, **options), x)


@every_member
def test_several_weighted_targets_are_class_probabilities(case):
    """K targets with weights: the class probabilities of which all others are zero, with torch's reductions."""
    o = data(4, 5)[0].requires_grad_()
    classes = torch.tensor([[0, 3], [1, 2], [4, -1], [-1, -1]])  # a negative class is an empty slot
    shares = torch.tensor([[0.3, 0.7], [0.5, 0.5], [1.0, 9.0], [9.0, 9.0]], dtype=torch.float64)
    y = torch.zeros(4, 5, dtype=torch.float64)
    for n, k in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
        y[n, classes[n, k]] = shares[n, k]
    for reduction in ("none", "mean", "sum"):
        for weight in (None, torch.linspace(0.2, 2, 5, dtype=torch.float64)):
            options = {"reduction": reduction, "weight": weight}
            statistics = sl.Statistics(o.sum(1), o.square().sum(1), o.gather(1, classes.clamp_min(0)), 5, classes, shares)
            assert_same(case.make(**options)(statistics), expected(case.oracle, o, y, **options), o)


def test_baselines_refuse_statistics():
    statistics = sl.Statistics.from_logits(*data(3, 5))
    for loss in (sl.SoftmaxLoss(), sl.AbsSoftmaxLoss()):
        with pytest.raises(TypeError, match=r"outside the spherical family.*logits"):
            loss(statistics)


def test_squared_error_is_the_mean_over_classes_times_d():
    o, target = data(6, 5)
    one_hot = 2.5 * F.one_hot(target, 5)
    torch.testing.assert_close(sl.SquaredErrorLoss(2.5)(o, target) / 5, F.mse_loss(o, one_hot.to(o.dtype)))


def test_z_loss_does_not_see_shift_and_scale():
    o, target = data(6, 5)
    torch.testing.assert_close(sl.ZLoss(1, 2)(7 * o - 3, target), sl.ZLoss(1, 2)(o, target))


@pytest.mark.parametrize("eps", [1e-4, 0.02, 3.0])
def test_the_spherical_softmax_is_a_taylor_softmax_of_other_outputs(eps):
    """Of sqrt(eps) (o + 1): eps is a scale of the output layer, as the guide to the losses says."""
    o, target = data(50, 7)
    torch.testing.assert_close(sl.SphericalSoftmaxLoss(eps)(eps**0.5 * (o + 1), target), sl.TaylorSoftmaxLoss()(o, target))


def test_fake_and_real_tensors_do_not_disturb_each_other():
    """A shape is known without values, before and after a real batch."""
    loss, target = sl.TaylorSoftmaxLoss(reduction="none"), torch.zeros(20, dtype=torch.int64)
    for _ in range(2):
        with FakeTensorMode():
            assert loss(torch.randn(20, 10), torch.zeros(20, dtype=torch.int64)).shape == (20,)
        assert loss(torch.randn(20, 10), target).isfinite().all()
