"""The factored head and its optimizer: exact over many steps, within its memory, and clear about what it refuses."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads import DenseHead, FactoredHead, FactoredSGD
from spherical_loss.heads.factored import head as factored
from spherical_loss.heads.factored import transform
from spherical_loss.heads.factored.step import dense_step
from tests.support.cases import CASES

from ..reference import DenseReference, random_batch
from ..test_gram import LargestTensor
from ..test_heads import assert_same_weights, train_step

TAYLOR = CASES["taylor"].oracle


def trained(head, optimizer, steps, N=16, start=0, loss=None):
    for step in range(start, start + steps):
        hidden, target, _ = random_batch(N, head.in_features, head.num_classes, seed=step)
        train_step(head, loss or sl.TaylorSoftmaxLoss(), optimizer, hidden.to(head.V.dtype), target)
    return head


def relative(x, y):
    return float((x - y).norm() / y.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("N", "d", "steps"), [(16, 8, 3_000), (8, 24, 4_000)])  # N > d / 2, through d x d; and N x N
def test_thousands_of_float32_steps(N, d, steps):
    """Against dense float64 SGD, whose gradient is written out here: autograd would take most of the time.

    At this learning rate dense float32 SGD ends 1.6e-5 away from float64 (weights, 6,000 steps); at 100 times the rate it
    is chaotic and ends 0.1 away, so that nothing could be compared.
    """
    D, lr = 100, 2.0
    torch.manual_seed(0)
    head, loss = FactoredHead(d, D), sl.TaylorSoftmaxLoss()
    optimizer = FactoredSGD(head, lr)
    W = torch.cat([head.weight, head.bias.unsqueeze(1)], 1).double()
    frequencies, generator = 1 / torch.arange(1, D + 1).double(), torch.Generator().manual_seed(0)
    worst, frames = 0.0, 0
    condition = torch.eye(d + 1, dtype=torch.float64)
    for _ in range(steps):
        hidden = (0.3 + torch.randn(N, d, generator=generator)).relu()
        target = torch.multinomial(frequencies, N, replacement=True, generator=generator)
        known = len(head.U.past)
        value, _ = train_step(head, loss, optimizer, hidden, target)
        frames += len(head.U.past) != known

        H = torch.cat([hidden.double(), torch.ones(N, 1, dtype=torch.float64)], 1)
        o = H @ W.T
        Z, o_c = (1 + o + o**2 / 2).sum(1, keepdim=True), o.gather(1, target.unsqueeze(1))
        expected = float((Z.log() - (1 + o_c + o_c**2 / 2).log()).mean())
        grad_o = ((1 + o) / Z).scatter_add(1, target.unsqueeze(1), -(1 + o_c) / (1 + o_c + o_c**2 / 2)) / N
        W -= lr * grad_o.T @ H
        worst = max(worst, abs(float(value) - expected) / abs(expected))
        condition = condition @ (torch.eye(d + 1, dtype=torch.float64) - lr / N * H.T @ (H / Z))
    assert worst < 1e-4
    assert relative(head.weight.double(), W[:, :d]) < 1e-4
    assert relative(head.bias.double(), W[:, d]) < 1e-4
    width = slice(0, d + 1)
    assert relative(head.Q.exact[width, width], W.T @ W) < 1e-4
    assert relative(head.w[width], W.sum(0)) < 1e-4
    # The test is hard enough: kept in one piece, U would not have been invertible in float32.
    assert torch.linalg.cond(condition) > 1e8
    assert frames > steps // 2_000


@pytest.mark.parametrize(("condition", "frames"), [(1.5, 1), (1.5, 3), (4.0, 1000)])
def test_frames_and_refactoring_change_nothing(monkeypatch, condition, frames):
    monkeypatch.setattr(transform, "MAX_CONDITION", condition)
    monkeypatch.setattr(transform, "MAX_FRAMES", frames)
    monkeypatch.setattr(factored, "CHUNK", 64)
    torch.manual_seed(0)
    head = FactoredHead(6, 40).double()
    reference, optimizer = DenseReference(head.weight, head.bias), FactoredSGD(head, lr=3.0, weight_decay=1e-3)
    most = 0
    for step in range(60):
        hidden, target, _ = random_batch(5, 6, 40, seed=step)
        expected, grad_H, grads = reference.gradients(TAYLOR, hidden, target)
        value, grad = train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        reference.step(grads, lr=3.0, weight_decay=1e-3)
        most = max(most, len(head.U.past))
        torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(grad, grad_H, rtol=1e-6, atol=1e-8)
    assert_same_weights(head, reference, rtol=1e-6, atol=1e-8)
    assert most >= min(frames - 1, 3)
    o, h = reference.logits(hidden), hidden
    torch.testing.assert_close(head.logits(h), o, rtol=1e-6, atol=1e-8)
    head.refactor()
    assert len(head.U.past) == 0
    assert_same_weights(head, reference, rtol=1e-6, atol=1e-8)


def test_refactoring_after_steps_that_leave_the_condition_alone():
    """A loss without q never changes the condition of U, but weight decay scales U, and s moves w0."""

    class Linear(sl.SphericalLoss):
        def formula(self, s, q, o_c, D):
            return s / D - o_c

    torch.manual_seed(0)
    head = FactoredHead(6, 40).double()
    reference, optimizer = DenseReference(head.weight, head.bias), FactoredSGD(head, lr=0.1, weight_decay=0.5)
    for step in range(5):
        hidden, target, _ = random_batch(8, 6, 40, seed=step)
        _, _, grads = reference.gradients(lambda o: o.mean(-1, keepdim=True) - o, hidden, target)
        train_step(head, Linear(), optimizer, hidden, target)
        reference.step(grads, lr=0.1, weight_decay=0.5)
    assert head.U.log_condition == 0
    head.refactor()
    assert_same_weights(head, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("N", [3, 20])
def test_a_step_larger_than_the_series_allows(N):
    # Eigenvalues of lr A well above 1: dense SGD overshoots, and so must this, by the same amount.
    torch.manual_seed(0)
    head = FactoredHead(6, 4).double()
    reference, optimizer = DenseReference(head.weight, head.bias), FactoredSGD(head, lr=0.4)
    for step in range(3):
        hidden, target, _ = random_batch(N, 6, 4, seed=step)
        _, _, grads = reference.gradients(CASES["squared-error"].oracle, hidden, target)
        train_step(head, CASES["squared-error"].make(), optimizer, hidden, target)
        reference.step(grads, lr=0.4)
    assert_same_weights(head, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("N", [3, 20])
@pytest.mark.parametrize(("weight_decay", "max_grad_norm"), [(0.1, None), (0.0, 0.01), (0.1, 0.01), (0.01, 1e6)])
def test_weight_decay_and_clipping(N, weight_decay, max_grad_norm):
    torch.manual_seed(0)
    head = FactoredHead(9, 40).double()
    reference = DenseReference(head.weight, head.bias)
    optimizer = FactoredSGD(head, lr=0.5, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    for step in range(20):
        hidden, target, _ = random_batch(N, 9, 40, seed=step)
        _, _, grads = reference.gradients(TAYLOR, hidden, target)
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        reference.step(grads, 0.5, weight_decay, max_grad_norm)
    assert_same_weights(head, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("N", [64, 16])  # N > d / 2, through d x d; and N x N
def test_the_inverse_stays_the_inverse(N):
    """Without Newton's method, what the series leave out adds up to 1.2e-4 with N = 64."""
    torch.manual_seed(0)
    d, D, generator = 48, 500, torch.Generator().manual_seed(1)
    head, loss = FactoredHead(d, D), sl.TaylorSoftmaxLoss()
    optimizer, closed = FactoredSGD(head, lr=5.0), 0
    for _ in range(1_024):
        hidden = (0.3 + torch.randn(N, d, generator=generator)).relu()
        train_step(head, loss, optimizer, hidden, (D * torch.rand(N, generator=generator) ** 3).long())
        closed = max(closed, len(head.U.past))
    assert closed > 0
    assert head.U.inverse_deviation.norm() > 3
    one = torch.eye(len(head.V[0]), dtype=torch.float64)
    product = (one + head.U.inverse_deviation.double()) @ (one - head.U.deviation.double())
    assert torch.linalg.matrix_norm(product - one, 2) < 1e-5


