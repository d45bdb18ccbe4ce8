"""SampledSoftmax against a dense float64 softmax: the expectation of the estimate, its gradient, and what is exact."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor

from spherical_loss import SampledSoftmax

D, DIM = 7, 3
COUNTS = torch.tensor([5.0, 1, 2, 9, 2, 4, 3])
LAYERS = {
    "log-uniform": {},
    "frequencies": {"frequencies": COUNTS},
    "log-uniform, frequencies": {"frequencies": COUNTS, "proposal": "log-uniform"},
}
every_proposal = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def made(negatives: int = 2, n_classes: int = D, **options) -> SampledSoftmax:
    generator = torch.Generator().manual_seed(0)
    layer = SampledSoftmax(DIM, n_classes, negatives, **options).double()
    with torch.no_grad():
        layer.head.weight.copy_(torch.randn(n_classes, DIM, generator=generator, dtype=torch.float64))
        layer.head.bias.copy_(torch.randn(n_classes, generator=generator, dtype=torch.float64))
    return layer


def drawing(layer: SampledSoftmax, classes: list[int]) -> SampledSoftmax:
    """The same layer, whose negatives are these."""
    layer.draw = lambda: torch.tensor(classes)
    return layer


def proposal(options: dict) -> Tensor:
    c = torch.arange(D, dtype=torch.float64)
    if options.get("proposal") != "log-uniform" and "frequencies" in options:
        return COUNTS.double() / COUNTS.sum()
    return ((c + 2) / (c + 1)).log() / math.log(D + 1)


def batch(N: int = 5, n_classes: int = D, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, DIM, generator=generator, dtype=torch.float64), torch.randint(n_classes, (N,), generator=generator)


def outputs(layer: SampledSoftmax, hidden: Tensor, parameters: list[Tensor] | None = None) -> Tensor:
    W, b = parameters or [layer.head.weight.detach(), layer.head.bias.detach()]
    return hidden @ W.T + b


@every_proposal
def test_the_estimate_of_the_normalizer_is_unbiased(options):
    """All pairs of negatives, each with its probability: the expectation is the sum over all classes."""
    layer, (hidden, target) = made(**options), batch()
    P, o = proposal(options), outputs(layer, hidden)
    mean = torch.zeros(len(target), dtype=torch.float64)
    for pair in itertools.product(range(D), repeat=2):
        output = drawing(layer, list(pair))(hidden, target).output.detach()
        estimate = (o.gather(1, target.unsqueeze(1)).squeeze(1) - output).exp()
        mean += P[list(pair)].prod() * estimate
    torch.testing.assert_close(mean, o.exp().sum(1), rtol=1e-7, atol=0)


@every_proposal
def test_draws_follow_the_proposal(options):
    layer = made(negatives=200_000, **options)
    torch.manual_seed(0)
    counts, expected = torch.bincount(layer.draw(), minlength=D), 200_000 * proposal(options)
    assert float(((counts - expected) ** 2 / expected).sum()) < 22.5  # chi-squared with 6 degrees of freedom: 99.9%
    torch.testing.assert_close(layer.log_expected_count(torch.arange(D)), expected.log())


@every_proposal
@pytest.mark.parametrize("sparse", [True, False])
def test_value_and_gradient_of_the_estimate(options, sparse):
    layer, (hidden, target) = made(negatives=4, sparse=sparse, **options), batch()
    drawn = [3, 0, 3, 6]
    H = hidden.clone().requires_grad_()
    value = drawing(layer, drawn)(H, target).loss
    value.backward()
    P, inputs = proposal(options), [x.detach().clone().requires_grad_() for x in (hidden, *layer.head.parameters())]
    o = outputs(layer, inputs[0], inputs[1:])
    losses = []
    for n, c in enumerate(target.tolist()):
        Z = o[n, c].exp() + sum(o[n, k].exp() / (4 * P[k]) for k in drawn if k != c)
        losses.append(Z.log() - o[n, c])
    expected = torch.stack(losses).mean()
    grads = torch.autograd.grad(expected, inputs)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)
    found = H.grad, layer.head.weight.grad, layer.head.bias.grad
    assert [g.is_sparse for g in found] == [False, sparse, sparse]
    for grad, reference in zip(found, grads, strict=True):
        torch.testing.assert_close(grad.to_dense(), reference, rtol=1e-6, atol=1e-9)


def test_many_negatives_come_close_to_the_softmax():
    layer, (hidden, target) = made(negatives=100_000), batch()
    torch.manual_seed(0)
    exact = outputs(layer, hidden).log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(layer(hidden, target).output.detach(), exact, rtol=0, atol=0.02)


@every_proposal
def test_evaluation_is_exact(options):
    layer, (hidden, target) = made(**options).eval(), batch(12)
    expected = outputs(layer, hidden).log_softmax(1)
    picked = expected.gather(1, target.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(layer(hidden, target).output, picked)
    torch.testing.assert_close(layer.train().log_prob(hidden, target), picked)
    torch.testing.assert_close(layer.log_prob(hidden.reshape(3, 4, DIM)).reshape(12, D), expected)
    best, found = expected.topk(4), layer.topk(hidden.reshape(3, 4, DIM), 4)
    torch.testing.assert_close(found.scores.reshape(12, 4), best.values)
    assert torch.equal(found.classes.reshape(12, 4), best.indices)
    assert torch.equal(layer.predict(hidden), expected.argmax(1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_optimizers_of_sparse_gradients_train_it(kind):
    torch.manual_seed(0)
    layer, hidden, target = SampledSoftmax(8, 200, negatives=50), torch.randn(16, 8), torch.arange(16)
    optimizer = kind(layer.parameters(), lr=0.5)
    before, first = layer.head.weight.detach().clone(), layer.log_prob(hidden, target).mean().detach()
    for _ in range(60):
        optimizer.zero_grad()
        layer(hidden, target).loss.backward()
        optimizer.step()
    assert layer.log_prob(hidden, target).mean() > first / 2
    touched = (layer.head.weight != before).any(1)
    assert touched[:16].all()
    assert not touched.all()  # rare classes that were never drawn


@every_proposal
def test_start_is_the_class_frequencies(options):
    p = SampledSoftmax(DIM, D, 2, **options).log_prob(torch.randn(2, DIM)).exp()
    c = torch.arange(D, dtype=torch.float32)
    zipf = ((c + 2) / (c + 1)).log() / math.log(D + 1)
    torch.testing.assert_close(p, (COUNTS / COUNTS.sum() if "frequencies" in options else zipf).expand(2, D))


def test_ignored_targets_and_empty_batches():
    layer, (hidden, target) = made(), batch()
    hidden[1] = torch.nan
    marked = target.clone()
    marked[1] = -100
    kept = [0, 2, 3, 4]
    output, loss = drawing(layer, [2, 5])(hidden, marked)
    expected = layer(hidden[kept], target[kept])
    assert torch.equal(output[kept], expected.output)
    assert output[1] == 0
    torch.testing.assert_close(loss, expected.loss)  # sums of four and of five numbers
    empty = layer(hidden[:0], target[:0])
    assert empty.output.shape == (0,)
    assert empty.loss.isnan()
    empty.output.sum().backward()


def test_the_proposal_keeps_its_precision():
    """As differences of neighbours, probabilities of rare classes would be lost in float32."""
    counts = torch.cat([torch.tensor([1e9]), torch.ones(50)])
    layer = SampledSoftmax(DIM, 51, 10, frequencies=counts)
    assert layer.to(torch.bfloat16).head.weight.dtype == torch.bfloat16
    expected = torch.full((50,), math.log(10 / (1e9 + 50)), dtype=torch.float64)
    torch.testing.assert_close(layer.log_expected_count(torch.arange(1, 51)), expected, rtol=1e-6, atol=0)


def test_state_dict_and_copies_keep_the_proposal():
    layer, (hidden, target) = made(frequencies=COUNTS), batch()
    again = SampledSoftmax(DIM, D, 2, frequencies=torch.ones(D)).double()
    again.load_state_dict(layer.state_dict())
    for other in (again, copy.deepcopy(layer)):
        values = []
        for x in (layer, other):
            torch.manual_seed(3)
            values.append(x(hidden, target).output)
        assert torch.equal(*values)


BAD = {
    "no negatives": ({"negatives": 0}, "negatives is 0"),
    "an unknown proposal": ({"proposal": "uniform"}, "proposal 'uniform' is not known; use one of log-uniform, frequencies"),
    "no frequencies to draw by": ({"proposal": "frequencies"}, "give frequencies, or use"),
    "frequencies of another length": ({"frequencies": torch.ones(3)}, r"\(3,\), but must .*\(7,\)"),
    "a frequency of zero": ({"frequencies": torch.arange(7)}, "positive and finite.*add one"),
    "one class": ({"n_classes": 1}, "n_classes is 1"),
    "an unknown reduction": ({"reduction": "max"}, "reduction 'max'"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        SampledSoftmax(**{"in_features": DIM, "n_classes": D, **options})


def test_bad_targets():
    with pytest.raises(IndexError, match="target 7 at position"):
        made()(torch.randn(1, DIM, dtype=torch.float64), torch.tensor([7]))
