"""AdaptiveSphericalSoftmax against a dense float64 computation over all classes, by autograd and plain SGD."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spherical_loss as sl
from spherical_loss import AdaptiveSphericalSoftmax, DenseHead, FactoredHead, FactoredSGD, GramHead, TieredSGD
from tests.support.cases import CASES

from .adaptive_reference import (
    Reference,
    assert_same_weights,
    check_training,
    every_likelihood,
    optimizers_of,
    randomized,
    shuffled_frequencies,
    train_step,
)
from .reference import random_batch

LAYOUTS = {  # of 30 to 40 classes
    "one tail": {"frequent": 5},
    "two softmaxes": {"frequent": (3, 8)},
    "two tails": {"frequent": 5, "tail_cutoffs": (12,)},
    "three softmaxes, three tails": {"frequent": (2, 5, 9), "tail_cutoffs": (14, 29)},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
TAILS = ["factored", "tiered", "gram", "dense"]
every_tail = pytest.mark.parametrize("tail", TAILS)


@every_tail
@every_likelihood
@every_layout
@pytest.mark.parametrize("ordered", [True, False])
def test_values_gradients_and_steps(tail, case, layout, ordered):
    N, d, D = 14, 6, 30
    frequencies = None if ordered else shuffled_frequencies(D)
    layer = randomized(AdaptiveSphericalSoftmax(d, D, loss=case.make(), frequencies=frequencies, tail=tail, **layout).double())
    batches = [random_batch(N, d, D, seed=step, ignored=step % 3)[:2] for step in range(6)]
    check_training(layer, Reference(layer, case.oracle, frequencies), batches)


BATCHES = {"no rare target": [0, 3, 1, 1], "rare targets only": [9, 20, 8, 29], "ignored and rare": [-100, 12], "empty": []}


@every_tail
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_batches_of_one_kind(tail, weight_decay):
    """Also with no rare target at all the tail makes the step of the dense computation: weight decay only."""
    d, D, M = 4, 30, 5
    layer = randomized(AdaptiveSphericalSoftmax(d, D, M, tail=tail, reduction="sum").double())
    reference = Reference(layer, CASES["taylor"].oracle, None)
    optimizers = optimizers_of(layer, 0.05, 0.1, weight_decay)
    for seed, classes in enumerate(2 * list(BATCHES.values())):
        target = torch.tensor(classes, dtype=torch.long)
        hidden = random_batch(max(1, len(classes)), d, D, seed)[0][: len(classes)]
        expected, grad_H, grads = reference.gradients(hidden, target, "sum")
        value, grad = train_step(layer, optimizers, hidden, target)
        reference.step(grads, 0.05, 0.1, weight_decay)
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(grad, grad_H, rtol=1e-7, atol=1e-9)
    assert_same_weights(layer, reference, rtol=1e-7, atol=1e-9)


def test_nothing_counted():
    layer = randomized(AdaptiveSphericalSoftmax(4, 30, 5))
    optimizers, before = optimizers_of(layer, 0.1, 0.1), copy.deepcopy(layer.state_dict())
    hidden = torch.full((3, 4), torch.nan)  # ignored examples are not even read
    value, grad = train_step(layer, optimizers, hidden, torch.full((3,), -100))
    assert value.isnan()  # the mean of nothing, as in torch
    assert not grad.any()
    for name, x in layer.state_dict().items():
        if not name.endswith(("_extra_state", "written")):  # which have the number of steps
            assert torch.equal(x, before[name]), name


def test_a_forgotten_backward_pass_is_still_an_error():
    layer = AdaptiveSphericalSoftmax(4, 30, 5)
    layer(torch.randn(2, 4), torch.tensor([1, 20]))
    with pytest.raises(RuntimeError, match="found no gradient"):
        FactoredSGD(layer.tail, lr=0.1).step()


@settings(max_examples=30, deadline=None)
@given(
    N=st.integers(0, 30), d=st.integers(1, 12), D=st.integers(2, 40), share=st.floats(0, 1), tail=st.sampled_from(TAILS),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(N, d, D, share, tail, seed):
    M, frequencies = 1 + int(share * (D - 2)), shuffled_frequencies(D, seed)
    layer = randomized(AdaptiveSphericalSoftmax(d, D, M, frequencies=frequencies, tail=tail, reduction="sum").double(), seed)
    reference, optimizers = Reference(layer, CASES["taylor"].oracle, frequencies), optimizers_of(layer, 0.02, 0.02)
    for step in range(3):
        hidden, target, _ = random_batch(max(1, N), d, D, seed + step)
        hidden, target = hidden[:N], target[:N]
        expected, grad_H, grads = reference.gradients(hidden, target, "sum")
        value, grad = train_step(layer, optimizers, hidden, target)
        reference.step(grads, 0.02, 0.02)
        torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(grad, grad_H, rtol=1e-6, atol=1e-8)
    assert_same_weights(layer, reference, rtol=1e-6, atol=1e-8)


@every_tail
@every_likelihood
@every_layout
def test_all_log_probabilities_and_the_best_of_them(tail, case, layout):
    d, D, M = 5, 40, 6
    frequencies = shuffled_frequencies(D)
    layer = randomized(AdaptiveSphericalSoftmax(d, D, loss=case.make(), frequencies=frequencies, tail=tail, **layout).double())
    hidden = random_batch(12, d, D, seed=3)[0]
    expected = Reference(layer, case.oracle, frequencies).log_prob(hidden).detach()
    torch.testing.assert_close(layer.log_prob(hidden.reshape(3, 4, d)).reshape(12, D), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(expected.exp().sum(1), torch.ones(12, dtype=torch.float64))
    every = torch.arange(D).expand(12, D)
    targets = layer.log_prob(hidden.unsqueeze(1).expand(12, D, d), every)  # of given targets, without all outputs
    torch.testing.assert_close(targets, expected, rtol=1e-8, atol=1e-10)
    for k in (1, 3, M, M + 3, D):
        best, found = expected.topk(k), layer.topk(hidden.reshape(3, 4, d), k)
        torch.testing.assert_close(found.scores.reshape(12, k), best.values, rtol=1e-8, atol=1e-10)
        assert torch.equal(found.classes.reshape(12, k), best.indices)
    assert torch.equal(layer.predict(hidden), expected.argmax(1))


def test_the_tail_is_searched_only_where_it_can_win():
    layer, searched = randomized(AdaptiveSphericalSoftmax(3, 40, 4)), []
    topk = layer.tail.topk
    layer.tail.topk = lambda hidden, *rest: searched.append(len(hidden)) or topk(hidden, *rest)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([5.0, 0, 0, 0, 0]))
    assert layer.predict(torch.randn(7, 3)).tolist() == [0] * 7
    assert searched == [0]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions(reduction):
    layer = randomized(AdaptiveSphericalSoftmax(4, 30, 5, reduction=reduction))
    hidden, target = torch.randn(2, 3, 4), torch.tensor([[1, 7, -100], [29, 0, 2]])
    output, loss = layer(hidden, target)
    assert output.shape == (2, 3)
    expected = {"none": -output, "mean": -output.sum() / 5, "sum": -output.sum()}[reduction]
    torch.testing.assert_close(loss, expected)


@every_tail
@every_likelihood
@pytest.mark.parametrize("layout", [{"frequent": 3}, {"frequent": (2, 4), "tail_cutoffs": (7,)}])
def test_start_is_the_class_frequencies(tail, case, layout):
    frequencies = torch.tensor([3.0, 50, 1, 20, 7, 7, 100, 2, 2])
    layer = AdaptiveSphericalSoftmax(4, 9, loss=case.make(), frequencies=frequencies, tail=tail, **layout).double()
    log_p = layer.log_prob(torch.randn(5, 4, dtype=torch.float64))
    torch.testing.assert_close(log_p.exp(), (frequencies / frequencies.sum()).double().expand(5, 9), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("counts", "square"), [([30.0, 20, 10, 25, 15], 0.3 * 0.7 / (0.45 * 0.55)), ([60.0, 5, 20, 10, 5], 1.0)]
)
def test_the_row_of_another_class_has_the_curvature_of_the_most_frequent_one(counts, square):
    layer = AdaptiveSphericalSoftmax(3, 5, 2, frequencies=torch.tensor(counts))
    torch.testing.assert_close(layer.scale, torch.tensor([1.0, 1.0, square**0.5]))


def test_the_row_of_each_cluster_is_scaled_by_its_own_curvature():
    layer = AdaptiveSphericalSoftmax(3, 6, (1, 3), frequencies=torch.tensor([20.0, 19, 18, 17, 15, 11]))
    expected = [1.0, (0.2 * 0.8 / (0.37 * 0.63)) ** 0.5, (0.2 * 0.8 / (0.43 * 0.57)) ** 0.5]
    torch.testing.assert_close(layer.scale, torch.tensor(expected))


def test_with_several_tails_the_only_one_is_an_error():
    layer = AdaptiveSphericalSoftmax(3, 30, (2, 5), tail_cutoffs=(10,))
    assert [tail.num_classes for tail in layer.tails] == [5, 20]
    with pytest.raises(ValueError, match=r"2 tails, of 5, 20 classes: use layer.tails"):
        _ = layer.tail


def test_start_without_frequencies_is_zipf_s_law():
    log_p = AdaptiveSphericalSoftmax(4, 50, 10).double().log_prob(torch.zeros(4, dtype=torch.float64))
    c = torch.arange(50, dtype=torch.float64)
    torch.testing.assert_close(log_p.exp(), ((c + 2) / (c + 1)).log() / torch.tensor(51.0).log(), rtol=1e-5, atol=0)


class PlainLikelihood(sl.SphericalLoss):
    """A likelihood as a user may write it, without a bias that matches frequencies."""

    is_likelihood = True

    def formula(self, s, q, o_c, D):
        return torch.log(q + D) - torch.log(o_c**2 + 1)


def test_a_loss_without_prior_bias_starts_from_random_weights():
    layer = AdaptiveSphericalSoftmax(4, 30, 5, PlainLikelihood(), torch.arange(30) + 1.0)
    assert layer.tail.weight.any()
    assert not layer.weight.any()


def test_a_head_as_the_tail():
    frequencies = shuffled_frequencies(30)
    tail = GramHead(4, 25)
    weight = tail.weight.detach().clone()
    layer = AdaptiveSphericalSoftmax(4, 30, 5, tail=tail)
    assert layer.tail is tail
    assert not tail.bias.any()  # as it was given
    AdaptiveSphericalSoftmax(4, 30, 5, frequencies=frequencies, tail=tail)
    expected = sl.TaylorSoftmaxLoss().prior_bias(frequencies.sort(descending=True).values[5:])
    torch.testing.assert_close(tail.bias.detach(), expected)
    assert torch.equal(tail.weight, weight)
    two = [GramHead(4, 5), FactoredHead(4, 20)]
    layer = AdaptiveSphericalSoftmax(4, 30, 5, frequencies=frequencies, tail=two, tail_cutoffs=(10,))
    assert layer.tails == two
    torch.testing.assert_close(two[1].bias, sl.TaylorSoftmaxLoss().prior_bias(frequencies.sort(descending=True).values[10:]))
    without_bias = AdaptiveSphericalSoftmax(4, 30, 5, frequencies=frequencies, tail=FactoredHead(4, 25, bias=False))
    assert without_bias(torch.randn(3, 4), torch.tensor([1, 2, 3])).loss.isfinite()


@every_tail
def test_training_continues_bit_for_bit_from_a_state_dict(tail):
    frequencies = shuffled_frequencies(60)
    layer = AdaptiveSphericalSoftmax(4, 60, 5, frequencies=frequencies, tail=tail)
    optimizers = optimizers_of(layer, 0.1, 1.0)
    batches = [(torch.randn(8, 4), torch.randint(60, (8,))) for _ in range(6)]
    for batch in batches[:3]:
        train_step(layer, optimizers, *batch)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again = AdaptiveSphericalSoftmax(4, 60, 5, tail=tail)  # the order of the classes comes from the file
    again.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(layer)
    layers = [(layer, optimizers), (again, optimizers_of(again, 0.1, 1.0)), (copied, optimizers_of(copied, 0.1, 1.0))]
    for batch in batches[3:]:
        values = [train_step(x, their, *batch) for x, their in layers]
        for value, grad in values[1:]:
            assert torch.equal(value, values[0][0])
            assert torch.equal(grad, values[0][1])
    for x, _ in layers[1:]:
        assert torch.equal(x.predict(batches[0][0]), layer.predict(batches[0][0]))
        for name, value in layer.state_dict().items():
            assert torch.equal(x.state_dict()[name], value), name


def test_autocast():
    layer = randomized(AdaptiveSphericalSoftmax(8, 60, 5))
    hidden, target = torch.randn(16, 8), torch.randint(60, (16,))
    expected = layer(hidden, target)
    with torch.autocast("cpu", torch.bfloat16):
        output, loss = layer(hidden.bfloat16().requires_grad_(), target)
    assert output.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(output, expected.output, rtol=0.02, atol=0.05)
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32
    FactoredSGD(layer.tail, lr=0.1).step()


def test_in_half_precision_the_likelihood_is_float32():
    layer = randomized(AdaptiveSphericalSoftmax(8, 60, 5)).to(torch.bfloat16)
    hidden, target = torch.randn(16, 8), torch.randint(60, (16,))
    output, loss = layer(hidden.bfloat16(), target)
    assert output.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(output, layer.float()(hidden, target).output, rtol=0.02, atol=0.05)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # from torch's compiler
def test_compiled_model_makes_the_same_step():
    torch.manual_seed(0)
    trunk, layer = nn.Linear(3, 4), randomized(AdaptiveSphericalSoftmax(4, 30, 5))
    x, target = torch.randn(6, 3), torch.tensor([0, 1, 29, 8, 4, 17])

    def value_and_weights(compiled: bool) -> tuple[Tensor, Tensor, Tensor]:
        mine, net = copy.deepcopy(layer), copy.deepcopy(trunk)

        def model(x: Tensor, target: Tensor) -> Tensor:
            return mine(net(x), target).loss

        value = (torch.compile(model, backend="eager") if compiled else model)(x, target)
        value.backward()
        FactoredSGD(mine.tail, lr=0.5).step()
        return value.detach(), net.weight.grad, mine.tail.weight

    for found, expected in zip(value_and_weights(True), value_and_weights(False), strict=True):
        torch.testing.assert_close(found, expected)


def test_evaluation_leaves_nothing_for_the_optimizer():
    layer = randomized(AdaptiveSphericalSoftmax(4, 30, 5)).eval()
    hidden = torch.randn(3, 4, requires_grad=True)
    layer(hidden, torch.tensor([1, 20, 29])).loss.backward()
    assert hidden.grad.any()
    assert not layer.tail.gradients


BAD = {
    "as many frequent classes as there are": ({"frequent": 30}, ValueError, r"frequent is 30, but must be between 1 and 29"),
    "no frequent class": ({"frequent": 0}, ValueError, r"frequent is 0"),
    "no softmax": ({"frequent": ()}, ValueError, r"frequent and tail_cutoffs are \(\) and \(\), .* at least one"),
    "softmaxes that do not increase": ({"frequent": (5, 5)}, ValueError, r"\(5, 5\) and \(\), but must be ranks that increase"),
    "a tail before a softmax": ({"tail_cutoffs": (4,)}, ValueError, r"\(5,\) and \(4,\), but must be ranks that increase"),
    "a tail beyond all classes": ({"tail_cutoffs": (30,)}, ValueError, r"between 1 and 29 for 30 classes"),
    "one head for two tails": ({"tail_cutoffs": (9,)}, ValueError, r"\[\(4, 25\)\], but must have \[\(4, 4\), \(4, 21\)\]"),
    "frequencies of another length": ({"frequencies": torch.ones(29)}, ValueError, r"\(29,\), but must .*\(30,\)"),
    "a frequency of zero": ({"frequencies": torch.arange(30)}, ValueError, "positive and finite.*add one"),
    "a negative frequency": ({"frequencies": torch.arange(30) - 5.0}, ValueError, "positive and finite"),
    "a frequency that is not a number": ({"frequencies": torch.full((30,), torch.nan)}, ValueError, "positive and finite"),
    "no likelihood": ({"loss": sl.ZLoss(1, 1)}, ValueError, "ZLoss does not model probabilities.*TaylorSoftmaxLoss"),
    "not of the family": ({"loss": sl.SoftmaxLoss()}, TypeError, "SoftmaxLoss.*needs a loss of the spherical family"),
    "label smoothing": ({"loss": sl.TaylorSoftmaxLoss(label_smoothing=0.1)}, ValueError, "label_smoothing=0.1"),
    "class weights": ({"loss": sl.TaylorSoftmaxLoss(weight=torch.ones(25))}, ValueError, "weight per class"),
    "a frequent that is no integer": ({"frequent": 5.0}, TypeError, r"frequent is 5.0, but must be an integer"),
    "ranks that are no integers": ({"tail_cutoffs": (9.5,)}, TypeError, r"tail_cutoffs is \(9.5,\), but must be an integer"),
    "an unknown tail": ({"tail": "spherical"}, ValueError, "tail 'spherical' is not known; use one of factored"),
    "a tail of another size": (
        {"tail": DenseHead(4, 30)},
        ValueError,
        r"num_classes \[\(4, 30\)\], but must have \[\(4, 25\)\]",
    ),
    "an unknown reduction": ({"reduction": "max"}, ValueError, "reduction 'max'"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_options(options, error, message):
    head = DenseHead(4, 25)
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(error, match=message):
        AdaptiveSphericalSoftmax(**{"in_features": 4, "n_classes": 30, "frequent": 5, "tail": head, **options})
    assert all(torch.equal(x, before[name]) for name, x in head.state_dict().items())


@pytest.mark.parametrize("form", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["list", "array"])
def test_frequencies_and_ranks_in_other_forms(form):
    frequencies = shuffled_frequencies(30)
    expected = AdaptiveSphericalSoftmax(4, 30, (3, 8), frequencies=frequencies, tail_cutoffs=(12,))
    layer = AdaptiveSphericalSoftmax(
        4, 30, form(torch.tensor([3, 8])), frequencies=form(frequencies), tail_cutoffs=form(torch.tensor([12]))
    )
    assert layer.cutoffs == expected.cutoffs
    assert layer.state_dict().keys() == expected.state_dict().keys()
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], x)
    assert AdaptiveSphericalSoftmax(4, 30, form(torch.tensor(5)), tail_cutoffs=12).cutoffs == (5, 12)


def test_the_layer_itself_is_no_head():
    layer = AdaptiveSphericalSoftmax(4, 30, 5)
    for Optimizer in (FactoredSGD, TieredSGD):
        with pytest.raises(TypeError, match=r"not AdaptiveSphericalSoftmax; give it layer\.tail"):
            Optimizer(layer, lr=1.0)
    with pytest.raises(TypeError, match=r"not AdaptiveSphericalSoftmax: .*layer\.order\[layer\.frequent \+ i\]"):
        sl.FaissIndex(layer)


def test_an_index_of_the_tail_finds_classes():
    """As the guide of a million classes maps them."""
    layer = randomized(AdaptiveSphericalSoftmax(4, 30, 5, frequencies=shuffled_frequencies(30)))
    hidden = torch.randn(6, 4)
    found = sl.FaissIndex(layer.tail, "Flat").topk(hidden, 1, layer.loss).classes
    log_p = layer.log_prob(hidden)
    rare = log_p.masked_fill(layer.rank < 5, -torch.inf)
    assert torch.equal(layer.order[layer.frequent + found].squeeze(1), rare.argmax(1))


def test_bad_batches_write_nothing():
    layer = AdaptiveSphericalSoftmax(4, 30, 5)
    hidden = torch.randn(2, 4)
    with pytest.raises(IndexError, match="target 30 at position"):
        layer(hidden, torch.tensor([1, 30]))
    with pytest.raises(IndexError, match="target -1 at position"):
        layer(hidden, torch.tensor([-1, 3]))
    with pytest.raises(TypeError, match="class indices"):
        layer(hidden, torch.tensor([1.0, 3.0]))
    with pytest.raises(ValueError, match="target has shape"):
        layer(hidden, torch.tensor([1]))
    with pytest.raises(ValueError, match="must end in in_features=4"):
        layer.log_prob(torch.randn(2, 5))
    with pytest.raises(ValueError, match="k is 31"):
        layer.topk(hidden, 31)
    assert not layer.tail.gradients


def test_a_state_of_another_layout_is_an_error():
    state = AdaptiveSphericalSoftmax(4, 30, 5).state_dict()
    with pytest.raises((RuntimeError, ValueError), match=r"30|25|26"):
        AdaptiveSphericalSoftmax(4, 31, 5).load_state_dict(state)


@every_tail
def test_it_learns_what_a_dense_softmax_learns(tail):
    """A rule from a class to the next one, over all classes, rare ones too: both get it right."""
    torch.manual_seed(0)
    D = 60
    embedding, layer = nn.Embedding(D, 16), AdaptiveSphericalSoftmax(16, D, 10, tail=tail)
    optimizers = [torch.optim.Adam([*embedding.parameters(), layer.weight, layer.bias], 0.02)]
    optimizers += optimizers_of(layer, 0.0, 20.0)[1:]
    x = torch.arange(D)
    target = (7 * x) % D
    first = float(layer(embedding(x), target).loss.detach())
    for _ in range(400):
        loss = layer(embedding(x), target).loss
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert float(loss.detach()) < first / 4
    assert float((layer.predict(embedding(x)) == target).float().mean()) > 0.9


def test_the_loss_is_cross_entropy_where_every_target_is_frequent():
    layer = randomized(AdaptiveSphericalSoftmax(4, 30, 5))
    hidden, target = torch.randn(8, 4), torch.randint(5, (8,))
    o = F.linear(hidden, layer.weight, layer.bias)
    o[:, 5] *= layer.scale[5]
    expected = F.cross_entropy(o, target)
    torch.testing.assert_close(layer(hidden, target).loss, expected)
