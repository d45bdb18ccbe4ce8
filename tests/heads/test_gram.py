"""GramHead gives the same weights as DenseHead in every way of training, from the same seeds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import spherical_loss as sl
from spherical_loss.heads import DenseHead, GramHead, Head
from tests.support.processes import run_ranks

from .reference import random_batch

N, d, D = 32, 8, 60


class TiedModel(nn.Module):
    """Predicts a class from two others, with one matrix as the embedding and the output weight."""

    def __init__(self, Kind: type[Head]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(D, d)
        self.hidden = nn.Linear(d, d)
        self.head = Kind(d, D)
        self.head.weight = self.embedding.weight

    def forward(self, pairs: Tensor, target: Tensor) -> sl.Statistics:
        return self.head(torch.tanh(self.hidden(self.embedding(pairs).sum(1))), target)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = None) -> list[Tensor]:
    loss = sl.TaylorSoftmaxLoss()
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        pairs, target = torch.randint(D, (N, 2), generator=generator), torch.randint(D, (N,), generator=generator)
        optimizer.zero_grad()
        loss(model(pairs, target)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def tied_model(Kind: type[Head]) -> TiedModel:
    torch.manual_seed(0)
    return TiedModel(Kind).double()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["AdamW", "Nesterov", "Adagrad"],
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_any_optimizer_tied_embeddings_and_clipping(make, clip):
    results = [trained(model, make(model.parameters()), clip) for model in map(tied_model, (DenseHead, GramHead))]
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-7, atol=1e-9)


def test_checkpoints_are_interchangeable(tmp_path):
    dense, gram = tied_model(DenseHead), tied_model(GramHead)
    trained(dense, torch.optim.AdamW(dense.parameters(), lr=1e-2))
    torch.save(dense.state_dict(), tmp_path / "model.pt")
    gram.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    hidden, target, _ = random_batch(N, d, D, seed=0)
    loss = sl.TaylorSoftmaxLoss()
    torch.testing.assert_close(loss(gram.head(hidden, target)), loss(dense.head(hidden, target)))


def _ddp_worker(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = DistributedDataParallel(tied_model(GramHead))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), sl.TaylorSoftmaxLoss()
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        pairs, target = torch.randint(D, (N, 2), generator=generator), torch.randint(D, (N,), generator=generator)
        mine = slice(rank * N // ranks, (rank + 1) * N // ranks)
        optimizer.zero_grad()
        loss(model(pairs[mine], target[mine])).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), f"{folder}/model.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    run_ranks(_ddp_worker, 2, str(tmp_path))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    dense = tied_model(DenseHead)
    optimizer, loss = torch.optim.SGD(dense.parameters(), lr=0.1), sl.TaylorSoftmaxLoss()
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        pairs, target = torch.randint(D, (N, 2), generator=generator), torch.randint(D, (N,), generator=generator)
        optimizer.zero_grad()
        loss(dense(pairs, target)).backward()
        optimizer.step()
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)


def test_the_plan_is_the_cheaper_form_and_both_agree(monkeypatch):
    head = GramHead(16, 1000).double()
    assert head.plan(4).form == "logits"
    assert head.plan(64).form == "gram"
    for n in (1, 7, 8, 100):
        plan = head.plan(n)
        assert plan.form == ("gram" if plan.gram_flops <= plan.logits_flops else "logits")
    results = []
    hidden, target, _ = random_batch(12, 16, 1000, seed=0)
    for form in ("gram", "logits"):
        monkeypatch.setattr(GramHead, "plan", lambda self, n, form=form: type(plan)(form, 0, 0))
        H = hidden.clone().requires_grad_()
        grads = torch.autograd.grad(sl.TaylorSoftmaxLoss()(head(H, target)), [H, head.weight, head.bias])
        results.append(grads)
    for gram, logits in zip(*results, strict=True):
        torch.testing.assert_close(gram, logits)


def test_wide_weights_use_mirrored_blocks():
    from spherical_loss.heads.gram import BLOCK, gram_matrix

    W = torch.randn(50, 2 * BLOCK + 17, dtype=torch.float64)
    torch.testing.assert_close(gram_matrix(W), W.T @ W)


@pytest.mark.parametrize("n", [4, 64])
def test_bfloat16_weights_have_float32_statistics(n):
    torch.manual_seed(0)
    head = GramHead(16, 1000).to(torch.bfloat16)
    hidden, target, _ = random_batch(n, 16, 1000, seed=0)
    loss, H = sl.TaylorSoftmaxLoss(), hidden.to(torch.bfloat16)
    value = loss(head(H, target))
    value.backward()
    exact = DenseHead(16, 1000).double()
    exact.set_weight(head.weight.detach().double())
    expected = loss(exact(H.double(), target))
    expected.backward()
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(head.weight.grad.double(), exact.weight.grad, rtol=1e-2, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """The largest tensor any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else (out,)
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        self.sizes += [t.numel() for t in results if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known]
        return out


@pytest.mark.parametrize("n", [256, 2000])
def test_no_tensor_of_the_size_of_the_logits(n):
    # The only tensor larger than a tenth of the N x D logits is the gradient of the weights.
    width, classes = 64, 20_000
    head = GramHead(width, classes)
    hidden, target, _ = random_batch(n, width, classes, seed=0)
    with LargestTensor() as mode:
        sl.TaylorSoftmaxLoss()(head(hidden.float().requires_grad_(), target)).backward()
    large = [size for size in mode.sizes if size > max(n * classes / 10, 2**22)]
    assert all(size == width * classes for size in large)
    assert max(mode.sizes) < n * classes
