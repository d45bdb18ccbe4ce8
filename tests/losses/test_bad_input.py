"""Every kind of bad input has one documented outcome: torch's own where torch has one, otherwise an error with the remedy."""

import math

import pytest
import torch
import torch.nn.functional as F

import spherical_loss as sl
from tests.support.cases import CASES, FAMILY, data, every_loss, every_member
from tests.support.oracle import expected


@pytest.mark.parametrize("bad", [5, -1, -101])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 5, 3), (40, 500)], ids=str)
@every_loss
def test_target_out_of_range(case, shape, bad):
    o, target = data(*shape)
    D = shape[0] if len(shape) == 1 else shape[1]
    bad = D if bad == 5 else bad
    target.view(-1)[-1] = bad
    with pytest.raises(IndexError):
        F.cross_entropy(o, target)
    position = tuple(n - 1 for n in target.shape)
    message = rf"target {bad} at position {position} is out of range.*{D} classes: classes are 0 to {D - 1}.*ignore_index=-100"
    message = message.replace("(", r"\(").replace(")", r"\)")
    for options in ({}, {"label_smoothing": 0.1}, {"weight": torch.ones(D)}):
        with pytest.raises(IndexError, match=message):
            case.make(**options)(o, target)


@every_loss
def test_target_out_of_range_under_vmap(case):
    """torch's own message, since values cannot be read."""
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.vmap(case.make())(torch.randn(3, 2, 5), torch.tensor([[0, 1], [2, 7], [1, 1]]))


@every_member
def test_ignored_examples_have_no_gradient(case):
    """Not even where the formula has no derivative, as the cosine at zero."""
    o, target = data(6, 5)
    o[2], target[2] = 0.0, -100
    o.requires_grad_()
    (grad,) = torch.autograd.grad(case.make()(o, target), o)
    assert torch.equal(grad[2], torch.zeros(5, dtype=torch.float64))
    assert grad.isfinite().all()
    (grad,) = torch.autograd.grad(case.make()(sl.Statistics.from_logits(o, target.clamp_min(0))._replace(target=target)), o)
    assert torch.equal(grad[2], torch.zeros(5, dtype=torch.float64))


@every_loss
def test_a_negative_target_is_fine_as_the_ignore_index(case):
    o, target = data(6, 5)
    target[0] = -1
    torch.testing.assert_close(case.make(ignore_index=-1)(o, target), case.make()(o[1:], target[1:]))


@every_loss
def test_wrong_dtypes(case):
    o, target = data(6, 5)
    with pytest.raises(TypeError, match=r"logits are torch.int64.*\.float\(\)"):
        case.make()(o.long(), target)
    with pytest.raises(TypeError, match=r"logits are torch.complex64"):
        case.make()(torch.randn(6, 5, dtype=torch.complex64), target)
    for wrong in (torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"target is {wrong}; use class indices \(int64\) or class probabilities"):
            case.make()(o, target.to(wrong))


@pytest.mark.parametrize(
    ("logits", "targets", "expected"),
    [
        ((6, 5), (5,), r"\(6,\)"),
        ((6, 5), (6, 1), r"\(6,\)"),
        ((6, 5), (6, 5), r"\(6,\)"),  # one-hot integers: torch refuses them, too
        ((2, 5, 3), (2, 5), r"\(2, 3\)"),
        ((2, 5, 3), (6,), r"\(2, 3\)"),
        ((6, 5), (), r"\(6,\)"),
    ],
    ids=str,
)
@every_loss
def test_wrong_shape_of_classes(case, logits, targets, expected):
    target = torch.zeros(targets, dtype=torch.long)
    o = torch.randn(logits)
    with pytest.raises((ValueError, RuntimeError)):
        F.cross_entropy(o, target)
    shapes = "(" + ", ".join(map(str, targets)) + ("," if len(targets) == 1 else "") + ")"
    with pytest.raises(
        ValueError, match=rf"class indices of shape {shapes.replace('(', '[(]').replace(')', '[)]')}.*expected {expected}"
    ):
        case.make()(o, target)


@every_loss
def test_one_example_without_batch_has_a_scalar_target(case):
    """Stricter than torch, which lets a target of shape (1,) pass."""
    with pytest.raises(ValueError, match=r"class indices of shape \(1,\) do not fit logits of shape \(5,\): expected \(\)"):
        case.make()(torch.randn(5), torch.tensor([0]))


