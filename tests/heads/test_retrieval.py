"""Retrieval through faiss, against the exact search."""

from __future__ import annotations

import builtins

import pytest
import torch

import spherical_loss as sl
from spherical_loss import FaissIndex
from spherical_loss.files import DamagedFileError, save
from spherical_loss.heads import DenseHead, FactoredHead, FactoredSGD, Head
from tests.support.cases import CASES, Case

from .reference import DenseReference, random_batch
from .test_heads import train_step


def trained_head(bias: bool) -> Head:
    torch.manual_seed(0)
    head = FactoredHead(12, 3000, bias=bias)
    optimizer = FactoredSGD(head, lr=300.0)
    for step in range(30):
        hidden, target, _ = random_batch(32, 12, 3000, seed=step)
        train_step(head, sl.TaylorSoftmaxLoss(), optimizer, hidden.float(), target)
    return head


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "loss",
    [sl.TaylorSoftmaxLoss(), sl.SphericalSoftmaxLoss(0.1), sl.AbsSoftmaxLoss(), sl.SoftmaxLoss(), sl.ZLoss(1, 2)],
    ids=str,
)
def test_a_flat_index_is_exact(bias, loss):
    head, hidden = trained_head(bias), torch.randn(20, 12)
    assert FaissIndex(head, "Flat").recall(hidden, 10, loss) > 0.999  # rounding may swap the last places


def test_both_signs_are_searched():
    head = DenseHead(2, 4, bias=False)
    head.set_weight(torch.tensor([[3.0, 0], [-5.0, 0], [1.0, 0], [0.5, 0]]))
    index, hidden = FaissIndex(head, "Flat"), torch.tensor([[1.0, 0]])
    assert index.topk(hidden, 2, sl.SphericalSoftmaxLoss(0.1)).classes.tolist() == [[1, 0]]
    assert index.topk(hidden, 2, sl.SoftmaxLoss()).classes.tolist() == [[0, 2]]
    assert index.topk(hidden, 4, sl.SphericalSoftmaxLoss(0.1)).classes.tolist() == [[1, 0, 2, 3]]


def test_more_probes_find_more():
    head, hidden, loss = trained_head(bias=True), torch.randn(50, 12), sl.TaylorSoftmaxLoss()
    few, all_ = (FaissIndex(head, "IVF32,Flat", nprobe=n).recall(hidden, 10, loss) for n in (1, 32))
    assert few < all_
    assert all_ > 0.999


def exact_classes(head: Head, hidden: torch.Tensor, k: int, case: Case) -> torch.Tensor:
    """The k classes of the least loss, of all outputs in float64."""
    return case.oracle(DenseReference(head.weight, head.bias).logits(hidden.double())).topk(k, largest=False).indices


def share(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float((exact.unsqueeze(-1) == found.unsqueeze(-2)).any(-1).double().mean())


RANKINGS = ("taylor", "spherical", "squared-error", "z", "abs-softmax", "cosine")  # |o + 1|, |o|, o, and through s and q


@pytest.fixture(scope="module")
def random_rows() -> tuple[Head, dict[bool, FaissIndex], torch.Tensor]:
    """Rows without any structure, the hardest case, of an even and of an odd width."""
    torch.manual_seed(0)
    heads = {bias: DenseHead(16, 8_000, bias=bias) for bias in (False, True)}
    heads[True].set_bias(0.3 * torch.randn(8_000))
    return heads, {bias: FaissIndex(head) for bias, head in heads.items()}, torch.randn(60, 16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", RANKINGS)
def test_the_default_finds_random_rows_under_every_ranking(random_rows, name, bias):
    heads, indexes, hidden = random_rows
    exact = exact_classes(heads[bias], hidden, 10, CASES[name])
    loss = CASES[name].make()
    found = indexes[bias].topk(hidden, 10, loss)
    assert share(exact, found.classes) > 0.97  # 1,024 clusters of which 32 are searched find 40% to 60%
    torch.testing.assert_close(found.scores[:, 0], heads[bias].topk(hidden, 1, loss).scores[:, 0])  # not of the index's codes


@pytest.mark.parametrize("factory", [None, "IVF64,Flat", "IVF64,PQ8x4fs"])
def test_tuned_for_a_recall(random_rows, factory):
    heads, _, hidden = random_rows
    index, loss, costs = FaissIndex(heads[False], factory), sl.TaylorSoftmaxLoss(), []
    exact = exact_classes(heads[False], hidden, 10, CASES["taylor"])
    for recall in (0.5, 0.95):
        found = index.tune(hidden, 10, loss, recall)
        assert found == pytest.approx(share(exact, index.topk(hidden, 10, loss).classes))
        assert found >= recall
        costs.append((index.candidates, index.index.nprobe if factory else 1))
    assert costs[0] < costs[1]
    with pytest.raises(ValueError, match=r"recall is 1.5"):
        index.tune(hidden, 10, loss, 1.5)


def test_saved_and_loaded(random_rows, tmp_path):
    heads, _, hidden = random_rows
    head, loss, path = heads[True], sl.SphericalSoftmaxLoss(), tmp_path / "classes.index"
    index = FaissIndex(head, "IVF16,Flat", nprobe=3, candidates=5)
    index.save(path)
    again = FaissIndex.load(path, FactoredHead.from_linear(head))
    assert torch.equal(again.topk(hidden, 10, loss).classes, index.topk(hidden, 10, loss).classes)
    assert (again.candidates, again.index.nprobe) == (5, 3)
    with pytest.raises(ValueError, match=r"bias=1 and num_classes=8000, but this one has .* bias=0"):
        FaissIndex.load(path, heads[False])
    with pytest.raises(ValueError, match="index of other weights"):
        FaissIndex.load(path, DenseHead(16, 8_000))
    path.write_bytes(path.read_bytes()[:-200] + bytes(200))
    with pytest.raises(DamagedFileError, match=r"classes.index is damaged"):
        FaissIndex.load(path, head)
    save({"weight": torch.zeros(3)}, path)
    with pytest.raises(DamagedFileError, match=r"is not an index that FaissIndex.save wrote"):
        FaissIndex.load(path, head)


def test_bad_input_and_the_missing_extra(monkeypatch):
    head = DenseHead(4, 20)
    with pytest.raises(ValueError, match="between 1 and the 20 classes"):
        FaissIndex(head, "Flat").topk(torch.randn(3, 4), 21, sl.TaylorSoftmaxLoss())
    with pytest.raises(ValueError, match="candidates is 0"):
        FaissIndex(head, "Flat", candidates=0)
    original = builtins.__import__

    def without_faiss(name, *args, **kwargs):
        if name == "faiss":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_faiss)
    with pytest.raises(ImportError, match=r"spherical-loss\[faiss\]"):
        FaissIndex(head, "Flat")
