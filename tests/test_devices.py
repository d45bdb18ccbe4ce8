"""What can be tested about GPUs without one: where tensors are made, and when the program waits for the device."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

import spherical_loss as sl
from spherical_loss.heads.factored import head as factored_head
from spherical_loss.heads.likelihood import OutputAndLoss
from tests.support.cases import every_loss, every_member
from tests.support.emulated_gpu import CAN_EMULATE, EmulatedGpu, OnGpu

N, d, D = 16, 8, 600


@pytest.fixture
def gpu():
    if not CAN_EMULATE:
        pytest.skip("torch has devices written in Python from 2.9 on")
    with EmulatedGpu() as gpu:
        yield gpu


def on(gpu, *make, dtype=torch.float32):
    """What each of these makes where the GPU is the default device; from there on it is the CPU, as in most programs."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(gpu.device):
            made = [f() for f in make]
    finally:
        torch.set_default_dtype(torch.float32)
    gpu.start_over()
    return made


def assert_quiet(gpu):
    assert not gpu.elsewhere
    assert not gpu.waits


# The emulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.copy_(torch.zeros(N, D, device="cpu")),
        lambda x: x.__setitem__(x > 0, torch.zeros((), device=x.device)),
    ],
)
def test_waits_are_seen(gpu, wait):
    (x,) = on(gpu, lambda: torch.randn(N, D))
    wait(x)
    assert gpu.waits.total() == 1


def test_tensors_elsewhere_are_seen(gpu):
    (x,) = on(gpu, lambda: torch.randn(N, D))
    (x + torch.zeros(N, D, device=x.device)).sum()
    assert_quiet(gpu)
    zeros = torch.zeros(N, D)
    assert gpu.elsewhere == {"zeros": 1}
    with pytest.raises(RuntimeError, match=r"aten.add.Tensor of tensors on cpu and gpu: \[\(16, 600\), \(16, 600\)\]"):
        x + zeros


class Careless(sl.SphericalLoss):
    def __init__(self, careless):
        super().__init__()
        self.careless = careless

    def formula(self, s, q, o_c, D):
        return q - o_c + self.careless(q)


@pytest.mark.parametrize("careless", [lambda q: torch.zeros(()), lambda q: q.max().item(), lambda q: float(bool(q.max() > 0))])
def test_a_careless_formula_is_seen(gpu, careless):
    head, H, target = on(gpu, lambda: sl.GramHead(d, D), lambda: torch.randn(N, d), lambda: torch.randint(D, (N,)))
    Careless(careless)(head(H, target)).backward()
    with pytest.raises(AssertionError):
        assert_quiet(gpu)


# Losses, dense and Gram heads: on the device, and never a wait ------------------------------------------------------


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [16, 900])  # small logits take torch's cross-entropy, others the kernel
def test_losses_stay_on_the_device_and_never_wait(gpu, case, dtype, rows):
    o, target, shares, weight = on(
        gpu,
        lambda: torch.randn(rows, D, dtype=dtype, requires_grad=True),
        lambda: torch.randint(D, (rows,)),
        lambda: torch.rand(rows, D),
        lambda: torch.rand(D),
    )
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"reduction": "none"}):
        for wanted in (target, shares):
            case.make(**options)(o, wanted).sum().backward()
    loss = case.make()
    loss.predict(o, 5)
    if loss.has_probabilities:
        loss.probabilities(o)
    assert_quiet(gpu)
    assert isinstance(o.grad, OnGpu)
    assert o.grad.on_cpu.isfinite().all()


@every_member
@pytest.mark.parametrize("Head", [sl.DenseHead, sl.GramHead])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [2, 16])  # of the Gram head: through the logits, and through the Gram matrix
def test_dense_and_gram_heads_stay_on_the_device_and_never_wait(gpu, case, Head, dtype, rows):
    head, hidden, target, share = on(
        gpu,
        lambda: Head(d, D),
        lambda: torch.randn(rows, d, requires_grad=True),
        lambda: torch.randint(D, (rows, 3)),
        lambda: torch.rand(rows, 3),
        dtype=dtype,
    )
    loss = case.make()
    loss(head(hidden, target[:, 0])).backward()
    loss(head(hidden, target, share)).backward()
    head.logits(hidden)
    head.topk(hidden, 5, loss)
    assert_quiet(gpu)
    assert all(isinstance(x.grad, OnGpu) and x.grad.dtype == dtype for x in (hidden, head.weight, head.bias))


# Factored heads and likelihoods: on the device, with as many waits as docs/gpus.md says -----------------------------

LAYERS = {  # by their names in that table
    "`FactoredHead`, `FactoredSGD`": lambda: sl.FactoredHead(d, D),
    "`TieredHead` of three tiers, `TieredSGD`": lambda: sl.TieredHead(d, D, cuts=(100, 200)),
    "`AdaptiveSphericalSoftmax` of two softmaxes and one tail, `FactoredSGD`": lambda: sl.AdaptiveSphericalSoftmax(
        d, D, frequent=(20, 100)
    ),
    "`AdaptiveSphericalSoftmax` of two softmaxes and three tails, `FactoredSGD`": lambda: sl.AdaptiveSphericalSoftmax(
        d, D, frequent=(20, 60), tail_cutoffs=(240, 420)
    ),
    "`SampledSoftmax`": lambda: sl.SampledSoftmax(d, D, negatives=20, sparse=False),
}


