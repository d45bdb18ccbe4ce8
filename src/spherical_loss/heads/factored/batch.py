"""What backward passes leave for the step: the gradient of W in parts, never the D x d matrix itself.

The gradient of a batch with hidden vectors H, targets c and slopes g_s, g_q, g_c of the loss is

    grad_W = W A + 1 a^T + Delta,      A = 2 H^T diag(g_q) H,    a = H^T g_s,    Delta = g_c h^T in the target rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from spherical_loss.heads.factored.shard import Shard


@dataclass
class HeadGradients:
    """The part of one head; d counts the column of the bias."""

    grad_H: Tensor  # noqa: N815
    """(N, d) ``g_s w + 2 g_q Q h + P``: the gradient of the hidden vectors through this head."""
    P: Tensor
    """(N, d) ``sum_k g_c W_c``: its part through the targets among this head's classes."""
    grad_O: Tensor | None = None  # noqa: N815
    """(N, D) ``g_s + 2 g_q o``: the gradient of the outputs of a small head, without g_c."""
    current_rows: Tensor | None = None
    """The rows of V of those targets, as the forward pass read them, where that was in this process."""
    frame: int = -1
    """The frame they were read in."""


@dataclass
class BatchGradients:
    """N examples with K targets each; what all heads that saw the batch have in common, and the part of each."""

    H: Tensor
    """(N, d) hidden vectors, extended by a one for the bias."""
    q: Tensor
    """(N,)"""
    g_s: Tensor
    """(N,)"""
    g_q: Tensor
    """(N,)"""
    g_c: Tensor
    """(N, K)"""
    targets: Tensor
    """(N, K)"""
    classes: Tensor
    """(n,) the classes that occur, sorted."""
    positions: Tensor
    """(N, K) the position of each target among them."""
    heads: list[HeadGradients]
    version: int
    """That of the weights."""

    def times(self, factor: float) -> BatchGradients:
        """The gradients of ``factor`` times the loss."""
        heads = [
            replace(h, grad_H=h.grad_H * factor, P=h.P * factor, grad_O=None if h.grad_O is None else h.grad_O * factor)
            for h in self.heads
        ]
        return replace(self, g_s=self.g_s * factor, g_q=self.g_q * factor, g_c=self.g_c * factor, heads=heads)

    @property
    def negative_q(self) -> Tensor:
        """(N,) whether the loss depends on a q that is negative: on digits that float32 has lost."""
        return (self.q < 0) & (self.g_q != 0)


def joined(batches: list[BatchGradients]) -> BatchGradients:
    """Several backward passes as one; a missing target is any class, with gradient 0."""
    if len(batches) == 1:
        return batches[0]
    targets, g_c = _stacked([b.targets for b in batches]), _stacked([b.g_c for b in batches])
    classes, positions = targets.unique(return_inverse=True)
    H, q, g_s, g_q = (torch.cat(parts) for parts in zip(*((b.H, b.q, b.g_s, b.g_q) for b in batches), strict=True))
    parts = zip(*(b.heads for b in batches), strict=True)
    heads = [_joined_heads(part) for part in parts]
    return BatchGradients(H, q, g_s, g_q, g_c, targets, classes, positions, heads, batches[0].version)


def _stacked(parts: list[Tensor]) -> Tensor:
    """(N, K) of all batches, with the largest K of them; zeros are added."""
    K = max(x.shape[1] for x in parts)
    return torch.cat([x if x.shape[1] == K else pad(x, (0, K - x.shape[1])) for x in parts])


def _joined_heads(parts: tuple[HeadGradients, ...]) -> HeadGradients:
    outputs = [p.grad_O for p in parts if p.grad_O is not None]
    grad_O = torch.cat(outputs) if outputs else None
    return HeadGradients(torch.cat([p.grad_H for p in parts]), torch.cat([p.P for p in parts]), grad_O)


def gathered(batch: BatchGradients, shard: Shard, **options: object) -> BatchGradients:
    """The backward passes of all ranks as one, that of the mean of their losses; their floats travel as one tensor. The
    ``options`` of the step must be the same on all ranks."""
    if shard.group is None:
        return batch
    per_head = [x for head in batch.heads for x in (head.grad_H, head.P)]
    floats = [batch.H, batch.q.unsqueeze(1), batch.g_s.unsqueeze(1), batch.g_q.unsqueeze(1), batch.g_c, *per_head]
    targets, packed = map(torch.cat, shard.gather(batch.targets, torch.cat(floats, 1), **options))
    H, q, *gradients = packed.split([x.shape[1] for x in floats], 1)
    g_s, g_q, g_c, *per_head = (g / shard.ranks for g in gradients)
    classes, positions = targets.unique(return_inverse=True)
    heads = [HeadGradients(grad_H, P) for grad_H, P in zip(per_head[::2], per_head[1::2], strict=True)]
    per_example = q.squeeze(1), g_s.squeeze(1), g_q.squeeze(1)
    return BatchGradients(H.contiguous(), *per_example, g_c, targets, classes, positions, heads, batch.version)