@every_loss
def test_wrong_shape_of_probabilities(case):
    for shape in ((6,), (6, 4), (5, 6), (6, 5, 1)):
        with pytest.raises(
            ValueError, match=r"class probabilities of shape .* do not fit logits of shape \(6, 5\): expected \(6, 5\)"
        ):
            case.make()(torch.randn(6, 5), torch.rand(shape))


@every_loss
def test_no_classes_and_no_dimensions(case):
    with pytest.raises(ValueError, match=r"logits of shape \(6, 0\) have no classes in dimension 1"):
        case.make()(torch.randn(6, 0), torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"logits are a scalar; expected \(D,\), \(N, D\)"):
        case.make()(torch.tensor(1.0), torch.tensor(0))


@every_loss
def test_no_target(case):
    with pytest.raises(TypeError, match=r"logits need a target: loss\(logits, target\)"):
        case.make()(torch.randn(6, 5))


@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 3), (2, 5, 0)], ids=str)
@every_loss
def test_empty_batch_is_as_in_torch(case, shape):
    """nan for the mean, 0 for the sum, nothing for each; and no gradient."""
    rest = (shape[0], *shape[2:])
    for target in (torch.zeros(rest, dtype=torch.long), torch.rand(shape)):
        for smoothing in (0.0, 0.1):
            for reduction in ("mean", "sum", "none"):
                options = {"reduction": reduction, "label_smoothing": smoothing}
                o = torch.randn(shape, requires_grad=True)
                loss, torchs = case.make(**options)(o, target), F.cross_entropy(o, target, **options)
                torch.testing.assert_close(loss, torchs, equal_nan=True)
                assert torch.autograd.grad(loss.sum(), o)[0].shape == shape


@every_loss
def test_all_ignored_is_as_in_torch(case):
    o, target = data(6, 5)[0], torch.full((6,), -100)
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum", "none"):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            x, y = o.clone().requires_grad_(), o.clone().requires_grad_()
            loss, torchs = case.make(**options)(x, target), F.cross_entropy(y, target, **options)
            torch.testing.assert_close(loss, torchs, equal_nan=True)
            (grad,), (torchs_grad,) = torch.autograd.grad(loss.sum(), x), torch.autograd.grad(torchs.sum(), y)
            torch.testing.assert_close(grad, torchs_grad, equal_nan=True)


@every_loss
def test_one_class_has_one_outcome(case):
    """A certain event: a likelihood costs nothing, and nothing moves it."""
    o, target = data(6, 1)
    o.requires_grad_()
    loss = case.make()(o, target)
    assert loss.isfinite()
    (grad,) = torch.autograd.grad(loss, o)
    assert grad.isfinite().all()
    if case.make().__class__ not in (sl.SquaredErrorLoss, sl.ZLoss, CASES["cosine"].make, sl.SoftmaxBoundLoss):
        torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-15, rtol=0)
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-15, rtol=0)


@pytest.mark.parametrize("shape", [(4, 5), (40, 500)], ids=str)
@every_loss
def test_nan_stays_in_its_example(case, shape):
    """As in torch: the loss of that example is nan, those of the others are unchanged."""
    o, target = data(*shape)
    bad = o.clone()
    bad[1, 2] = math.nan
    loss = case.make(reduction="none")(bad, target)
    assert loss[1].isnan()
    others = torch.arange(shape[0]) != 1
    torch.testing.assert_close(loss[others], case.make(reduction="none")(o, target)[others])
    assert case.make()(bad, target).isnan()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(4, 5), (40, 500)], ids=str)
@pytest.mark.parametrize("name", [name for name in FAMILY if name != "cosine"])
def test_infinite_outputs_are_never_finite_losses(name, shape, value):
    """q is infinite, and so is the loss, or nan: masking with -inf is for the softmax only."""
    case = FAMILY[name]
    o, target = data(*shape)
    bad = o.clone()
    bad[1, (int(target[1]) + 1) % shape[1]] = value
    loss = case.make(reduction="none")(bad, target)
    assert not loss[1].isfinite()
    others = torch.arange(shape[0]) != 1
    torch.testing.assert_close(loss[others], case.make(reduction="none")(o, target)[others])


def test_infinite_outputs_are_torchs_own_for_the_softmax():
    o, target = data(4, 5)
    target[:] = 0
    o[0, 1], o[1, 1], o[2, 0] = -math.inf, math.inf, -math.inf
    torch.testing.assert_close(
        sl.SoftmaxLoss(reduction="none")(o, target), F.cross_entropy(o, target, reduction="none"), equal_nan=True
    )


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_eps(eps):
    with pytest.raises(ValueError, match=rf"eps is {eps}, but must be positive"):
        sl.SphericalSoftmaxLoss(eps)