def trained(layer, batches, count=lambda: None):
    """What ``count()`` says after each part of the steps."""
    optimizers = [torch.optim.SGD(parameters, lr=0.1)] if (parameters := list(layer.parameters())) else []
    for head in layer.tails if isinstance(layer, sl.AdaptiveSphericalSoftmax) else [layer]:
        if isinstance(head, sl.FactoredHead):
            optimizers.append(sl.FactoredSGD(head, lr=0.1))
        if isinstance(head, sl.TieredHead):
            optimizers.append(sl.TieredSGD(head, lr=0.1))
    counts = []
    for hidden, target in batches:
        found = layer(hidden, target)
        value = found.loss if isinstance(found, OutputAndLoss) else sl.TaylorSoftmaxLoss()(found)
        counts.append(("forward", count()))
        value.backward()
        counts.append(("backward", count()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        counts.append(("step", count()))
    return counts


def stated():
    """The table of docs/gpus.md: how often the parts of a step wait."""
    page = (Path(__file__).parents[1] / "docs" / "gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    return {name: dict(zip(("forward", "backward", "step"), map(int, counts), strict=True)) for name, *counts in rows}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_stay_on_the_device_and_wait_as_often_as_stated(gpu, name, monkeypatch):
    monkeypatch.setattr(factored_head, "FEW_CLASSES", 0)  # tiers that are factored
    on_cpu = LAYERS[name]()
    (layer,) = on(gpu, LAYERS[name])
    layer.load_state_dict(on_cpu.state_dict())
    # Targets from all parts of the classes: a tail without any would wait less often.
    batches = [(torch.randn(N, d), (D * torch.arange(N) + torch.randint(D, (N,))) // N) for _ in range(4)]
    on_gpu = [(hidden.to(gpu.device), target.to(gpu.device)) for hidden, target in batches]
    torch.manual_seed(0)
    trained(on_cpu, batches)

    def count():
        waits = gpu.waits.total()
        assert not gpu.elsewhere
        gpu.start_over()
        return waits

    gpu.start_over()
    torch.manual_seed(0)
    for part, waits in trained(layer, on_gpu, count):
        assert waits == stated()[name][part], part
    for name, tensor in on_cpu.state_dict().items():
        found = layer.state_dict()[name]
        assert torch.equal(found.on_cpu if isinstance(found, OnGpu) else found, tensor), name


# The meta device ----------------------------------------------------------------------------------------------------

COUNTS = torch.arange(1, D + 1).flip(0).roll(7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sl.AdaptiveSphericalSoftmax(d, D, frequent=100),
        lambda: sl.AdaptiveSphericalSoftmax(d, D, frequent=(20, 100), frequencies=COUNTS, tail="tiered"),
        lambda: sl.AdaptiveSphericalSoftmax(d, D, frequent=20, tail="gram", tail_cutoffs=(200,)),
        lambda: sl.AdaptiveSphericalSoftmax(d, D, frequent=20, frequencies=COUNTS, tail=sl.FactoredHead(d, D - 20)),
        lambda: sl.SampledSoftmax(d, D),
        lambda: sl.SampledSoftmax(d, D, frequencies=COUNTS),
        lambda: sl.TieredHead.by_frequency(d, COUNTS, loss=sl.TaylorSoftmaxLoss()),
        lambda: sl.FactoredHead(d, D),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("assign", [False, True])
def test_layers_made_on_the_meta_device(make, dtype, assign):
    saved, hidden, target = make().to(dtype), torch.randn(N, d, dtype=dtype), torch.randint(D, (N,))
    with torch.no_grad():
        for p in saved.parameters():
            p.add_(torch.randn_like(p) / 10)
    with torch.device("meta"):
        layer = make().to(dtype)
    assert all(x.is_meta for x in (*layer.buffers(), *layer.parameters()))
    if not assign:
        layer.to_empty(device="cpu")
        for x in (*layer.buffers(), *layer.parameters()):
            x.detach().fill_(77)  # what is not loaded is seen
    layer.load_state_dict(copy.deepcopy(saved.state_dict()), assign=assign)

    def outputs(layer):
        torch.manual_seed(0)  # of the negatives
        if isinstance(layer, sl.Head):
            return (*layer(hidden, target)[:3], *layer.topk(hidden, 5, sl.TaylorSoftmaxLoss()), layer.logits(hidden))
        return (*layer(hidden, target), layer.log_prob(hidden), *layer.topk(hidden, 5))

    for found, expected in zip(outputs(layer), outputs(saved), strict=True):
        assert torch.equal(found, expected)
