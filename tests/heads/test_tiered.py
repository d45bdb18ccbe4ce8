"""Tiers: one layer with a learning rate for each range of classes, against dense float64 SGD with a rate per row."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import spherical_loss as sl
from spherical_loss.files import DamagedFileError
from spherical_loss.heads import FactoredHead, FaissIndex, TieredHead, TieredSGD
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint
from spherical_loss.heads.factored import transform
from tests.support.cases import CASES
from tests.support.damage import flip_bit
from tests.support.processes import run_ranks

from .reference import DenseReference, random_batch
from .test_gram import LargestTensor
from .test_heads import MixedTiers, assert_same_weights, train_step

TAYLOR = CASES["taylor"].oracle
d, D = 6, 60
CUTS = (4, 15, 30)  # the first tier has fewer classes than features


def frequencies(n=D, seed=0):
    """In no order, over three decades."""
    return (1 / torch.arange(1, n + 1).double() ** 1.5)[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]


def new_head(kinds="factored", **options):
    torch.manual_seed(0)
    return TieredHead.by_frequency(d, frequencies(), CUTS, kinds=kinds, **options).double()


def row_rates(head, optimizer, D=D):
    """The rate of each class, from the groups of the optimizer and the frequencies alone."""
    order = frequencies(D).argsort(descending=True)
    rates = torch.empty(D, dtype=torch.float64)
    for group, (start, stop) in zip(optimizer.param_groups, [(0, 4), (4, 15), (15, 30), (30, D)], strict=True):
        rates[order[start:stop]] = group["lr"]
    return rates


def dense_step(reference, grads, rates, weight_decay=0.0, max_grad_norm=None):
    norm = float(torch.cat([g.flatten() for g in grads]).norm())
    scale = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
    for p, g in zip(reference.parameters(), grads, strict=True):
        lr = rates.reshape(-1, *[1] * (p.dim() - 1))
        p -= lr * (scale * g + weight_decay * p)


MIXED = ("dense", "gram", "factored", "factored")
LAST_DENSE = ("factored", "factored", "gram", "dense")


@pytest.mark.parametrize("kinds", ["factored", MIXED, LAST_DENSE, "gram"], ids=str)
@pytest.mark.parametrize(("N", "K"), [(3, None), (20, None), (8, 3)])
@pytest.mark.parametrize(("weight_decay", "max_grad_norm"), [(0.0, None), (0.01, None), (0.01, 0.05)])
def test_a_rate_per_row(monkeypatch, kinds, N, K, weight_decay, max_grad_norm):
    monkeypatch.setattr(transform, "MAX_CONDITION", 2.0)  # so that frames are closed
    monkeypatch.setattr(transform, "MAX_FRAMES", 4)
    head = new_head(kinds)
    optimizer = TieredSGD(head, lr=0.3, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    reference, rates = DenseReference(head.weight, head.bias), row_rates(head, optimizer)
    assert rates.max() > 10 * rates.min()
    for step in range(20):
        hidden, target, target_weight = random_batch(N, d, D, seed=step, K=K)
        batch = (target,) if K is None else (target, target_weight)
        expected, grad_H, grads = reference.gradients(TAYLOR, hidden, *batch)
        value, grad = train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, *batch)
        dense_step(reference, grads, rates, weight_decay, max_grad_norm)
        torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(grad, grad_H, rtol=1e-6, atol=1e-8)
    assert_same_weights(head, reference, rtol=1e-6, atol=1e-8)
    head.refactor()
    assert_same_weights(head, reference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("D", [60, 600])  # small tiers of many classes compute their outputs in float32
def test_thousands_of_float32_steps(D):
    torch.manual_seed(0)
    head = TieredHead.by_frequency(d, frequencies(D), CUTS, loss=sl.TaylorSoftmaxLoss())
    assert (head.tiers[0].is_small, head.tiers[0].is_part) == (True, D == 600)
    optimizer, loss = TieredSGD(head, lr=0.5), sl.TaylorSoftmaxLoss()
    W, rates = torch.cat([head.weight, head.bias.unsqueeze(1)], 1).double(), row_rates(head, optimizer, D).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3_000):
        hidden = (0.3 + torch.randn(8, d, generator=generator)).relu()
        target = torch.multinomial(frequencies(D), 8, replacement=True, generator=generator)
        value, _ = train_step(head, loss, optimizer, hidden, target)
        H = torch.cat([hidden.double(), torch.ones(8, 1, dtype=torch.float64)], 1)
        o = H @ W.T
        Z, o_c = (1 + o + o**2 / 2).sum(1, keepdim=True), o.gather(1, target.unsqueeze(1))
        expected = (Z.log() - (1 + o_c + o_c**2 / 2).log()).mean()
        grad_o = ((1 + o) / Z).scatter_add(1, target.unsqueeze(1), -(1 + o_c) / (1 + o_c + o_c**2 / 2)) / 8
        W -= rates * (grad_o.T @ H)
        assert abs(value.double() - expected) < 1e-4 * expected
    assert (head.weight - W[:, :d]).norm() < 1e-4 * W[:, :d].norm()
    assert (head.bias - W[:, d]).norm() < 1e-4 * W[:, d].norm()


def test_rates_grow_with_the_frequency_and_schedulers_scale_them():
    p = frequencies().sort(descending=True).values
    means = [float(p[a:b].mean()) for a, b in [(0, 4), (4, 15), (15, 30), (30, D)]]
    head = new_head()
    for power in (0.0, 0.5, 1.0):
        optimizer = TieredSGD(head, lr=2.0, power=power)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([2.0 * (m / means[-1]) ** power for m in means])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    hidden, target, _ = random_batch(4, d, D, seed=0)
    train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.2 * m / means[-1] for m in means])
    restored = TieredSGD(head, lr=7.0)
    restored.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in restored.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("kinds", ["factored", MIXED], ids=str)
def test_the_gradient_norm_and_accumulated_gradients(kinds):
    head = new_head(kinds)
    reference, optimizer, loss = DenseReference(head.weight, head.bias), TieredSGD(head, lr=0.5), sl.TaylorSoftmaxLoss()
    for step in range(4):
        optimizer.zero_grad()
        total = None
        for part, K in enumerate((None, 3)):
            hidden, target, target_weight = random_batch(4 + part, d, D, seed=10 * step + part, K=K)
            weights = () if K is None else (target_weight,)
            loss(head(hidden, target, *weights)).backward()
            _, _, grads = reference.gradients(TAYLOR, hidden, target, *weights)
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        torch.testing.assert_close(optimizer.grad_norm(), torch.cat([g.flatten() for g in total]).norm())
        optimizer.step()
        dense_step(reference, total, row_rates(head, optimizer))
    assert_same_weights(head, reference, rtol=1e-8, atol=1e-10)


def test_cuts_by_themselves():
    zipf = 1 / torch.arange(1.0, 100_001)
    head = TieredHead.by_frequency(2, zipf)
    assert len(head.tiers) == 4
    edges = zipf[[0, *head.bounds[1:-1], -1]].log()
    torch.testing.assert_close(edges.diff(), edges.diff().mean().expand(4), rtol=0.05, atol=0)
    assert len(TieredHead.by_frequency(2, torch.ones(50)).tiers) == 1
    assert len(TieredHead.by_frequency(2, zipf[:30]).tiers) == 1
    assert len(TieredHead.by_frequency(2, zipf[:300]).tiers) == 2
    law = torch.log1p(1 / torch.arange(1.0, 1_001))
    default, given = TieredHead(2, 1_000), TieredHead.by_frequency(2, law)  # Zipf's law by default
    assert default.bounds == given.bounds
    assert default.tier_frequencies == pytest.approx(given.tier_frequencies)
    shuffled = TieredHead.by_frequency(2, zipf[torch.randperm(100_000)])
    assert shuffled.bounds == head.bounds
    assert shuffled.tier_frequencies == pytest.approx(head.tier_frequencies)


@pytest.mark.parametrize("loss", [sl.TaylorSoftmaxLoss(), sl.SphericalSoftmaxLoss(0.1)], ids=str)
def test_a_start_from_the_frequencies(loss):
    head = TieredHead.by_frequency(d, frequencies(), CUTS, loss=loss)
    each = torch.stack([loss(head(torch.randn(1, d), torch.tensor([c]))) for c in range(D)])
    torch.testing.assert_close(torch.exp(-each).double(), frequencies() / frequencies().sum(), rtol=1e-4, atol=0)
    without = TieredHead.by_frequency(d, frequencies(), CUTS, loss=sl.ZLoss(1, 2))  # has none: random weights
    assert without.weight.std() > 0.1


def test_rows_in_the_order_of_the_caller():
    head = new_head(MIXED)
    rows = torch.cat([head.weight, head.bias.unsqueeze(1)], 1)
    assert torch.equal(head.dense_rows(slice(7, 40)), rows[7:40])
    hidden = torch.randn(5, d, dtype=torch.float64)
    assert FaissIndex(head, "Flat").recall(hidden, 8, sl.TaylorSoftmaxLoss()) > 0.99


@pytest.mark.parametrize("kinds", ["factored", MIXED], ids=str)
@pytest.mark.parametrize("through", ["state_dict", "safetensors", "deepcopy", "pickle"])
def test_a_saved_head_resumes_bit_for_bit(monkeypatch, tmp_path, kinds, through):
    monkeypatch.setattr(transform, "MAX_CONDITION", 2.0)

    def trained(head, optimizer, steps):
        for step in steps:
            hidden, target, _ = random_batch(8, d, D, seed=step)
            train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden.float(), target)

    head = TieredHead.by_frequency(d, frequencies(), CUTS, kinds=kinds)
    optimizer = TieredSGD(head, lr=1.0)
    trained(head, optimizer, range(30))
    if through == "deepcopy":
        other, continued = copy.deepcopy((head, optimizer))
    elif through == "pickle":
        other, continued = pickle.loads(pickle.dumps((head, optimizer)))
    else:
        other = TieredHead.by_frequency(d, frequencies(seed=1), CUTS, kinds=kinds)  # the order is part of the state
        state = head.state_dict()
        if through == "safetensors":
            save_file({name: x.contiguous() for name, x in state.items()}, tmp_path / "head.safetensors")
            state = load_file(tmp_path / "head.safetensors")
        other.load_state_dict(state)
        continued = TieredSGD(other, lr=9.0)
        continued.load_state_dict(optimizer.state_dict())
    trained(head, optimizer, range(30, 60))
    trained(other, continued, range(30, 60))
    assert continued.head is other
    for name, value in head.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(head.weight, other.weight)


@pytest.mark.parametrize("kinds", ["factored", MIXED], ids=str)
def test_checkpoints(tmp_path, kinds):
    def train(head, optimizer, steps):
        for step in steps:
            hidden, target, _ = random_batch(8, d, D, seed=step)
            train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)

    head = new_head(kinds)
    train(head, TieredSGD(head, lr=1.0), range(10))
    save_checkpoint(head, tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    train(head, TieredSGD(head, lr=1.0), range(10, 12))
    save_checkpoint(head, tmp_path / "saved")  # in place of the other
    assert len({path.name for path in (tmp_path / "saved").iterdir()}) == len(files)
    other = TieredHead(d, D, cuts=CUTS, kinds=kinds).double()
    load_checkpoint(other, tmp_path / "saved")
    for each in (head, other):
        train(each, TieredSGD(each, lr=1.0), range(20, 40))
    for name, value in head.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name

    before = copy.deepcopy(other.state_dict())
    flip_bit(next((tmp_path / "saved").glob("tier3-rows-*")), at=-300)
    with pytest.raises(DamagedFileError, match="tier3-rows"):
        load_checkpoint(other, tmp_path / "saved")
    for name, value in before.items():
        assert torch.equal(value, other.state_dict()[name]), name
    with pytest.raises(ValueError, match="has a TieredHead, but this is a FactoredHead"):
        load_checkpoint(FactoredHead(d, D), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"cuts=\(4, 15, 30\) was saved"):
        load_checkpoint(TieredHead(d, D, cuts=(5, 15, 30)), tmp_path / "saved")
    with pytest.raises(ValueError, match="tiers of other kinds"):
        load_checkpoint(TieredHead(d, D, cuts=CUTS, kinds=LAST_DENSE), tmp_path / "saved")


def poisoned(head, where):
    """A backward pass with one number that is not finite."""
    hidden, target, _ = random_batch(4, d, D, seed=0)
    if where == "hidden":
        hidden[1, 2] = math.nan
    value = sl.TaylorSoftmaxLoss()(head(hidden, target))
    (value * math.inf if where == "gradient" else value).backward()
    if where == "a dense tier":
        head.tiers[0].weight.grad[1, 1] = math.inf


@pytest.mark.parametrize("where", ["hidden", "gradient", "a dense tier", "lr"])
def test_not_finite_leaves_all_tiers_untouched(where):
    head = new_head(MIXED)
    optimizer = TieredSGD(head, lr=1e200 if where == "lr" else 1.0)
    before = copy.deepcopy(head.state_dict())
    poisoned(head, where)
    with pytest.raises(FloatingPointError, match="the head is unchanged"):
        optimizer.step()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    optimizer = TieredSGD(head, lr=1.0)
    hidden, target, _ = random_batch(4, d, D, seed=0)
    train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)


def test_the_cost_does_not_depend_on_the_classes():
    counts = []
    for classes in (1_000, 20_000):
        head = TieredHead(15, classes, init="zero", cuts=(10, 100, 500))
        optimizer = TieredSGD(head, lr=1e-12, power=0.0)
        with LargestTensor() as made:
            train_step(head, sl.TaylorSoftmaxLoss(), optimizer, torch.randn(16, 15), torch.arange(0, 1_000, 63))
        counts.append(made.sizes)
    assert counts[0] == counts[1]


def test_gradients_of_weights_that_were_replaced_are_refused():
    head, loss = new_head(), sl.TaylorSoftmaxLoss()
    optimizer, state = TieredSGD(head, lr=1.0), copy.deepcopy(head.state_dict())
    hidden, target, _ = random_batch(8, d, D, seed=0)
    for replace in (
        lambda: head.set_bias(torch.arange(D).double()),
        lambda: head.set_weight(torch.ones(D, d).double()),
        lambda: head.load_state_dict(state),
        lambda: head.tiers[2].set_bias(torch.zeros(15).double()),
    ):
        first, second = (loss(head(hidden, target)) for _ in range(2))
        first.backward()
        replace()
        with pytest.raises(RuntimeError, match="TieredSGD found no gradient"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="run the forward pass again"):
            second.backward()


def test_what_is_refused():
    p = frequencies()
    for cuts in [(5, 5), (10, 4), (0, 5), (60,), (70,), (-3,), 0]:
        with pytest.raises(ValueError, match=r"cuts are .*must increase and lie between 1 and 59"):
            TieredHead.by_frequency(d, p, cuts)
    for cuts in [(2.5,), (math.nan,), "abc", 5.0]:
        with pytest.raises(TypeError, match=r"cuts is .*must be an integer, or several of them"):
            TieredHead.by_frequency(d, p, cuts)
    for bad in (p.clone().index_fill_(0, torch.tensor([3]), 0.0), -p, p * math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            TieredHead.by_frequency(d, bad, CUTS)
    with pytest.raises(ValueError, match=r"shape \(60,\).*\(50,\)"):
        TieredHead(d, 50, frequencies=p)
    with pytest.raises(ValueError, match="3 of them, but there are 4 tiers"):
        TieredHead.by_frequency(d, p, CUTS, kinds=["dense", "gram", "factored"])
    with pytest.raises(ValueError, match="kind 'sparse' is not known"):
        TieredHead.by_frequency(d, p, CUTS, kinds="sparse")
    head = new_head()
    with pytest.raises(TypeError, match=r"loss is CrossEntropyLoss.*TaylorSoftmaxLoss"):
        TieredHead.by_frequency(d, p, CUTS, loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="not FactoredHead; use FactoredSGD"):
        TieredSGD(FactoredHead(d, D), lr=1.0)
    with pytest.raises(TypeError, match="not TieredHead; use TieredSGD"):
        sl.FactoredSGD(head, lr=1.0)
    for options, message in [({"lr": -1.0}, "lr is -1.0"), ({"lr": 1.0, "power": -0.5}, "power is -0.5")]:
        with pytest.raises(ValueError, match=message):
            TieredSGD(head, **options)
    other = TieredHead.by_frequency(d, p, (4, 15, 31)).double()
    before = other.weight
    with pytest.raises(ValueError, match=r"cuts=\(4, 15, 30\) was saved, but this one has .*cuts=\(4, 15, 31\)"):
        other.load_state_dict(head.state_dict())
    assert torch.equal(other.weight, before)
    hidden, target, _ = random_batch(8, d, D, seed=0)
    optimizer = TieredSGD(head, lr=1.0, weight_decay=0.5)  # too much for the first tier alone
    state = copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match="below 1"):
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("form", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["list", "array"])
def test_frequencies_and_cuts_in_other_forms(form):
    p = frequencies()
    expected = TieredHead.by_frequency(d, p, CUTS, loss=sl.TaylorSoftmaxLoss())
    head = TieredHead.by_frequency(d, form(p), form(torch.tensor(CUTS)), loss=sl.TaylorSoftmaxLoss())
    assert head.bounds == expected.bounds
    assert torch.equal(head.order, expected.order)
    torch.testing.assert_close(head.bias, expected.bias)
    assert TieredHead.by_frequency(d, p, 5).bounds == [0, 5, D]


def _train(rank, ranks, folder, steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    for name, kinds in {"factored": "factored", "mixed": MIXED}.items():
        head = new_head(kinds, group=dist.group.WORLD)
        optimizer = TieredSGD(head, lr=0.5, weight_decay=1e-3, max_grad_norm=0.1)
        for step in range(steps):
            hidden, target, _ = random_batch(12, d, D, seed=step)
            mine = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
            train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden[mine], target[mine])
        hidden, _, _ = random_batch(rank + 2, d, D, seed=99)
        found = head.topk(hidden, 9, sl.TaylorSoftmaxLoss()).classes
        save_checkpoint(head, f"{folder}/{name}")
        torch.save({"weight": head.weight, "bias": head.bias, "hidden": hidden, "topk": found}, f"{folder}/{name}-{rank}.pt")
        with pytest.raises(ValueError, match="use topk"):
            head.logits(hidden)
        with pytest.raises(ValueError, match=f"a sharded head has only {len(head.shard)} of the {D} rows"):
            FaissIndex(head)
    dist.destroy_process_group()


def test_several_processes_are_one(tmp_path):
    run_ranks(_train, 2, str(tmp_path), 30)
    for name, kinds in {"factored": "factored", "mixed": MIXED}.items():
        alone = new_head(kinds)
        optimizer = TieredSGD(alone, lr=0.5, weight_decay=1e-3, max_grad_norm=0.1)
        for step in range(30):
            hidden, target, _ = random_batch(12, d, D, seed=step)
            train_step(alone, sl.TaylorSoftmaxLoss(), optimizer, hidden, target)
        for rank in range(2):
            part = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            torch.testing.assert_close(part["weight"], alone.weight, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(part["bias"], alone.bias, rtol=1e-7, atol=1e-9)
            assert torch.equal(part["topk"], alone.topk(part["hidden"], 9, sl.TaylorSoftmaxLoss()).classes)
        loaded = TieredHead(d, D, cuts=CUTS, kinds=kinds).double()
        load_checkpoint(loaded, tmp_path / name)
        assert torch.equal(loaded.weight, part["weight"])
        assert torch.equal(loaded.bias, part["bias"])


def test_the_mixture_of_the_common_suite_has_tiers_of_all_kinds():
    assert len({type(tier) for tier in MixedTiers(5, 40).tiers}) == 3
    assert isinstance(MixedTiers(5, 40).tiers[0], FactoredHead)
    assert MixedTiers(5, 40).tiers[0].is_small
