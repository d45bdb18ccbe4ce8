"""What is left by backward passes until an optimizer takes its step: for heads whose weights are not parameters."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from spherical_loss.base import Loss
from spherical_loss.heads.base import Head, summed
from spherical_loss.heads.factored.batch import BatchGradients
from spherical_loss.heads.factored.shard import Shard
from spherical_loss.statistics import Statistics

WITHOUT_OPTIMIZER = 16  # backward passes that are kept for an optimizer that may still be made
WITHOUT_STEP = 1_000  # backward passes since the last step after which a warning says so


class GradientKeeper(Head):
    """A head that keeps the gradients of its backward passes for its own optimizer."""

    shard: Shard

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gradients: list[BatchGradients] = []  # of the backward passes since the last step
        self.losses: set[str] = set()  # of a sharded head, since the ranks last compared them
        self.has_optimizer = self.has_warned = False
        # Its .grad is what the gradients are still to be multiplied by: 1, and NaN where they are not finite. GradScaler finds
        # it among the parameters of the optimizer, and divides it by its scale.
        self.factor = torch.zeros(1)

    def of_classes(self, H: Tensor, classes: Tensor) -> Statistics:
        found = super().of_classes(H, classes)
        compares = self.shard.group is not None and self.training and torch.is_grad_enabled()
        return found._replace(head=self) if compares else found

    def meet(self, loss: Loss) -> None:
        """The loss of a forward pass: the ranks compare it when they take the step."""
        self.losses.add(loss.described())

    def met(self) -> list[str]:
        """The losses since this was last asked."""
        losses, self.losses = sorted(self.losses), set()
        return losses

    def keep(self, batch: BatchGradients) -> None:
        """Keep the gradients of a backward pass."""
        self.gradients.append(batch)
        finite = 1 + 0 * summed([part.grad_H.sum() for part in batch.heads]).reshape(1)
        if self.shard.group is not None:  # GradScaler skips a step in this process alone: all must find the same
            finite += 0 if self.shard.everywhere(bool(finite.isfinite()), finite, backward=True) else math.nan
        if self.factor.device != finite.device or self.factor.dtype != finite.dtype:
            self.factor.grad = None
            torch.utils.swap_tensors(self.factor, torch.zeros_like(finite))  # the optimizer has this tensor, too
        self.factor.grad = finite if self.factor.grad is None else self.factor.grad * finite
        if not self.has_optimizer and len(self.gradients) > WITHOUT_OPTIMIZER:
            del self.gradients[0]
            self._warn("has no optimizer, so it does not learn, and the gradients of older batches are dropped")
        elif len(self.gradients) == WITHOUT_STEP:
            self._warn(f"keeps the gradients of {WITHOUT_STEP} batches: its optimizer takes no step")

    def forget(self) -> None:
        """Forget the gradients: they were used, or are no longer wanted."""
        self.gradients.clear()
        self.factor.grad = None

    def remaining_factor(self) -> float:
        """What the gradients are to be multiplied by: 1 unless a GradScaler has divided it by its scale."""
        factor = 1.0 if self.factor.grad is None else float(self.factor.grad)
        return factor if math.isfinite(factor) else 1.0  # the step says what is not finite

    def average_into(self, average: nn.Linear, share: float) -> None:
        if self.shard.group is not None:
            raise ValueError(
                f"a sharded head has {len(self.shard)} of its {self.num_classes} rows on this rank: save_checkpoint, and "
                "average the head that one process loads"
            )
        super().average_into(average, share)

    def _warn(self, what: str) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        name = type(self).__name__
        optimizer = name.replace("Head", "SGD")
        warnings.warn(
            f"a {name} of {self.num_classes} classes {what}. Its weights are no parameters: train it with "
            f"{optimizer}(head, lr), with zero_grad() and step() for every batch; or use head.eval()",
            stacklevel=3,
        )
