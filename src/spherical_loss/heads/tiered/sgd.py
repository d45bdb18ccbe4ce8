"""The optimizer of a tiered head: SGD with a learning rate for each tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spherical_loss.heads.base import full_precision
from spherical_loss.heads.dense import ParameterHead
from spherical_loss.heads.factored.batch import gathered
from spherical_loss.heads.factored.sgd import NO_GRADIENT, HeadSGD, check_options, pending, remaining, wrong_head
from spherical_loss.heads.factored.step import HeadStep, SmallHeadStep, clipping, head_steps
from spherical_loss.heads.tiered.head import TieredHead

POWER = 0.5  # how the rate of a tier grows with its frequency


class TieredSGD(HeadSGD):
    """Plain SGD for a :class:`TieredHead`, exactly as dense SGD with a rate per row would do it, in O(T N d^2) for T tiers.

    The rate of a tier is ``lr (p_tier / p_min)^power``, with the mean frequency of its classes and that of the rarest tier: so
    ``lr`` is the rate of the rarest classes, like that of ``FactoredSGD``. ``param_groups`` has one group for each tier, the
    most frequent first, with its rate, so learning-rate schedulers work as usual; so do ``zero_grad()``, several
    ``backward()`` to accumulate gradients, ``step()`` and ``state_dict``. It trains tiers of all kinds.

    If anything is not finite, ``step()`` raises a ``FloatingPointError`` and no tier has changed.

    Args:
        head: the head whose weights are trained.
        lr: the learning rate of the rarest tier; search over several decades.
        power: how the rate grows with the frequency; 0 is one rate for all. One half was best in short trainings; with three
            tiers and normalized hidden vectors, 0.35 was in longer ones.
        weight_decay: as in ``torch.optim.SGD``, for weights and bias; multiplied by the rate of the tier.
        max_grad_norm: scale the gradient of all tiers together down to this norm, as ``clip_grad_norm_`` does.

    >>> import torch
    >>> from spherical_loss import TieredHead
    >>> head = TieredHead.by_frequency(8, torch.tensor([1.0] * 900 + [100.0] * 100), cuts=(100,))
    >>> [group["lr"] for group in TieredSGD(head, lr=2.0).param_groups]
    [20.0, 2.0]
    """

    def __init__(
        self,
        head: TieredHead,
        lr: float,
        power: float = POWER,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> None:
        if not isinstance(head, TieredHead):
            raise wrong_head("TieredSGD trains a TieredHead", head)
        check_options(lr, weight_decay, max_grad_norm)
        if not 0 <= power < math.inf:
            raise ValueError(f"power is {power}, but must be finite and not negative: frequent classes have the larger rate")
        # Factored tiers have no parameters: the step finds their tensors in the head.
        factors = iter([head.factor, *(head.factor.new_empty(0) for _ in head.spans)])
        groups = [
            {"params": list(tier.parameters()) or [next(factors)], "lr": lr * factor}
            for (tier, _, _), factor in zip(head.ranges, head.tier_factors(power), strict=True)
        ]
        super().__init__(head, groups, {"lr": lr, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the dense gradient of weights and bias of all tiers, exactly: for clipping together with the trunk's."""
        with full_precision(self.head.order.device):
            steps = self._steps()
            return torch.stack([step.squared_norm for step in steps]).sum().sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with full_precision(self.head.order.device):
            steps, groups = self._steps(), self.param_groups
            clip = clipping(steps, groups[0]["max_grad_norm"])
            rates = [float(group["lr"]) for group in groups]
            decays = [remaining(lr, group["weight_decay"]) for lr, group in zip(rates, groups, strict=True)]
            for step, lr, decay in zip(steps, rates, decays, strict=True):
                step.prepare(clip * lr, decay)
            for step in steps:
                step.write()
        self.head.forget()
        return value

    def _steps(self) -> list[HeadStep | SmallHeadStep | _ParameterStep]:
        """The step of each tier, in their order."""
        batch, spans = pending(self.head), self.head.spans
        if spans and batch is None:
            raise RuntimeError(NO_GRADIENT.format("TieredSGD"))
        options = {name: [g[name] for g in self.param_groups] for name in ("lr", "weight_decay", "max_grad_norm")}
        options["loss"] = self.head.met()
        factored = iter(head_steps(spans, gathered(batch, self.head.shard, **options)) if batch is not None else [])
        return [
            _ParameterStep(tier, self.head) if isinstance(tier, ParameterHead) else next(factored)
            for tier, _, _ in self.head.ranges
        ]


class _ParameterStep:
    """The step of a tier with ordinary parameters: plain SGD on their gradients."""

    def __init__(self, tier: ParameterHead, head: TieredHead) -> None:
        self.tier, self.parameters, self.gradients = tier, list(tier.parameters()), []
        for p in self.parameters:
            if p.grad is None:
                raise RuntimeError(NO_GRADIENT.format("TieredSGD"))
            self.gradients.append(p.grad if head.shard.group is None else head.shard.sum_(p.grad / head.shard.ranks))
        self.rate, self.decay = 0.0, 1.0

    @property
    def squared_norm(self) -> Tensor:
        return torch.stack([g.to(torch.float64).square().sum() for g in self.gradients]).sum()

    def prepare(self, rate: float, decay: float) -> None:
        self.rate, self.decay = rate, decay
        for p, g in zip(self.parameters, self.gradients, strict=True):
            if not rate * float(torch.linalg.vector_norm(g)) < torch.finfo(p.dtype).max:
                raise FloatingPointError(
                    f"NaN or infinity in the gradient of a tier of {self.tier.num_classes} classes: the head is unchanged; "
                    "call zero_grad() and skip this batch, or lower the learning rate"
                )

    def write(self) -> None:
        for p, g in zip(self.parameters, self.gradients, strict=True):
            p.mul_(self.decay).sub_(g, alpha=self.rate)
