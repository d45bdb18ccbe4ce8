"""Whether V, U, w0 and Q of a factored head belong to the same weights: averages of several heads' buffers do not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from spherical_loss.heads.factored.head import FactoredHead

TOLERANCE = 1e-3  # of ||W z||^2: thousands of float32 steps are within 1e-4; averages of weights that differ by 10% are not
REMEDY = (
    "W = V U + 1 w0^T is no average of averages: average the trunk alone, and the head with head.average_into(linear, share)"
)


@torch.no_grad()
def check_parts(head: FactoredHead) -> None:
    """Raise a ``ValueError`` unless ``||W z||^2 = z^T Q z`` for a vector z: O(D d), since U is applied to z."""
    if head.V.is_meta or head.is_small or head.shard.group is not None:
        return  # of a small head V is W, and its average is right
    found = 0.0
    z = torch.arange(1, head.V.shape[1] + 1, dtype=head.w.dtype, device=head.w.device).sin()
    Uz = head.U.matrix.to(z.dtype) @ z
    by_frame = torch.cat([head.U.past.to(z.dtype) @ Uz, Uz.unsqueeze(0)])
    for rows in head.row_chunks():
        Wz = (head.V[rows].to(z.dtype) * by_frame[head.row_frames[rows].long()]).sum(1) + head.w0 @ z
        found += float(Wz.square().sum())
    expected = float(z @ head.Q.exact @ z)
    if abs(found - expected) > TOLERANCE * (found + abs(expected)):
        head.written.fill_(math.nan)  # nothing reads it like this
        raise ValueError(
            f"the parts of this state do not belong together (||W z||^2 is {found:.4g}, but z^T Q z is {expected:.4g}), as in "
            f"an average of several states. {REMEDY}"
        )
