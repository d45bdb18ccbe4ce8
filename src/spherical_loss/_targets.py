"""Logits and targets that do not fit are errors with the value, the shape and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def check(o: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> None:
    """Check shapes and dtypes only: reading values would wait for the device."""
    if not o.is_floating_point():
        raise TypeError(f"logits are {o.dtype}, but must be floating point; convert them with .float()")
    if o.dim() == 0:
        raise ValueError("logits are a scalar; expected (D,), (N, D) or (N, D, d1, ...)")
    D = num_classes(o)
    if D == 0:
        raise ValueError(
            f"logits of shape {tuple(o.shape)} have no classes in dimension {class_dim(o)}; at least one is needed"
        )
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(f"target is {target.dtype}; use class indices (int64) or class probabilities (floating point)")
    soft = target.is_floating_point()
    expected = o.shape if soft else o.shape[: class_dim(o)] + o.shape[class_dim(o) + 1 :]
    if target.shape != expected:
        kind = "class probabilities" if soft else "class indices"
        raise ValueError(
            f"{kind} of shape {tuple(target.shape)} do not fit logits of shape {tuple(o.shape)}: "
            f"expected {tuple(expected)} (the classes are dimension {class_dim(o)} of the logits)"
        )
    if soft and ignore_index >= 0:
        raise ValueError(f"ignore_index={ignore_index} needs class indices; class probabilities have no class to ignore")
    if weight is not None and weight.numel() != D:
        raise ValueError(f"weight has {weight.numel()} entries, but logits of shape {tuple(o.shape)} have {D} classes")


def overlaps(o: Tensor) -> bool:
    """Whether elements may share memory, as those of ``expand`` and of sliding windows do."""
    beyond = 1  # the first offset that no smaller stride reaches
    for stride, size in sorted(zip(o.stride(), o.shape, strict=True)):
        if size > 1:
            if stride < beyond:
                return True
            beyond += stride * (size - 1)
    return False


def check_overwriting(o: Tensor) -> None:
    if overlaps(o):
        raise ValueError(
            f"overwrite_logits=True cannot write into logits of shape {tuple(o.shape)} and strides {o.stride()}, "
            "whose elements share memory; give it a copy, logits.contiguous(), or leave it off"
        )


def class_dim(o: Tensor) -> int:
    return 0 if o.dim() == 1 else 1


def num_classes(o: Tensor) -> int:
    return o.shape[class_dim(o)]


def explained(compute: Callable[[], T], o: Tensor, target: Tensor, ignore_index: int) -> T:
    """``compute()``; if it fails on a target out of range, say which one and where. Costs nothing otherwise."""
    if torch.compiler.is_compiling():
        return compute()
    try:
        return compute()
    except (IndexError, RuntimeError) as error:
        raise explanation(error, o, target, ignore_index) from error


def explanation(error: IndexError | RuntimeError, o: Tensor, target: Tensor, ignore_index: int) -> IndexError | RuntimeError:
    """The error, or where it is that of a target out of range, one that says which target and where."""
    if "out of bounds" not in str(error):
        return error
    try:
        return IndexError(out_of_range(target, num_classes(o), ignore_index, f"logits of shape {tuple(o.shape)}"))
    except RuntimeError:  # under vmap, values cannot be read
        return error


def out_of_range(target: Tensor, D: int, ignore_index: int, where: str) -> str:
    bad = ((target < 0) | (target >= D)) & (target != ignore_index)
    position = tuple(int(i) for i in bad.nonzero()[0])
    value = int(target[position])
    return (
        f"target {value} at position {position} is out of range for {where}, which have {D} classes: "
        f"classes are 0 to {D - 1}; mark examples to skip with ignore_index={ignore_index}"
    )
