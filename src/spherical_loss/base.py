"""What every loss shares: the contract of ``torch.nn.CrossEntropyLoss``, and how one formula fulfils it.

:class:`Loss` is the public interface. :class:`SphericalLoss` derives all of it from a single method, ``formula(s, q, o_c, D)``.
Both are abstract; the losses themselves are in :mod:`spherical_loss.losses`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from spherical_loss import _logits
from spherical_loss.statistics import Statistics, statistics_dtype, widened

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

DEFAULTS = {"overwrite_logits": False, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
NO_TARGET = "logits need a target: loss(logits, target); only Statistics from a head carry their own"


class LossOptions(TypedDict, total=False):
    """The options of every loss, those of ``torch.nn.CrossEntropyLoss``."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


class SphericalLossOptions(LossOptions, total=False):
    """The options of every member of the family."""

    overwrite_logits: bool


class Loss(nn.Module, ABC):
    """A drop-in replacement of ``torch.nn.CrossEntropyLoss``: the same options with the same meaning.

    Args:
        weight: a weight per class, ``(D,)``; ``reduction="mean"`` divides by the sum of the targets' weights.
        ignore_index: examples with this target are ignored.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: in [0, 1], how much of the target is spread evenly over all classes.

    Shapes: logits ``(D,)``, ``(N, D)`` or ``(N, D, d1, ...)``; targets are classes (integers, the shape without D) or
    class probabilities (floating point, the same shape). The loss is float32 for float16 and bfloat16 logits.
    """

    weight: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        _logits.check_options(weight, ignore_index, reduction, label_smoothing)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    @property
    def has_probabilities(self) -> bool:
        """Whether the loss models class probabilities, so that :meth:`probabilities` and :meth:`log_probabilities` exist."""
        return type(self).log_probabilities is not Loss.log_probabilities

    @property
    def has_prior_bias(self) -> bool:
        """Whether :meth:`prior_bias` exists."""
        return type(self).prior_bias is not Loss.prior_bias

    @abstractmethod
    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        """Any number that ranks classes as the loss does: larger where the class with output ``o`` is more probable."""

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        """Log of :meth:`probabilities`, without leaving the log domain."""
        raise TypeError(
            f"{type(self).__name__} does not model class probabilities; use a likelihood loss such as "
            "TaylorSoftmaxLoss, or predict() for the ranking alone"
        )

    def probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        """The categorical distribution whose negative log-likelihood this loss is, along ``dim``."""
        return self.log_probabilities(o, dim).exp()

    def prior_bias(self, frequencies: Tensor) -> Tensor:
        """The output bias for which zero weights give exactly these class frequencies, ``(D,)``."""
        raise TypeError(f"{type(self).__name__} has no bias that matches class frequencies: it does not model probabilities")

    def predict(self, o: Tensor, k: int = 1, dim: int = -1) -> Tensor:
        """The ``k`` most probable classes along ``dim``, best first, under the loss's own probabilities.

        These need not be the largest logits: the Taylor softmax prefers the largest ``|o + 1|``, the spherical softmax ``|o|``.
        """
        if not 1 <= k <= o.shape[dim]:
            raise ValueError(
                f"k is {k}, but must be between 1 and the {o.shape[dim]} classes of logits of shape {tuple(o.shape)}"
            )
        x = o.to(widened(o.dtype))
        s, q = x.sum(dim, keepdim=True), x.square().sum(dim, keepdim=True)
        return self.score(s, q, x, o.shape[dim]).topk(k, dim=dim).indices

    def _options(self) -> LossOptions:
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }

    def extra_repr(self) -> str:
        given = {name: value for name, value in vars(self).items() if name in DEFAULTS and value != DEFAULTS[name]}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    def described(self) -> str:
        """Name and parameters, tensors by sums of ``x``, ``x^2`` and ``i x_i``: equal for equal losses, in whichever process.

        >>> from spherical_loss import SphericalSoftmaxLoss
        >>> SphericalSoftmaxLoss(0.3, weight=torch.ones(5)).described()
        'SphericalSoftmaxLoss(a1=0.3, a2=0.0, a3=1.0, eps=0.3, weight=[5] 5 5 10)'
        """
        values = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        given = {name: value for name, value in values.items() if name not in DEFAULTS or value != DEFAULTS[name]}
        for name, x in [*self.named_parameters(), *self.named_buffers()]:
            wide = x.detach().to(statistics_dtype(x.device)).flatten()
            sums = wide.sum(), wide @ wide, wide @ torch.arange(len(wide)).to(wide)
            given[name] = " ".join([f"{list(x.shape)}", *(f"{float(total):.12g}" for total in sums)])
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in given.items())})"


