"""The factored head over several processes: real ones, with gloo, against one process with the whole batch."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import spherical_loss as sl
from spherical_loss.files import DamagedFileError
from spherical_loss.heads import FactoredHead, FactoredSGD, TieredHead
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint
from spherical_loss.heads.factored import transform
from spherical_loss.processes import only_job
from tests.support import processes
from tests.support.processes import run_ranks

from ...support.cases import CASES
from ...support.damage import flip_bit
from ..reference import DenseReference, random_batch

pytestmark = pytest.mark.slow
N, d, D = 24, 6, 41  # 41 rows over 2 ranks: 21 and 20; over 4: 11, 11, 11 and 8


def loss_of(step: int) -> sl.Loss:
    return sl.TaylorSoftmaxLoss() if step % 2 else sl.SphericalSoftmaxLoss(0.1)


def trained(head: FactoredHead, steps: range, lr: float = 3.0, classes: int = D) -> list[torch.Tensor]:
    """Each rank takes its part of the batch; the parts are equal, so that the mean of means is the mean."""
    optimizer = FactoredSGD(head, lr, weight_decay=1e-4, max_grad_norm=2.0)
    rank, ranks = head.shard.rank, head.shard.ranks
    gradients = []
    for step in steps:
        hidden, target, _ = random_batch(N, d, classes, seed=step)
        mine = slice(rank * N // ranks, (rank + 1) * N // ranks)
        H = hidden[mine].to(head.V.dtype).requires_grad_()
        optimizer.zero_grad()
        loss_of(step)(head(H, target[mine])).backward()
        optimizer.step()
        gradients.append(H.grad)
    return gradients


def start(rank: int, ranks: int, folder: str, timeout: float = 60.0) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    return dist.group.WORLD


def new_head(group: dist.ProcessGroup | None, classes: int = D) -> FactoredHead:
    torch.manual_seed(0)
    return FactoredHead(d, classes, group=group).double()


def _train(rank: int, ranks: int, folder: str, steps: int) -> None:
    group = start(rank, ranks, folder)
    transform.MAX_CONDITION, transform.MAX_FRAMES = 20.0, 5
    head = new_head(group)
    gradients = trained(head, range(steps))
    hidden, _, _ = random_batch(rank + 2, d, D, seed=99)  # a batch of another length on every rank
    found = head.topk(hidden, 9, sl.TaylorSoftmaxLoss())
    save_checkpoint(head, f"{folder}/saved-by-{ranks}")
    state = {
        "weight": head.weight,
        "bias": head.bias,
        "Q": head.Q.exact,
        "w": head.w,
        "gradient": gradients[-1],
        "rows": len(head.V),
    }
    torch.save({**state, "topk": found.classes, "hidden": hidden}, f"{folder}/{ranks}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equal_to_one_process_and_loadable_by_any_number(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(transform, "MAX_CONDITION", 20.0)
    monkeypatch.setattr(transform, "MAX_FRAMES", 5)
    steps = {1: 100, 2: 400, 4: 100}[ranks]
    run_ranks(_train, ranks, str(tmp_path), steps)
    alone = new_head(None)
    gradients = trained(alone, range(steps))
    parts = [torch.load(tmp_path / f"{ranks}-{rank}.pt", weights_only=True) for rank in range(ranks)]
    expected = {"weight": alone.weight, "bias": alone.bias, "Q": alone.Q.exact, "w": alone.w}
    for part in parts:
        for name, value in expected.items():
            torch.testing.assert_close(part[name], value, rtol=1e-6, atol=1e-8)
        assert torch.equal(part["topk"], alone.topk(part["hidden"], 9, sl.TaylorSoftmaxLoss()).classes)
    assert [part["rows"] for part in parts] == [len(rows) for rows in torch.arange(D).chunk(ranks)]
    gradient = torch.cat([part["gradient"] for part in parts]) / ranks
    torch.testing.assert_close(gradient, gradients[-1], rtol=1e-6, atol=1e-9)

    loaded = FactoredHead(d, D, init="zero").double()
    load_checkpoint(loaded, tmp_path / f"saved-by-{ranks}")
    torch.testing.assert_close(loaded.weight, alone.weight, rtol=1e-6, atol=1e-8)
    assert loaded.steps == steps
    others = 3 if ranks == 2 else 2
    damaged = shutil.copytree(tmp_path / f"saved-by-{ranks}", tmp_path / f"saved-by-{ranks}-damaged")
    flip_bit(max(damaged.glob("rows-*"), key=lambda path: int(path.name.split("-")[1])), at=-300)
    run_ranks(_reload, others, str(tmp_path), f"saved-by-{ranks}", steps)
    trained(alone, range(steps, steps + 20))
    for rank in range(others):
        continued = torch.load(tmp_path / f"continued-{rank}.pt", weights_only=True)
        torch.testing.assert_close(continued, alone.weight, rtol=1e-6, atol=1e-8)


def _reload(rank: int, ranks: int, folder: str, name: str, steps: int) -> None:
    head = FactoredHead(d, D, init="zero", group=start(rank, ranks, folder)).double()
    with pytest.raises(DamagedFileError, match=r"rows-.*\.pt is damaged"):  # also on the ranks that do not read that file
        load_checkpoint(head, f"{folder}/{name}-damaged")
    load_checkpoint(head, f"{folder}/{name}")
    trained(head, range(steps, steps + 20))
    torch.save(head.weight, f"{folder}/continued-{rank}.pt")
    dist.destroy_process_group()


def _count_bytes(rank: int, ranks: int, folder: str) -> None:
    group = start(rank, ranks, folder)
    sent = []
    for classes in (1_000, 50_000):
        head = FactoredHead(d, classes, init="zero", group=group)
        before = head.shard.sent
        trained(head, range(10), lr=1e-3, classes=1_000)  # the same targets for both
        sent.append(head.shard.sent - before)
    if rank == 0:
        torch.save(sent, f"{folder}/sent.pt")
    dist.destroy_process_group()


def test_a_step_exchanges_nothing_that_grows_with_the_classes(tmp_path):
    run_ranks(_count_bytes, 2, str(tmp_path))
    small, large = torch.load(tmp_path / "sent.pt", weights_only=True)
    assert small == large > 0
    width = 8  # columns: d, the bias, and one empty
    assert small <= 10 * 4 * (4 * (N // 2) * width + 20 * N)  # W_c of all, H, Y and P of its own; some numbers an example


def _dies(rank: int, ranks: int, folder: str) -> None:
    head = new_head(start(rank, ranks, folder, timeout=10))
    trained(head, range(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        trained(head, range(3, 6))
    except ConnectionError as error:
        Path(folder, "message").write_text(f"{time.monotonic() - began} {error}")
    os._exit(0)  # without the shutdown of the broken group


def test_a_rank_that_dies_stops_the_others_with_a_message(tmp_path):
    both = [processes.start(_dies, rank, 2, str(tmp_path)) for rank in range(2)]
    assert [processes.exit_code(process) for process in both] == [0, -signal.SIGKILL]
    seconds, message = (tmp_path / "message").read_text().split(" ", 1)
    assert float(seconds) < 60  # gloo notices at once; a silent network would take the timeout of the group
    assert "rank 0 of 2" in message
    assert "start again from the last checkpoint" in message


def _disagree(rank: int, ranks: int, folder: str) -> None:
    """Every difference is an error on both ranks, after which they can still talk to each other."""
    group, loss = start(rank, ranks, folder, timeout=20), sl.TaylorSoftmaxLoss()
    mine = [(d, D, True), (d, D - 1, True)][rank]
    with pytest.raises(ValueError, match=r"ranks do not agree \(rank 0: D=41, .*; rank 1: D=40, .*all must"):
        FactoredHead(*mine, group=group)
    mine = [(d, D, True), (d - 1, D, True)][rank]
    with pytest.raises(ValueError, match=r"in_features=6, .* in_features=5, "):
        FactoredHead(*mine, init="zero", group=group)
    mine = [(d, D, True), (d, D, False)][rank]
    with pytest.raises(ValueError, match=r"bias=True, .* bias=False, "):
        FactoredHead(*mine, group=group)

    head, H = new_head(group), torch.rand(4, d, dtype=torch.float64)
    targets = torch.tensor([[[0], [1], [2], [3]], [[0, 4], [1, 5], [2, 6], [3, 7]]][rank])
    loss(head(H, targets, torch.ones(targets.shape))).backward()
    with pytest.raises(ValueError, match=r"int64\[0, 1\] .*int64\[0, 2\] "):
        FactoredSGD(head, lr=1.0).step()
    for options in ({"lr": 1.0 + rank}, {"lr": 1.0, "weight_decay": 0.1 * rank}):
        head = new_head(group)
        loss(head(H, targets[:, 0])).backward()
        before = head.V.clone()
        with pytest.raises(ValueError, match=r"lr=1.0, .*rank 1: .*lr=[12].0"):
            FactoredSGD(head, **options).step()
        assert torch.equal(head.V, before)

    with pytest.raises(ValueError, match=r"init=he, .* init=zero, "):
        FactoredHead(d, D, init=["he", "zero"][rank], group=group)
    with pytest.raises(ValueError, match=r"k=2, .* k=3, "):
        new_head(group).topk(H, 2 + rank, loss)
    counts = torch.arange(1.0, D + 1)
    with pytest.raises(ValueError, match=r"order=.*; rank 1: .*order="):  # of the classes
        TieredHead(d, D, cuts=(10,), frequencies=[counts, counts.flip(0)][rank], group=group)

    weights = [torch.arange(1.0, D + 1), torch.arange(D, 0.0, -1)]
    for pattern, different in {
        "loss=.*TaylorSoftmaxLoss.*; rank 1: .*loss=.*SphericalSoftmaxLoss": [loss, sl.SphericalSoftmaxLoss(0.1)],
        "eps=0.1.*; rank 1: .*eps=0.2": [sl.SphericalSoftmaxLoss(0.1), sl.SphericalSoftmaxLoss(0.2)],
        "weight=.*; rank 1: .*weight=": [sl.TaylorSoftmaxLoss(weight=weight) for weight in weights],
    }.items():
        head = new_head(group)
        optimizer, before = FactoredSGD(head, lr=1.0), head.V.clone()
        different[rank](head(H, targets[:, 0])).backward()
        with pytest.raises(ValueError, match=pattern):
            optimizer.step()
        assert torch.equal(head.V, before)
        optimizer.zero_grad()
        different[0](head(H, targets[:, 0])).backward()  # the same on both
        optimizer.step()

    head = FactoredHead(d, D, group=group)
    with pytest.raises(ValueError, match=r"refactoring=torch.float64.*rows=torch.float32"):  # one converts it, the other trains
        head.double() if rank == 0 else head(H, targets[:, 0])
    torch.testing.assert_close(new_head(group).weight.shape, (D, d))
    dist.destroy_process_group()


def test_a_second_job_in_a_folder_is_told(tmp_path):
    start(0, 1, str(tmp_path))
    try:
        with only_job(tmp_path / "folder"):
            with pytest.raises(BlockingIOError, match=r"another job works in .*folder"), only_job(tmp_path / "folder"):
                pytest.fail("two jobs in one folder")
            with only_job(tmp_path / "other folder"):
                pass
        with only_job(tmp_path / "folder"):  # the first one has ended
            pass
    finally:
        dist.destroy_process_group()


def test_ranks_that_differ_are_told_at_once(tmp_path):
    run_ranks(_disagree, 2, str(tmp_path))


def _one_finds_infinity(rank: int, ranks: int, folder: str) -> None:
    """A batch of one rank overflows: both skip the step, and halve the scale."""
    head = FactoredHead(d, D, group=start(rank, ranks, folder, timeout=20))
    optimizer, scaler = FactoredSGD(head, lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, weights = [], [head.weight]
    for step in range(4):
        H, target, _ = random_batch(8, d, D, seed=2 * step + rank)
        optimizer.zero_grad()
        factor = math.inf if step == 1 and rank == 1 else 1.0
        scaler.scale(factor * sl.TaylorSoftmaxLoss()(head(H.float(), target))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(head.weight)
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    assert [torch.equal(before, after) for before, after in pairwise(weights)] == [False, True, False, False]
    dist.destroy_process_group()


def test_grad_scalers_of_all_ranks_skip_together(tmp_path):
    both = [processes.start(_one_finds_infinity, rank, 2, str(tmp_path)) for rank in range(2)]
    assert [processes.exit_code(process, timeout=60) for process in both] == [0, 0]


def test_two_classes_at_a_large_rate(tmp_path):
    """Over processes there is no dense step: Q and w are computed again where a step would amplify their errors."""
    start(0, 1, str(tmp_path))
    try:
        for seed in range(5):
            torch.manual_seed(seed)
            head, m = FactoredHead(16, 2, group=dist.group.WORLD), torch.randn(2, 16)
            reference, optimizer = DenseReference(head.weight, head.bias), FactoredSGD(head, lr=3.0)
            for _ in range(60):
                target = torch.randint(2, (64,))
                hidden = (0.5 * m[target] + torch.randn(64, 16)).relu()
                optimizer.zero_grad()
                sl.TaylorSoftmaxLoss()(head(hidden, target)).backward()
                optimizer.step()
                reference.step(reference.gradients(CASES["taylor"].oracle, hidden, target)[2], lr=3.0)
            torch.testing.assert_close(head.weight.double(), reference.W, rtol=0.01, atol=0.01 * float(reference.W.abs().max()))
    finally:
        dist.destroy_process_group()


def test_a_sharded_head_has_no_logits(tmp_path):
    start(0, 1, str(tmp_path))
    try:
        head = FactoredHead(d, D, group=dist.group.WORLD)
        with pytest.raises(ValueError, match="use topk"):
            head.logits(torch.randn(2, d))
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            load_checkpoint(head, tmp_path / "nothing")
    finally:
        dist.destroy_process_group()