@pytest.mark.parametrize(
    ("coefficients", "condition"),
    [
        ((1, 0, 0), "a3 is 0, but must be > 0"),
        ((1, 0, -1), "a3 is -1, but must be > 0"),
        ((1, 2, 1), r"4 a1 a3 is 4, but must be > a2\^2 = 4"),
        ((-1, 0, 1), r"4 a1 a3 is -4, but must be > a2\^2 = 0"),
        ((1, 0, math.nan), "a3 is nan, but must be > 0"),
        ((math.nan, 0, 1), r"4 a1 a3 is nan, but must be > a2\^2 = 0"),
        ((1, 0, math.inf), "finite"),
        ((math.inf, 0, 1), "finite"),
    ],
    ids=str,
)
def test_polynomial_that_is_not_positive(coefficients, condition):
    with pytest.raises(ValueError, match=condition):
        sl.QuadraticSoftmaxLoss(*coefficients)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_target_value(value):
    with pytest.raises(ValueError, match=f"target_value is {value}"):
        sl.SquaredErrorLoss(value)


@pytest.mark.parametrize("xi", [math.nan, math.inf])
def test_xi(xi):
    with pytest.raises(ValueError, match=f"xi is {xi}, but must be finite, or None"):
        sl.SoftmaxBoundLoss(xi)


@pytest.mark.parametrize(
    ("a", "b", "name"), [(0, 1, "a is 0"), (-1, 1, "a is -1"), (math.nan, 1, "a is nan"), (1, math.inf, "b is inf")]
)
def test_z_loss_parameters(a, b, name):
    with pytest.raises(ValueError, match=f"{name}, but must be"):
        sl.ZLoss(a, b)


@every_loss
def test_options(case):
    with pytest.raises(ValueError, match="reduction 'avg' is not known; use one of none, mean, sum"):
        case.make(reduction="avg")
    for smoothing in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}, but must be between 0 and 1"):
            case.make(label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"weight has shape \(5, 1\), but must be one number per class, \(D,\)"):
        case.make(weight=torch.ones(5, 1))
    with pytest.raises(ValueError, match=r"weight has 4 entries, but logits of shape \(6, 5\) have 5 classes"):
        case.make(weight=torch.ones(4))(*data(6, 5))
    with pytest.raises(TypeError, match="unexpected keyword"):
        case.make(smoothing=0.1)


def test_baselines_have_no_overwriting():
    for loss in (sl.SoftmaxLoss, sl.AbsSoftmaxLoss):
        with pytest.raises(TypeError, match="overwrite_logits"):
            loss(overwrite_logits=True)


@every_loss
def test_k_of_predict(case):
    o = data(6, 5)[0]
    for k in (0, 6, -1):
        with pytest.raises(ValueError, match=rf"k is {k}, but must be between 1 and the 5 classes of logits of shape \(6, 5\)"):
            case.make().predict(o, k)


