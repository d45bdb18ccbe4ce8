"""The optimizer of a factored head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spherical_loss.heads.base import full_precision
from spherical_loss.heads.factored.batch import BatchGradients, gathered, joined
from spherical_loss.heads.factored.head import FactoredHead
from spherical_loss.heads.factored.keeper import GradientKeeper
from spherical_loss.heads.factored.statistics import Reader
from spherical_loss.heads.factored.step import clipping, head_steps

NO_GRADIENT = (
    "{} found no gradient: call loss(head(hidden, target)).backward() after the last zero_grad() or step(), with the head in "
    "train() mode"
)

REMEDIES = {  # by the class of what was given instead of the right head
    "FactoredHead": "use FactoredSGD",
    "TieredHead": "use TieredSGD",
    "AdaptiveSphericalSoftmax": "give it layer.tail, or make an optimizer for each of layer.tails",
}


def wrong_head(what: str, given: object) -> TypeError:
    remedies = [REMEDIES[kind.__name__] for kind in type(given).__mro__ if kind.__name__ in REMEDIES]
    return TypeError(f"{what}, not {type(given).__name__}; {(*remedies, 'use torch.optim for ordinary parameters')[0]}")


class HeadSGD(torch.optim.Optimizer):
    """What the optimizers of one head share: they keep the head in copies, and take no other parameters."""

    head: Any

    def __init__(self, head: GradientKeeper, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.head = head
        head.has_optimizer = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.head.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "head"):  # the constructor of torch adds the groups of the head, before there is a head
            raise ValueError(
                f"{type(self).__name__} trains its head alone, and would leave other parameters as they are; give them to an "
                "optimizer of torch.optim"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "head": self.head}  # torch's version leaves out our attributes


class FactoredSGD(HeadSGD):
    """Plain SGD for a :class:`FactoredHead`, exactly as dense SGD would do it, in O(N d^2).

    Use it beside the optimizer of the trunk: ``zero_grad()``, ``backward()`` (several, to accumulate gradients), ``step()``;
    learning-rate schedulers, ``torch.amp.GradScaler`` and ``state_dict`` work as usual.

    Args:
        head: the head whose weights are trained.
        lr: learning rate. A good one is not comparable between losses, and grows with D; search over several decades.
        weight_decay: as in ``torch.optim.SGD``, for weights and bias.
        max_grad_norm: scale the gradient of this head down to this norm, as ``clip_grad_norm_`` does.
    """

    def __init__(self, head: FactoredHead, lr: float, weight_decay: float = 0.0, max_grad_norm: float | None = None) -> None:
        if not isinstance(head, FactoredHead):
            raise wrong_head("FactoredSGD trains a FactoredHead", head)
        check_options(lr, weight_decay, max_grad_norm)
        # The head has no parameters: the step finds its tensors in the head, also after head.to(...), which makes new ones.
        options = {"lr": lr, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(head, [{"params": [head.factor]}], options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.head.forget()  # all there is: torch's own would look for gradients of parameters

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the dense gradient of weights and bias, exactly: for clipping together with the trunk's."""
        with full_precision(self.head.V.device):
            (step,) = head_steps(self.head.spans, self._batch())
            return step.squared_norm.sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        group = self.param_groups[0]
        lr, decay = float(group["lr"]), remaining(float(group["lr"]), group["weight_decay"])
        with full_precision(self.head.V.device):
            (step,) = head_steps(self.head.spans, self._batch())
            step.prepare(lr * clipping([step], group["max_grad_norm"]), decay)
            step.write()
        self.head.forget()
        return value

    def _batch(self) -> BatchGradients:
        if (batch := pending(self.head)) is None:
            raise RuntimeError(NO_GRADIENT.format("FactoredSGD"))
        options = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        return gathered(batch, self.head.shard, **options, loss=self.head.met())


def pending(reader: Reader) -> BatchGradients | None:
    """The backward passes since the last step, as one; those of weights that were replaced since count for nothing."""
    batches = [batch for batch in reader.gradients if batch.version == reader.version]
    if not batches:
        return None
    batch, factor = joined(batches), reader.remaining_factor()
    return batch if factor == 1 else batch.times(factor)


def check_options(lr: float, weight_decay: float, max_grad_norm: float | None) -> None:
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr is {lr}, but must be finite and not negative")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is {weight_decay}, but must be finite and not negative")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}, but must be positive, or None for no clipping")


def remaining(lr: float, weight_decay: float) -> float:
    """``1 - lr weight_decay``: what weight decay leaves of the weights."""
    if lr * weight_decay >= 1:
        raise ValueError(f"lr * weight_decay is {lr * weight_decay}, but must be below 1: the weights would vanish or flip")
    return 1 - lr * weight_decay
