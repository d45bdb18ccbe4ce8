"""The memory of gradients: used again when it is free, and never while anybody has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import spherical_loss as sl
from spherical_loss import reuse
from spherical_loss.reuse import room_like
from tests.support import oracle

N, D = 300, 500  # not a small batch, whose gradient is computed in another way

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda room: room,
    "view": lambda room: room[1:2, 0],
    "detached": lambda room: room.detach(),
    "array": lambda room: room.numpy(),
    "dlpack": lambda room: torch.from_dlpack(room),
    "storage": lambda room: room.untyped_storage(),
    "gradient": lambda room: torch.zeros(N, D, requires_grad=True),
}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_kept", [])


def address() -> int:
    return room_like(torch.empty(N, D)).data_ptr()


def test_free_memory_is_used_again() -> None:
    first = address()
    assert [address() for _ in range(3)] == [first] * 3


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_has_is_not_used(holder: str) -> None:
    room = room_like(torch.empty(N, D)).fill_(7)
    kept = HOLDERS[holder](room)
    if holder == "gradient":
        kept.grad = room
    first = room.data_ptr()
    del room
    assert address() != first
    assert address() != first


def test_memory_of_another_size_or_dtype_is_not_used() -> None:
    first = room_like(torch.empty(N, D))
    assert room_like(torch.empty(D, 2 * N)).shape == (D, 2 * N)
    assert room_like(torch.empty(N, D, dtype=torch.float64)).dtype == torch.float64
    assert len(reuse._kept) == 1
    assert first.shape == (N, D)


def test_memory_that_another_process_may_read_is_not_used() -> None:
    room = room_like(torch.empty(N, D)).share_memory_()
    first = room.data_ptr()
    del room
    assert address() != first


def test_large_memory_is_not_kept() -> None:
    room_like(torch.empty(reuse.LARGEST // 4 + 1))
    assert reuse._kept == []


def test_without_the_count_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not part of torch's public interface."""
    monkeypatch.setattr(reuse, "_use_count", None)
    assert room_like(torch.empty(N, D)).shape == (N, D)
    assert reuse._kept == []


def exact_loss(o: Tensor, target: Tensor) -> Tensor:
    return oracle.quadratic(1, 1, 0.5)(o).gather(1, target.unsqueeze(1)).mean()


def gradient(seed: int) -> tuple[Tensor, Tensor]:
    """The gradient of a batch, and the dense one in float64."""
    generator = torch.Generator().manual_seed(seed)
    o, target = torch.randn(N, D, generator=generator, requires_grad=True), torch.randint(D, (N,), generator=generator)
    sl.TaylorSoftmaxLoss()(o, target).backward()
    exact = o.detach().double().requires_grad_()
    exact_loss(exact, target).backward()
    assert o.grad is not None
    assert exact.grad is not None
    return o.grad, exact.grad


def test_gradients_that_are_kept_stay_as_they_are() -> None:
    found = [gradient(seed) for seed in range(5)]
    for grad, exact in found:
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-9)


def test_gradients_of_several_losses_at_once() -> None:
    o, target = torch.randn(N, D, requires_grad=True), torch.arange(N)
    loss = sl.TaylorSoftmaxLoss()
    (loss(o, target) + loss(2 * o, target)).backward()
    exact = o.detach().double().requires_grad_()
    (exact_loss(exact, target) + exact_loss(2 * exact, target)).backward()
    assert o.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(o.grad.double(), exact.grad, rtol=1e-4, atol=1e-9)


def test_threads_have_memory_of_their_own() -> None:
    wrong: list[int] = []

    def train(first: int) -> None:
        for seed in range(first, first + 20):
            grad, exact = gradient(seed)
            if not torch.allclose(grad.double(), exact, rtol=1e-4, atol=1e-9):
                wrong.append(seed)

    threads = [threading.Thread(target=train, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
