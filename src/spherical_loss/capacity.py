"""How many classes a member of the family can be certain of: a bound that the hidden size d sets, whatever the trunk.

Every likelihood of the family has a numerator ``a3 (o + m)^2 + r`` with ``m = a2 / (2 a3)`` and ``r > 0`` (Taylor softmax:
m = 1; spherical softmax: m = 0). With ``v_c = [w_c, b_c + m]``, ``x = [h, 1]`` and ``Q = sum_c v_c v_c^T``,

    p(c | h) = ((v_c . x)^2 + r') / (x^T Q x + D r'),      r' = r / a3.

By the Cauchy-Schwarz inequality ``(v_c . x)^2 <= l_c x^T Q x``, where ``l_c = v_c^T Q^+ v_c`` is the *leverage* of the class,
and a mediant is at most the larger of its parts: ``p(c | h) <= max(l_c, 1 / D)`` for every h. Leverages sum to the rank of Q,
at most d + 1, so

    sum_c max_h p(c | h) <= d + 2.

The softmax has no such bound for d >= 2. Few classes (D <= d) are never limited; among many, about d can become certain.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leverages(weight: Tensor, bias: Tensor | None = None, shift: float = 1.0) -> Tensor:
    """The leverage of every class, (D,), in float64: each between 0 and 1, and together at most d + 1.

    Args:
        weight: (D, d).
        bias: (D,), or None for a layer without one.
        shift: m of the loss: 1 for the Taylor softmax, 0 for the spherical softmax, ``a2 / (2 a3)`` for a quadratic.

    >>> leverages(torch.eye(3), shift=0.0)
    tensor([1., 1., 1.], dtype=torch.float64)
    >>> leverages(torch.ones(4, 2), shift=0.0)
    tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(f"weight has shape {tuple(weight.shape)} and bias {shape}, but they must be (D, d) and (D,)")
    last = weight.new_zeros(len(weight)) if bias is None else bias
    V = torch.cat([weight.double(), last.double().unsqueeze(1) + shift], 1)
    return torch.einsum("ci,ij,cj->c", V, torch.linalg.pinv(V.T @ V, hermitian=True), V)


def best_perplexity(frequencies: Tensor, d: int) -> float:
    """The lowest perplexity that any trunk of hidden size d can reach with a member of the family, on a corpus whose classes
    occur with these frequencies, (D,).

    If class c is as probable as the bound allows whenever it is the target, the perplexity is ``exp(-sum_c f_c log l_c)``.
    Its minimum over ``l_c <= 1``, ``sum_c l_c <= d + 2`` is at ``l_c = min(1, t f_c)``, with t such that the sum is reached.

    >>> best_perplexity(torch.ones(100), d=98)
    1.0
    >>> round(best_perplexity(torch.ones(1000), d=98), 3)
    10.0
    """
    if frequencies.dim() != 1 or not bool((frequencies >= 0).all()) or not float(frequencies.sum()) > 0:
        raise ValueError(f"frequencies of shape {tuple(frequencies.shape)} must be (D,), not negative, and not all zero")
    if d < 1:
        raise ValueError(f"d is {d}, but must be at least 1")
    f = frequencies.double()
    f = (f / f.sum()).sort(descending=True).values
    f = f[f > 0]
    if len(f) <= d + 2:
        return 1.0
    # With the n most frequent classes at l = 1, the others share what is left: t = (d + 2 - n) / (sum of the others' f).
    n = torch.arange(d + 2, device=f.device)
    t = (d + 2 - n) / f.flip(0).cumsum(0).flip(0)[: d + 2]
    first = int((t * f[: d + 2] <= 1).nonzero()[0])
    rest = f[first:]
    return float((-(rest * (t[first] * rest).log()).sum()).exp())
