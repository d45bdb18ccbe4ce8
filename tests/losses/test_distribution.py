"""The distribution of every loss: probabilities, predictions, and the bias that matches class frequencies."""

import pytest
import torch

import spherical_loss as sl
from spherical_loss import functional
from tests.support.cases import CASES, CosineLoss, data, every_loss

LIKELIHOODS = ["taylor", "taylor-kernel", "spherical", "spherical-kernel", "quadratic", "softmax", "abs-softmax"]
every_likelihood = pytest.mark.parametrize("case", [CASES[name] for name in LIKELIHOODS], ids=LIKELIHOODS)


@pytest.mark.parametrize("dim", [0, 1, -1])
@every_likelihood
def test_probabilities(case, dim):
    o = data(4, 5, 3)[0] * 3
    p = case.make().probabilities(o, dim)
    torch.testing.assert_close(p, torch.exp(-case.oracle(o.movedim(dim, -1))).movedim(-1, dim))
    torch.testing.assert_close(p.sum(dim), torch.ones_like(p.sum(dim)))
    torch.testing.assert_close(case.make().log_probabilities(o, dim), p.log())


@every_likelihood
def test_the_loss_is_minus_the_log_probability_of_the_target(case):
    o, target = data(6, 5)
    loss = case.make(reduction="none")
    torch.testing.assert_close(loss(o, target), -loss.log_probabilities(o).gather(1, target.unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@every_likelihood
def test_probabilities_of_narrow_outputs(case, dtype):
    """The dtype of the outputs, without overflow on the way."""
    o = (1000 * data(4, 5)[0]).to(dtype)
    p = case.make().probabilities(o)
    assert p.dtype == case.make().log_probabilities(o).dtype == dtype
    torch.testing.assert_close(p.double(), torch.exp(-case.oracle(o.double())), rtol=0, atol=2 * torch.finfo(dtype).eps)
    assert case.make().log_probabilities(o).isfinite().all()


def test_functions_are_the_methods():
    o = data(4, 5)[0]
    pairs = [
        (functional.taylor_softmax, functional.log_taylor_softmax, CASES["taylor"], ()),
        (functional.spherical_softmax, functional.log_spherical_softmax, CASES["spherical"], (0.3,)),
        (functional.quadratic_softmax, functional.log_quadratic_softmax, CASES["quadratic"], (1.5, -1.0, 0.7)),
        (functional.abs_softmax, functional.log_abs_softmax, CASES["abs-softmax"], ()),
    ]
    for softmax, log_softmax, case, arguments in pairs:
        for dim in (0, 1):
            wanted = -case.oracle(o.movedim(dim, -1)).movedim(-1, dim)
            torch.testing.assert_close(log_softmax(o, *arguments, dim=dim), wanted)
            torch.testing.assert_close(softmax(o, *arguments, dim=dim), wanted.exp())


def test_a_users_likelihood_needs_the_formula_alone():
    class UserLoss(sl.SphericalLoss):
        is_likelihood = True

        def formula(self, s, q, o_c, D):
            return torch.log(q + D * 0.3) - torch.log(o_c**2 + 0.3)

    o, target = data(4, 5)
    assert UserLoss().has_probabilities
    assert not UserLoss().has_prior_bias
    torch.testing.assert_close(UserLoss().log_probabilities(o), -CASES["spherical"].oracle(o))
    torch.testing.assert_close(UserLoss()(o, target), CASES["spherical"].make()(o, target))
    assert torch.equal(UserLoss().predict(o, 3), CASES["spherical"].make().predict(o, 3))
    assert UserLoss().log_probabilities(o.half()).dtype == torch.float16


@pytest.mark.parametrize("loss", [sl.SquaredErrorLoss(), sl.ZLoss(1, 1), CosineLoss()], ids=lambda loss: type(loss).__name__)
def test_no_distribution_is_an_error(loss):
    o = data(4, 5)[0]
    for method in (loss.probabilities, loss.log_probabilities):
        with pytest.raises(TypeError, match=rf"{type(loss).__name__} does not model class probabilities; use .*predict"):
            method(o)
    assert not loss.has_probabilities
    if not loss.has_prior_bias:
        with pytest.raises(TypeError, match=rf"{type(loss).__name__} has no bias that matches class frequencies"):
            loss.prior_bias(torch.ones(5))


@every_loss
def test_a_loss_says_what_it_can(case):
    """The attributes are true exactly where the methods give an answer."""
    loss, o = case.make(), data(4, 5)[0]
    for has, method in ((loss.has_probabilities, loss.probabilities), (loss.has_prior_bias, loss.prior_bias)):
        try:
            method(o[0].exp())
            answers = True
        except TypeError:
            answers = False
        assert has is answers, method.__name__


def test_the_bound_predicts_with_the_softmax_it_bounds():
    o = data(4, 5)[0]
    torch.testing.assert_close(sl.SoftmaxBoundLoss().probabilities(o), torch.softmax(o, -1))


@every_loss
def test_predict_ranks_by_the_loss(case):
    """The best classes are those with the smallest loss as the target."""
    o = 3 * data(6, 7)[0]
    wanted = case.oracle(o).argsort(1)
    for k in (1, 3, 7):
        assert torch.equal(case.make().predict(o, k), wanted[:, :k])
    assert torch.equal(case.make().predict(o.T, 2, dim=0), wanted[:, :2].T)
    assert torch.equal(case.make().predict(o[0], 2), wanted[0, :2])


def test_predictions_are_not_the_largest_outputs():
    o = torch.tensor([[1.0, 0.5, -4.0]])
    assert sl.TaylorSoftmaxLoss().predict(o).item() == 2  # |o + 1| is 2, 1.5, 3
    assert sl.SphericalSoftmaxLoss().predict(o, 3).tolist() == [[2, 0, 1]]
    assert sl.AbsSoftmaxLoss().predict(o).item() == 2
    assert sl.SoftmaxLoss().predict(o).item() == 0
    assert sl.SquaredErrorLoss().predict(o).item() == sl.ZLoss(1, 1).predict(o).item() == 0
    assert sl.SquaredErrorLoss(target_value=-1.0).predict(o).item() == 2


def zipf(D, dtype):
    p = 1 / torch.arange(1, D + 1, dtype=torch.float64)
    return (p / p.sum()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("D", [1, 2, 10, 10_000])
@every_likelihood
def test_prior_bias_gives_the_frequencies(case, D, dtype):
    p = zipf(D, dtype)
    bias = case.make().prior_bias(p)
    assert bias.dtype == dtype
    found = torch.exp(-case.oracle(bias.double()))
    # the bias itself is rounded, and exp(b) magnifies that by |b|
    torch.testing.assert_close(found, p.double() / p.double().sum(), rtol=40 * torch.finfo(dtype).eps, atol=0)


@every_likelihood
def test_prior_bias_takes_counts(case):
    counts = torch.tensor([1, 5, 94])
    torch.testing.assert_close(case.make().probabilities(case.make().prior_bias(counts)), counts / 100)


def test_every_class_moves_from_the_prior_bias():
    """No class starts where its own gradient vanishes, the vertex of the polynomial or the kink of |o|."""
    p = zipf(100, torch.float64)
    for name in LIKELIHOODS:
        bias = CASES[name].make().prior_bias(p).requires_grad_()
        for c in (0, 50, 99):
            (grad,) = torch.autograd.grad(CASES[name].oracle(bias)[c], bias)
            assert (grad != 0).all()


def test_prior_bias_at_a_chosen_scale():
    p = zipf(50, torch.float64)
    for loss, oracle in (
        (sl.TaylorSoftmaxLoss(), CASES["taylor"].oracle),
        (CASES["spherical"].make(), CASES["spherical"].oracle),
    ):
        least = 0.5 if isinstance(loss, sl.TaylorSoftmaxLoss) else 0.3
        for Z in (least / float(p.min()) * (1 + 1e-9), 1e4, 1e8):
            torch.testing.assert_close(torch.exp(-oracle(loss.prior_bias(p, Z=Z))), p, rtol=1e-6, atol=0)
        for Z in (0.9 * least / float(p.min()), -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=rf"Z is {Z}.*needs Z >="):
                loss.prior_bias(p, Z=Z)


def test_prior_bias_of_squared_error_is_the_mean_target():
    p = zipf(6, torch.float64)
    bias = sl.SquaredErrorLoss(2.0).prior_bias(p).requires_grad_()
    torch.testing.assert_close(bias.detach(), 2 * p)
    expected_loss = (p * ((bias - 2 * torch.eye(6, dtype=torch.float64)) ** 2).sum(1)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(expected_loss, bias)[0], torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(
    "frequencies",
    [[0.5, 0.0], [0.5, -0.1], [0.5, float("nan")], [0.5, float("inf")], []],
    ids=["zero", "negative", "nan", "inf", "empty"],
)
@every_likelihood
def test_frequencies_that_are_none(case, frequencies):
    with pytest.raises(ValueError, match="frequencies"):
        case.make().prior_bias(torch.tensor(frequencies))


def test_frequencies_of_a_wrong_shape():
    with pytest.raises(ValueError, match=r"frequencies have shape \(2, 3\).*\(D,\)"):
        sl.TaylorSoftmaxLoss().prior_bias(torch.ones(2, 3))
