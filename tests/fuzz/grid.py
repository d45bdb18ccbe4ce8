"""The grid of learning rates, from far too small to far too large: a factored head is where dense SGD in float64 is, or raises.

Hidden vectors ``relu(0.5 m[t] + noise)`` of d = 16, with a direction m for each class; N = 64, 60 steps; the spherical and the
Taylor softmax; rates from 0.1 to 1,000; ten seeds. Table and check of all of it, for 1 to 1,000 classes::

    python -m tests.fuzz.grid

"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import Tensor

from spherical_loss import FactoredHead, FactoredSGD
from tests.support.cases import FAMILY

CLASSES = (1, 2, 3, 5, 10, 30, 100, 300, 1_000)
RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
LOSSES = {"taylor": (1.0, 1.0, 0.5), "spherical": (0.3, 0.0, 1.0)}  # a1, a2, a3 of the numerator
TOLERANCE = 0.01  # of the weights, relative to the largest, at every step
d, N, STEPS = 16, 64, 60


def gradient(W: Tensor, H: Tensor, target: Tensor, loss: str) -> Tensor:
    """Of the mean of ``-log g(o_c) / sum_k g(o_k)``, written out: autograd would take most of the time of the grid."""
    a1, a2, a3 = LOSSES[loss]
    o, c = H @ W.T, target.unsqueeze(1)
    g, slope = a1 + a2 * o + a3 * o**2, a2 + 2 * a3 * o
    grad_o = (slope / g.sum(1, keepdim=True)).scatter_add(1, c, -(slope / g).gather(1, c))
    return grad_o.T @ H / len(H)


def run(loss: str, D: int, lr: float, seed: int) -> str:
    """How a training ended: ``"exact"``, or ``"raised"``; also whether dense float32 SGD is ``"lost"``. A wrong one is an
    AssertionError."""
    torch.manual_seed(seed)
    head, m = FactoredHead(d, D), torch.randn(D, d)
    optimizer, formula = FactoredSGD(head, lr), FAMILY[loss].make()
    float32 = torch.cat([head.weight, torch.zeros(D, 1)], 1)
    dense, float32_error, ended = float32.double(), 0.0, "exact"
    for step in range(STEPS):
        target = torch.randint(D, (N,))
        hidden = (0.5 * m[target] + torch.randn(N, d)).relu()
        H = torch.cat([hidden, torch.ones(N, 1)], 1)
        dense = dense - lr * gradient(dense, H.double(), target, loss)
        float32 = float32 - lr * gradient(float32, H, target, loss)
        size = float(dense.abs().max())
        float32_error = max(float32_error, float((float32 - dense).abs().max()) / size)
        if ended == "exact":
            optimizer.zero_grad()
            try:
                formula(head(hidden, target)).backward()
                optimizer.step()
            except FloatingPointError:  # it says what is wrong, and writes nothing
                ended = "raised"
                continue
            found = torch.cat([head.weight, head.bias.unsqueeze(1)], 1)
            error = float((found - dense).abs().max()) / size
            what = f"{loss}, D={D}, lr={lr:g}, seed {seed}"
            assert error <= TOLERANCE, f"{what}: {error:.1e} off after {step + 1} steps; dense float32: {float32_error:.1e}"
    return f"{ended} lost" if not float32_error <= TOLERANCE else ended


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.grid", description=__doc__.split("\n")[0])
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| classes | trainings | more than 1% off without an exception | exceptions | dense float32 more than 1% off |")
    print("|--:|--:|--:|--:|--:|")
    wrong, raised = [], set()
    for D in options.classes:
        ended: Counter[str] = Counter()
        for loss in LOSSES:
            for lr in RATES:
                for seed in range(options.seeds):
                    try:
                        words = run(loss, D, lr, seed).split()
                        ended.update(words)
                        raised.update({lr} if "raised" in words else ())
                    except AssertionError as error:
                        ended["wrong"] += 1
                        wrong.append(str(error))
        trainings = len(LOSSES) * len(RATES) * options.seeds
        print(f"| {D:,} | {trainings} | {ended['wrong']} | {ended['raised']} | {ended['lost']} |", flush=True)
    if raised:
        print(f"the smallest rate with an exception: {min(raised):g}")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