@every_member
def test_statistics_refuse_what_they_cannot_do(case):
    o, target = data(6, 5)
    statistics = sl.Statistics.from_logits(o, target)
    with pytest.raises(TypeError, match=r"Statistics carry their own target; call loss\(statistics\) alone"):
        case.make()(statistics, target)
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 needs the loss of every class"):
        case.make(label_smoothing=0.1)(statistics)
    with pytest.raises(ValueError, match=r"a class weight needs the targets, and these Statistics have target=None"):
        case.make(weight=torch.ones(5))(statistics._replace(target=None))
    several = statistics._replace(o_c=o[:, :2], target=torch.zeros(6, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"s \(6,\), q \(6,\), o_c \(6, 2\) do not fit together.*target_weight"):
        case.make()(several)


def test_abstract_classes_cannot_be_made():
    for abstract in (sl.Loss, sl.SphericalLoss):
        with pytest.raises(TypeError, match="abstract"):
            abstract()


@every_loss
def test_ignore_index_needs_class_indices(case):
    o, y = data(6, 5)[0], torch.softmax(data(6, 5, seed=1)[0], 1)
    with pytest.raises(RuntimeError, match="ignore_index is not supported for floating point target"):
        F.cross_entropy(o, y, ignore_index=2)
    with pytest.raises(ValueError, match="ignore_index=2 needs class indices"):
        case.make(ignore_index=2)(o, y)


@every_member
def test_no_target_at_all(case):
    """Statistics with K = 0 targets per example."""
    s = torch.ones(6)
    nothing = torch.empty(6, 0)
    with pytest.raises(ValueError, match=r"target_weight has shape \(6, 0\): an example needs one target"):
        case.make()(sl.Statistics(s, s, nothing, 5, nothing.long(), nothing))


def test_z_loss_with_two_classes():
    """z_c would be 1 or -1 whatever the outputs are."""
    o, target = data(6, 2)
    for call in (lambda: sl.ZLoss(1, 1)(o, target), lambda: sl.ZLoss(1, 1)(sl.Statistics.from_logits(o, target))):
        with pytest.raises(ValueError, match="no gradient with two classes"):
            call()
    assert torch.equal(sl.ZLoss(1, 1).predict(o)[:, 0], o.argmax(1))


@pytest.mark.parametrize(
    "overlapping",
    [
        lambda x: x[:1].expand(3, 5),
        lambda x: x[:, :1].expand(3, 5),
        lambda x: x.flatten().unfold(0, 5, 2)[:3],
    ],
    ids=["one row", "one column", "windows"],
)
@every_member
def test_overwriting_needs_logits_of_their_own(case, overlapping):
    o = overlapping(data(3, 5)[0])
    target = torch.tensor([0, 3, 1])
    with pytest.raises(ValueError, match=r"overwrite_logits=True cannot write into .* share memory.*\.contiguous\(\)"):
        case.make(overwrite_logits=True)(o, target)
    assert case.make(overwrite_logits=True)(o.contiguous(), target).isfinite()


@pytest.mark.parametrize("name", ["taylor", "taylor-kernel", "spherical", "spherical-kernel", "quadratic"])
@pytest.mark.parametrize("D", [50, 10_000])
def test_float32_outputs_of_1e19(name, D):
    """Their squares are beyond float32, below and above the size where another way of computing begins."""
    case, y = CASES[name], torch.softmax(data(4, D, seed=1)[0], 1)
    o, classes = data(4, D, dtype=torch.float32)
    o *= 1e19
    for target, options in ((classes, {}), (classes, {"reduction": "none"}), (classes, {"label_smoothing": 0.1}), (y, {})):
        x, exact = o.clone().requires_grad_(), o.double().requires_grad_()
        loss, wanted = case.make(**options)(x, target), expected(case.oracle, exact, target, **options)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        (grad,), (right,) = torch.autograd.grad(loss.sum(), x), torch.autograd.grad(wanted.sum(), exact)
        torch.testing.assert_close(grad.double(), right, rtol=0, atol=1e-6 * float(right.abs().max()))


@pytest.mark.parametrize("name", ["taylor-kernel", "spherical-kernel", "quadratic", "z"])
@pytest.mark.parametrize("scale", [1e18, 1e19, 1e20, 1e25])
@pytest.mark.parametrize("overwrite", [False, True])
def test_gradients_of_large_float32_outputs(name, scale, overwrite):
    """Those of other classes than the target are much smaller than its own, and their slope falls with the outputs' square."""
    case = CASES[name]
    o, classes = data(100, 1000, dtype=torch.float32)
    o *= scale
    x, exact = o.clone().requires_grad_(), o.double().requires_grad_()
    case.make(overwrite_logits=overwrite)(1 * x, classes).backward()
    expected(case.oracle, exact, classes).backward()
    grad, right = (g.double().scatter(1, classes.unsqueeze(1), 0.0) for g in (x.grad, exact.grad))
    assert ((grad - right).abs().amax(1) <= 1e-5 * right.abs().amax(1)).all()


@pytest.mark.parametrize("name", ["taylor", "spherical", "quadratic"])
@pytest.mark.parametrize("D", [50, 10_000])
def test_float32_outputs_of_1e19_that_cannot_be_looked_at(name, D):
    """Compiled, and under vmap, where no value can be read."""
    case = CASES[name]
    o, classes = data(4, D, dtype=torch.float32)
    o *= 1e19
    exact = o.double().requires_grad_()
    wanted = expected(case.oracle, exact, classes, reduction="none")
    (right,) = torch.autograd.grad(wanted.sum(), exact)

    def of_one(x, target):
        return case.make()(x, target)

    mapped, gradients = torch.func.vmap(of_one)(o, classes), torch.func.vmap(torch.func.grad(of_one))(o, classes)
    torch.compiler.reset()
    x = o.clone().requires_grad_()
    compiled = torch.compile(case.make(reduction="none"), fullgraph=True, backend="aot_eager")(x, classes)
    for losses, grads in ((mapped, gradients), (compiled, torch.autograd.grad(compiled.sum(), x)[0])):
        assert losses.dtype == grads.dtype == torch.float32
        torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(grads.double(), right, rtol=0, atol=1e-6 * float(right.abs().max()))
