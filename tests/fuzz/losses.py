"""Losses on random outputs, with random options, against the oracle in float64."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from tests.support.cases import CASES
from tests.support.oracle import expected

TOLERANCE = 1e-9  # relative to the largest number of its kind; the gradient of the Z-loss, whose terms cancel, needs 1e-11


def compare(seed: int) -> str:
    """One comparison of a value and of a gradient; gives what was compared."""
    chance = random.Random(seed)
    name = chance.choice(list(CASES))
    N, D = round(10 ** chance.uniform(0, 1.5)), round(10 ** chance.uniform(0.5, 3))
    scale, shift = 10 ** chance.uniform(-2, 2), chance.choice([0.0, chance.uniform(-3, 3)])
    generator = torch.Generator().manual_seed(seed)
    o = (scale * torch.randn(N, D, generator=generator, dtype=torch.float64) + shift).requires_grad_()
    target = torch.randint(D, (N,), generator=generator)
    options: dict[str, Any] = {"reduction": chance.choice(["mean", "sum", "none"])}
    if chance.random() < 0.3:
        options["weight"] = torch.rand(D, generator=generator, dtype=torch.float64) + 0.1
    if chance.random() < 0.3:
        options["label_smoothing"] = chance.uniform(0, 1)
    if chance.random() < 0.3:
        options["ignore_index"] = int(target[0])
        target[-1] = (options["ignore_index"] + 1) % D  # one at least counts
    if chance.random() < 0.2:
        target = torch.softmax(torch.randn(N, D, generator=generator, dtype=torch.float64), 1)
        options.pop("ignore_index", None)
    what = f"{name}, N={N}, D={D}, scale {scale:.3g}, shift {shift:.3g}, {', '.join(options)}"
    case = CASES[name]
    results = []
    for value in (case.make(**options)(o, target), expected(case.oracle, o, target, **options)):
        (gradient,) = torch.autograd.grad(value.sum(), o)
        results.append((value.detach(), gradient))
    rounding = 1e-6 * max(1.0, float(o.detach().abs().max()))  # where the outputs cancel in a loss near 0, as in the oracle
    for kind, found, right in zip(("value", "gradient"), *results, strict=True):
        error, size = float((found - right).abs().max()), float(right.abs().max())
        assert math.isfinite(error), f"{what}: the {kind} is not finite (seed {seed})"
        assert error <= TOLERANCE * max(size, rounding), f"{what}: the {kind} is {error / size:.1e} off (seed {seed})"
    return what
