"""Matrix products as fast as the processor allows.

torch computes float32 products with MKL, which uses AVX-512 on processors of Intel only. On an EPYC (Zen 5) with two cores, a
product of 2,048 x 2,048 reaches 230 GFLOP/s with it and 500 with oneDNN, which torch has for its convolutions; one of
304 x 304 takes 250 and 126 us.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spherical_loss.heads.base import in_graph
from spherical_loss.quadratic import transformed

PLAIN = (Tensor, nn.Parameter)  # other kinds of tensors do not know the products of oneDNN
SMALL = 2**18  # multiplications, below which the call takes longer than the product


def product(X: Tensor, Y: Tensor, plus: Tensor | None = None) -> Tensor:
    """``X @ Y`` of two matrices, or ``X @ Y + plus``, without a pass over memory for the sum. No gradient flows through it: it
    is for autograd functions and optimizers.

    >>> X, Y, M = torch.randn(100, 64), torch.randn(64, 50), torch.randn(100, 50)
    >>> torch.allclose(product(X, Y), X @ Y, atol=1e-5), torch.allclose(product(X, Y, plus=M), X @ Y + M, atol=1e-5)
    (True, True)
    """
    tensors = (X, Y) if plus is None else (X, Y, plus)
    if not _is_for_onednn(*tensors, multiplications=X.numel() * Y.shape[1]):
        return X @ Y if plus is None else torch.addmm(plus, X, Y)
    if not Y.is_contiguous() and not Y.T.is_contiguous():
        Y = Y.contiguous()  # for other strides oneDNN has plain loops, which take a thousand times longer
    onednn = torch.ops.mkldnn._linear_pointwise
    return onednn.default(X, Y.T, None, "none", [], "") if plus is None else onednn.binary(X, plus, Y.T, None, "add")


def linear(H: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear``, with the products of forward and backward pass by :func:`product`.

    >>> H, W = torch.randn(100, 64), torch.randn(50, 64)
    >>> torch.allclose(linear(H, W, None), H @ W.T, atol=1e-5)
    True
    """
    suits = _is_for_onednn(H, W, W if b is None else b, multiplications=H.numel() * W.shape[0])
    if not suits or torch.is_autocast_enabled("cpu") or transformed(H) or transformed(W):
        return F.linear(H, W, b)
    o: Tensor = _Linear.apply(H.reshape(-1, H.shape[-1]), W)
    if b is not None:
        o.add_(b)  # in place: at 250 x 115,517 outputs a second tensor would take 8% of a step of softmax
    return o.reshape(*H.shape[:-1], W.shape[0])


class _Linear(torch.autograd.Function):
    """``H W^T``"""

    @staticmethod
    def forward(ctx: Any, H: Tensor, W: Tensor) -> Tensor:
        ctx.save_for_backward(H, W)
        return product(H, W.T)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, Tensor | None]:
        H, W = ctx.saved_tensors
        times = torch.matmul if torch.is_grad_enabled() else product  # the one has a gradient itself
        return (
            times(grad_o, W) if ctx.needs_input_grad[0] else None,
            times(grad_o.T, H) if ctx.needs_input_grad[1] else None,
        )


def transposed(X: Tensor) -> Tensor:
    """``X.T``, for several products with matrices like X; oneDNN would copy it for each of them."""
    return X.T.contiguous() if _is_for_onednn(X, multiplications=X.numel() * X.shape[1]) else X.T


def _is_for_onednn(*tensors: Tensor, multiplications: int) -> bool:
    # The graph first: a size that is compared becomes a condition of it, and the compiler warns of a cached function.
    if in_graph() or multiplications < SMALL or not onednn_is_faster() or not torch.backends.mkldnn.enabled:
        return False
    return all(x.is_cpu and x.dtype == torch.float32 and type(x) in PLAIN for x in tensors)


@cache
def onednn_is_faster() -> bool:
    """By the maker of the processor, not by a measurement, which would make the last bits of a training a matter of chance."""
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch cannot tell
    return bool(torch.backends.mkldnn.is_available() and found.get("avx512_f") and "AMD" in str(found.get("cpu_name")))