@pytest.mark.parametrize("name", ["taylor", "spherical", "z", "squared-error"])
@pytest.mark.parametrize("N", [3, 20])
def test_the_gradient_norm_is_that_of_the_dense_gradient(name, N):
    torch.manual_seed(0)
    head, case = FactoredHead(9, 40).double(), CASES[name]
    optimizer = FactoredSGD(head, lr=0.1)
    hidden, target, _ = random_batch(N, 9, 40, seed=0)
    case.make()(head(hidden, target)).backward()
    _, _, grads = DenseReference(head.weight, head.bias).gradients(case.oracle, hidden, target)
    torch.testing.assert_close(optimizer.grad_norm(), torch.cat([g.flatten() for g in grads]).norm())


@pytest.mark.parametrize("N", [3, 20])
@pytest.mark.parametrize("K", [1, 2])
def test_the_five_updates_are_the_dense_step(N, K):
    torch.manual_seed(0)
    d, D, lr, weight_decay = 7, 40, 2.0, 0.01
    head = FactoredHead(d, D).double()
    W = torch.cat([head.weight, head.bias.unsqueeze(1)], 1)
    optimizer = FactoredSGD(head, lr, weight_decay)
    for step in range(5):
        hidden, target, target_weight = random_batch(N, d, D, seed=step, K=K)
        sl.TaylorSoftmaxLoss()(head(hidden, target, target_weight)).backward()
        (batch,) = head.gradients
        slopes = batch.g_s, batch.g_q, batch.g_c
        optimizer.step()
        W = dense_step(W, torch.cat([hidden, torch.ones(N, 1)], 1), target, *slopes, lr, weight_decay)
    torch.testing.assert_close(torch.cat([head.weight, head.bias.unsqueeze(1)], 1), W, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(head.Q.exact[: d + 1, : d + 1], W.T @ W, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head.w[: d + 1], W.sum(0), rtol=1e-10, atol=1e-10)


def test_the_gradient_of_the_hidden_vectors_is_the_callers():
    """What is done to it, as by ``clip_grad_norm_``, does not reach the step."""
    heads = [FactoredHead(8, 40, bias=False, init="zero") for _ in range(2)]
    hidden, target, _ = random_batch(4, 8, 40, seed=0)
    for head, factor in zip(heads, (1.0, 100.0), strict=True):
        H = hidden.float().requires_grad_()
        sl.TaylorSoftmaxLoss()(head(H, target)).backward()
        H.grad.mul_(factor)
        FactoredSGD(head, lr=1.0).step()
    assert torch.equal(heads[0].weight, heads[1].weight)


@pytest.mark.parametrize("seed", [0, 3])
def test_few_classes_and_a_large_rate(seed):
    """The change of all rows and that of the target rows cancel. With Q made of both, weights ended 36 times and 9% off."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head, means = FactoredHead(16, 2), torch.randn(2, 16, generator=generator)
    optimizer, reference = FactoredSGD(head, lr=3.0), DenseReference(head.weight, head.bias)
    for _ in range(60):
        target = torch.randint(2, (64,), generator=generator)
        hidden = (0.5 * means[target] + torch.randn(64, 16, generator=generator)).relu()
        _, _, grads = reference.gradients(TAYLOR, hidden, target)
        value, _ = train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        reference.step(grads, lr=3.0)
        assert value < 10
    assert relative(head.weight.double(), reference.W) < 1e-3
    assert relative(head.bias.double(), reference.b) < 1e-3


def test_accumulated_gradients():
    torch.manual_seed(0)
    head = FactoredHead(6, 40).double()
    reference, optimizer, loss = DenseReference(head.weight, head.bias), FactoredSGD(head, lr=0.5), sl.TaylorSoftmaxLoss()
    for step in range(5):
        optimizer.zero_grad()
        total = None
        for part, K in enumerate((None, 3, 2)):
            hidden, target, target_weight = random_batch(4 + part, 6, 40, seed=10 * step + part, K=K)
            weights = () if K is None else (target_weight,)
            loss(head(hidden, target, *weights)).backward()
            _, _, grads = reference.gradients(TAYLOR, hidden, target, *weights)
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        optimizer.step()
        reference.step(total, lr=0.5)
    assert_same_weights(head, reference, rtol=1e-8, atol=1e-10)


def test_an_ordinary_optimizer_to_the_rest_of_torch():
    head = FactoredHead(6, 40)
    optimizer = FactoredSGD(head, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    rates = []
    for step in range(6):
        trained(head, optimizer, 1, start=step)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    restored = FactoredSGD(head, lr=5.0)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])

    def closure():
        optimizer.zero_grad()
        hidden, target, _ = random_batch(4, 6, 40, seed=0)
        value = sl.TaylorSoftmaxLoss()(head(hidden.float(), target))
        value.backward()
        return value

    assert optimizer.step(closure) > 0
    assert list(head.parameters()) == []


def test_it_trains_where_the_hidden_vectors_are_data():
    head = FactoredHead(6, 40, init="zero")
    optimizer, loss = FactoredSGD(head, lr=20.0), sl.TaylorSoftmaxLoss()
    hidden, target = torch.randn(8, 6), torch.arange(8)
    for _ in range(100):
        optimizer.zero_grad()
        value = loss(head(hidden, target))
        value.backward()
        optimizer.step()
    assert value < 1 < math.log(40)


def test_evaluation_leaves_nothing_for_the_step():
    head, loss = FactoredHead(6, 40).eval(), sl.TaylorSoftmaxLoss()
    hidden, target, _ = random_batch(4, 6, 40, seed=0)
    H = hidden.float().requires_grad_()
    loss(head(H, target)).backward()
    assert H.grad is not None
    assert head.gradients == []
    with torch.no_grad():
        loss(head.train()(H, target))
    assert head.gradients == []


def test_no_second_matrix_of_the_size_of_the_weights(monkeypatch):
    monkeypatch.setattr(factored, "CHUNK", 4096)
    monkeypatch.setattr(transform, "MAX_CONDITION", 3.0)
    monkeypatch.setattr(transform, "MAX_FRAMES", 4)
    d, D = 15, 40_000
    with LargestTensor() as made:
        head = FactoredHead(d, D)
    assert sum(size > D * d / 4 for size in made.sizes) == 1  # V itself
    with LargestTensor() as made:
        head.set_weight(torch.zeros(D, d))
        head.set_bias(sl.TaylorSoftmaxLoss().prior_bias(torch.arange(1.0, D + 1)))
        optimizer = FactoredSGD(head, lr=1e4)
        trained(head, optimizer, 40)
    assert len(head.U.past) < 4
    assert max(made.sizes) <= D * d + D  # the zeros made by this test


def test_the_cost_does_not_depend_on_the_classes():
    """The same operations on tensors of the same sizes, whatever D is: nothing of size D is made or read as a whole."""
    counts = []
    for D in (1_000, 20_000):
        head = FactoredHead(15, D, init="zero")
        optimizer = FactoredSGD(head, lr=1e-9)  # so small that one term of the series is enough for any D
        hidden, target = torch.randn(16, 15), torch.arange(16)
        with LargestTensor() as made:
            train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        counts.append(made.sizes)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("where", ["hidden", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_leaves_the_head_untouched(where, value):
    head = trained(h := FactoredHead(6, 40), FactoredSGD(h, lr=1.0), 5)
    optimizer, before = FactoredSGD(head, lr=1.0), copy.deepcopy(head.state_dict())
    hidden, target, _ = random_batch(4, 6, 40, seed=0)
    hidden = hidden.float()
    if where == "hidden":
        hidden[1, 2] = value
    loss = sl.TaylorSoftmaxLoss()(head(hidden, target))
    (loss if where == "hidden" else loss * value).backward()
    said = "the hidden vectors of 1 of 4 examples, first 1" if where == "hidden" else "g_s of 4 of 4 examples, first 0"
    with pytest.raises(FloatingPointError, match=f"{said}.*the head is unchanged"):
        optimizer.step()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    trained(head, optimizer, 1)  # zero_grad, then a normal step


class LogOfDifference(sl.SphericalLoss):
    """NaN, with finite slopes, where q is less than ``least``."""

    def __init__(self, least, **options):
        super().__init__(**options)
        self.least = least

    def formula(self, s, q, o_c, D):
        return torch.log(q - self.least) - o_c


def tiered(d, D):
    return sl.TieredHead(d, D, cuts=(D // 4,))


@pytest.mark.parametrize(("kind", "optimizer_of"), [(FactoredHead, FactoredSGD), (tiered, sl.TieredSGD)])
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("why", ["q", "loss", "lr"])
def test_a_batch_without_a_meaning_is_refused(kind, optimizer_of, targets, why):
    """A step was taken although the loss was NaN: its slope was finite."""
    torch.manual_seed(0)
    d, D, N = 16, 200, 64
    head = kind(d, D)
    directions = torch.linalg.qr(torch.randn(d, 2))[0]
    weights = torch.randn(D, d)
    head.set_weight(weights - weights @ directions @ directions.T)
    optimizer = optimizer_of(head, lr=1e20 if why == "lr" else 1e-12)
    hidden = torch.randn(N, d)
    if why == "q":  # large in two directions that the weights do not see: float32 has no digits left for q
        hidden += 1e5 * torch.randn(N, 2).sign() @ directions.T
    target, shares = torch.randint(D, (N, targets)), torch.rand(N, targets)
    statistics = head(hidden, target[:, 0]) if targets == 1 else head(hidden, target, shares)
    value = (LogOfDifference(1e9) if why == "loss" else sl.TaylorSoftmaxLoss())(statistics)
    assert value.isnan() or why == "lr"
    assert (statistics.q < 0).any() == (why == "q")
    value.backward()
    before = copy.deepcopy(head.state_dict())
    said = {"q": r"q = .* examples, first \d+ is negative \(-.*center", "loss": "NaN .* in g_q of 64", "lr": r"lr=.*e\+20"}
    with pytest.raises(FloatingPointError, match=f"{said[why]}.*the head is unchanged"):
        optimizer.step()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_negative_q_of_an_ignored_example_does_not_count():
    torch.manual_seed(0)
    head = FactoredHead(16, 200, bias=False)
    directions = torch.linalg.qr(torch.randn(16, 2))[0]
    weights = torch.randn(200, 16)
    head.set_weight(weights - weights @ directions @ directions.T)
    hidden = 1e5 * torch.randn(64, 2).sign() @ directions.T + torch.randn(64, 16)
    negative = head.sums(hidden)[1] < 0
    assert 0 < negative.sum() < 64
    target = torch.randint(200, (64,)).masked_fill(negative, -100)
    statistics = head(hidden, target)
    sl.TaylorSoftmaxLoss()(statistics).backward()
    FactoredSGD(head, lr=1e-12).step()


def test_what_is_refused():
    head, loss = FactoredHead(6, 40), sl.TaylorSoftmaxLoss()
    optimizer = FactoredSGD(head, lr=1.0)
    hidden, target, _ = random_batch(4, 6, 40, seed=0)
    with pytest.raises(RuntimeError, match="found no gradient"):
        optimizer.step()
    stale = loss(head(hidden.float(), target))
    trained(head, optimizer, 1)
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        stale.backward()
    with pytest.raises(TypeError, match="not DenseHead"):
        FactoredSGD(DenseHead(6, 40), lr=1.0)
    tiered = sl.TieredSGD(sl.TieredHead(6, 40, cuts=(10,)), lr=1.0)
    for trained_alone in (optimizer, tiered):
        with pytest.raises(ValueError, match="trains its head alone"):
            trained_alone.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert (len(optimizer.param_groups), len(tiered.param_groups)) == (1, 2)
    for options, message in [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 1.0, "weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"lr": 1.0, "max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            FactoredSGD(head, **options)
    with pytest.raises(ValueError, match="below 1"):
        trained(head, FactoredSGD(head, lr=10.0, weight_decay=0.1), 1)


def test_a_singular_step_is_refused():
    # One example: lr A has the single eigenvalue 2 lr g_q ||h||^2, and for the squared error g_q = 1.
    head = FactoredHead(2, 5, bias=False).double()
    hidden, target = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([1])
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match=r"lr=0\.02 makes I - lr A singular.*smaller lr"):
        train_step(head, sl.SquaredErrorLoss(), FactoredSGD(head, lr=0.02), hidden, target)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_weight_decay_does_not_shrink_U_out_of_range():
    """A loss without q never closes a frame by its condition."""

    class Linear(sl.SphericalLoss):
        def formula(self, s, q, o_c, D):
            return s / D - o_c

    torch.manual_seed(0)
    head = FactoredHead(6, 40)
    reference, optimizer = DenseReference(head.weight.double(), head.bias.double()), FactoredSGD(head, lr=0.4, weight_decay=1.0)
    for step in range(300):  # 0.6^300 is 1e-67
        hidden, target, _ = random_batch(8, 6, 40, seed=step)
        _, _, grads = reference.gradients(lambda o: o.mean(-1, keepdim=True) - o, hidden, target)
        train_step(head, Linear(), optimizer, hidden.float(), target)
        reference.step(grads, lr=0.4, weight_decay=1.0)
    assert relative(head.weight.double(), reference.W) < 1e-5