class SphericalLoss(Loss):
    """A member of the spherical family: everything follows from one formula of the statistics.

    To add a member, write the formula in ``s``, ``q``, ``o_c`` and ``D``, with operations that broadcast:

    >>> import torch
    >>> class CosineLoss(SphericalLoss):
    ...     def formula(self, s, q, o_c, D):
    ...         return 1 - o_c / q.sqrt()
    >>> o = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)
    >>> CosineLoss(reduction="none")(o, torch.tensor([0, 1])).tolist()
    [0.4000000059604645, 0.0]

    If ``exp(-formula)`` sums to one over the classes, say so with ``is_likelihood = True``: :meth:`probabilities` and
    :meth:`log_probabilities` then follow too. :meth:`prior_bias` is the one method a formula cannot give.

    Args:
        overwrite_logits: let the backward pass write the gradient into the memory of the logits, for callers who no longer need
            them. Half the memory, and several times faster for large D; torch raises if something else still needs the logits.
        options: those of :class:`Loss`.
    """

    is_likelihood = False
    needs_float64 = True
    """Whether the sums ``s`` and ``q`` must be float64, as for a formula with differences such as ``q - s^2 / D``."""

    def __init__(self, *, overwrite_logits: bool = False, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        _logits.check_options(overwrite_logits=overwrite_logits, **options)
        self.overwrite_logits = overwrite_logits

    @property
    def has_probabilities(self) -> bool:
        return self.is_likelihood or type(self).log_probabilities is not SphericalLoss.log_probabilities

    @abstractmethod
    def formula(self, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
        """The loss of one example, elementwise over a batch of statistics of any (broadcastable) shape."""

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return -self.formula(s, q, o, D)

    def forward(self, input: Tensor | Statistics, target: Tensor | None = None) -> Tensor:
        """The loss of logits and targets, or of the :class:`Statistics` a head made of them."""
        if isinstance(input, Statistics):
            return self._of_statistics(input, target)
        if target is None:
            raise TypeError(NO_TARGET)
        return _logits.family_loss(
            self.formula,
            input,
            target,
            overwrite_logits=self.overwrite_logits,
            needs_float64=self.needs_float64,
            **self._options(),
        )

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        if not self.is_likelihood:
            return super().log_probabilities(o, dim)
        return -self.class_losses(o, dim).to(o.dtype)

    def class_losses(self, o: Tensor, dim: int = -1) -> Tensor:
        """The loss each class would have as the target, shaped like ``o``; computed in float64, as the statistics are."""
        return _logits.class_losses(self.formula, o, dim)

    def _of_statistics(self, statistics: Statistics, target: Tensor | None) -> Tensor:
        if target is not None:
            raise TypeError("Statistics carry their own target; call loss(statistics) alone")
        if self.label_smoothing > 0:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} needs the loss of every class, which is not a function of "
                "(s, q, o_c); use it with logits (head.logits), or several weighted targets per example"
            )
        s, q, o_c, _, target, target_weight, *_ = statistics
        expected = s.shape if target_weight is None else target_weight.shape
        if not (q.shape == s.shape == expected[: s.dim()] and o_c.shape == expected):
            raise ValueError(
                f"Statistics of shapes s {tuple(s.shape)}, q {tuple(q.shape)}, o_c {tuple(o_c.shape)} do not fit together: "
                "o_c is shaped like s and q, or, with several targets per example, like target_weight, (..., K)"
            )
        if target_weight is not None and target_weight.shape[-1] == 0:
            raise ValueError(f"target_weight has shape {tuple(target_weight.shape)}: an example needs one target at least")
        dtype = widened(o_c.dtype)
        precise = statistics_dtype(o_c.device)
        if target is None:
            if self.weight is not None:
                raise ValueError("a class weight needs the targets, and these Statistics have target=None")
            target = torch.zeros(o_c.shape, dtype=torch.long, device=o_c.device)
        equal = self.weight is None and target_weight is None and self.ignore_index < 0
        if equal and _is_seen(target.device, lambda: int(target.min()) >= 0):
            return _logits.reduced(self.each(statistics), None, self.reduction).to(dtype)
        counted = target >= 0
        if self.ignore_index >= 0:
            counted &= target != self.ignore_index
        classes = torch.where(counted, target, 0)
        losses = self.each(statistics, counted)
        if target_weight is None:
            return _logits.weighted_and_reduced(losses, counted, classes, self.weight, self.reduction).to(dtype)
        # K targets per example are class probabilities of which only K are not zero, and are reduced in the same way.
        share = torch.where(counted, target_weight.to(precise), 0.0)
        if self.weight is not None:
            share = share * self.weight.to(precise)[classes]
        return _logits.reduced((losses * share).sum(-1), None, self.reduction).to(dtype)

    def each(self, statistics: Statistics, counted: Tensor | None = None) -> Tensor:
        """The loss of every target, shaped like ``o_c``, or 0 where it is not counted: neither weighted nor reduced."""

        def losses(s: Tensor, q: Tensor, o_c: Tensor) -> Tensor:
            s, q, o_c = (x.to(statistics_dtype(o_c.device)) for x in (s, q, o_c))
            if o_c.dim() > s.dim():
                s, q = s.unsqueeze(-1), q.unsqueeze(-1)
            if counted is None:
                return self.formula(s, q, o_c, statistics.D)
            return _logits.counted_losses(self.formula, s, q, o_c, statistics.D, counted)

        if statistics.head is not None:
            statistics.head.meet(self)
        found = _guarded(losses(*statistics[:3]))
        if statistics.nearby is None:
            return found
        nearby = losses(*statistics.nearby)
        return found + (nearby - nearby.detach())  # its gradient, and nothing of its value


def _is_seen(device: torch.device, condition: Callable[[], Tensor | bool]) -> bool:
    """Whether a condition is seen to hold: not in a graph, which other batches use, nor by waiting for a device."""
    if device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    try:
        return bool(condition())
    except RuntimeError:  # under vmap
        return False


def _guarded(losses: Tensor) -> Tensor:
    """The same losses. Where one is not finite, neither is its gradient: the logarithm of a negative number is NaN, but its
    slope is finite, and an optimizer would follow it."""
    if _is_seen(losses.device, lambda: math.isfinite(losses.detach().sum())):
        return losses
    return losses * (1 + 0 * losses.detach())
