"""From logits and targets to a loss, with the options of ``torch.nn.CrossEntropyLoss``: what modules and functions share.

A member of the family is its ``formula(s, q, o_c, D)`` here, and a softmax is its ``log_numerator``. Options are checked by
:func:`check_options` before they come here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss._targets import check, check_overwriting, class_dim, explained, explanation, num_classes
from spherical_loss.statistics import dense_statistics, folded, statistics_dtype, widened

Formula = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""The loss of one example, from s, q, o_c and D."""
REDUCTIONS = ("none", "mean", "sum")


def check_options(
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
) -> None:
    """Raise a ``ValueError`` for options that make no sense, alone or together."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not known; use one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be between 0 and 1")
    if weight is not None and weight.dim() != 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but must be one number per class, (D,)")
    if overwrite_logits and label_smoothing > 0:
        raise ValueError(
            "overwrite_logits=True needs a gradient that follows from s, q and o_c alone, which label_smoothing "
            f"({label_smoothing}) breaks; use one of the two"
        )


def family_loss(
    formula: Formula,
    o: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
    needs_float64: bool = True,
) -> Tensor:
    """A member of the family; ``needs_float64``: see :class:`~spherical_loss.base.SphericalLoss`."""
    check(o, target, weight, ignore_index)
    if target.is_floating_point() or label_smoothing > 0:
        if overwrite_logits:
            raise ValueError("overwrite_logits=True works with class indices only; leave it off for class-probability targets")
        return _expected_loss(formula, o, target, weight, ignore_index, reduction, label_smoothing)
    if overwrite_logits:
        check_overwriting(o)
    target = target.long()
    N, D, M = folded(o.shape)
    flat = target.reshape(N, M)
    counted = flat != ignore_index
    classes = torch.where(counted, flat, 0)
    s, q, o_c = explained(
        lambda: dense_statistics(o.reshape(N, D, M), classes, overwrite_logits, needs_float64), o, target, ignore_index
    )
    losses = counted_losses(formula, s, q, o_c, D, counted)
    reduced_losses = weighted_and_reduced(losses, counted, classes, weight, reduction).to(widened(o.dtype))
    return reduced_losses.reshape(target.shape if reduction == "none" else ())


def _expected_loss(
    formula: Formula,
    o: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """Class probabilities and label smoothing: the expected loss, which needs the loss of every class."""
    dim, D = class_dim(o), num_classes(o)
    losses = class_losses(formula, o, dim)
    per_class = torch.ones(D, dtype=losses.dtype, device=o.device) if weight is None else weight.to(losses.dtype)
    weighted = losses * per_class.reshape(-1, *[1] * (o.dim() - 1 - dim))
    even = label_smoothing / D
    if target.is_floating_point():
        shares = target.to(losses.dtype) * (1 - label_smoothing) + even
        return reduced((weighted * shares).sum(dim), None, reduction).to(widened(o.dtype))
    target = target.long()
    counted = target != ignore_index
    classes = torch.where(counted, target, 0)
    picked = explained(lambda: weighted.gather(dim, classes.unsqueeze(dim)).squeeze(dim), o, target, ignore_index)
    smoothed = (1 - label_smoothing) * picked + even * weighted.sum(dim)
    importance = torch.where(counted, per_class[classes], 0.0)
    return reduced(torch.where(counted, smoothed, 0.0), importance, reduction).to(widened(o.dtype))


def class_losses(formula: Formula, o: Tensor, dim: int) -> Tensor:
    """The loss each class would have as the target, shaped like ``o``; computed in float64, as the statistics are."""
    x = o.to(statistics_dtype(o.device))
    s, q = x.sum(dim, keepdim=True), x.square().sum(dim, keepdim=True)
    return formula(s, q, x, o.shape[dim])


def counted_losses(formula: Formula, s: Tensor, q: Tensor, o_c: Tensor, D: int, counted: Tensor) -> Tensor:
    """The formula where ``counted``, else 0. Ignored statistics are replaced first: 0 times an infinite slope is nan."""
    s, q, o_c = (torch.where(counted, x, 1.0) for x in (s, q, o_c))  # the statistics of a one-hot output
    return torch.where(counted, formula(s, q, o_c, D), 0.0)


def weighted_and_reduced(losses: Tensor, counted: Tensor, classes: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Losses of given classes, each times the weight of its class."""
    if weight is None:
        return reduced(losses, counted, reduction)
    importance = torch.where(counted, weight.to(losses.dtype)[classes], 0.0)
    return reduced(losses * importance, importance, reduction)


def reduced(losses: Tensor, importance: Tensor | None, reduction: str) -> Tensor:
    """torch's reductions: the mean divides by the total importance, so that a batch of ignored examples gives 0 / 0 = nan."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if importance is None else losses.sum() / importance.sum()


def softmax_loss(
    log_numerator: Callable[[Tensor], Tensor],
    o: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch's cross-entropy of ``log_numerator(o)``."""
    check(o, target, weight, ignore_index)
    x = log_numerator(o if o.dtype == widened(o.dtype) else o.to(widened(o.dtype)))
    target = target.to(x.dtype) if target.is_floating_point() else target.long()
    weight = None if weight is None else weight.to(x.dtype)
    try:
        return F.cross_entropy(x, target, weight, None, ignore_index, None, reduction, label_smoothing)
    except (IndexError, RuntimeError) as error:
        raise explanation(error, o, target, ignore_index) from error
