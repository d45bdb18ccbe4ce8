"""Random sequences of everything that can be done with a factored head, against dense SGD in float64."""

from __future__ import annotations

import copy
import io
import random
import tempfile
from unittest import mock

import torch

from spherical_loss import FactoredHead, FactoredSGD
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint
from spherical_loss.heads.factored import head as factored_head
from tests.heads.reference import DenseReference, random_batch
from tests.support.cases import FAMILY

TOLERANCE = 0.01  # of the weights, relative to the largest: further off without an exception is a wrong number without a word
OPERATIONS = ["step"] * 8 + ["accumulate", "refactor", "close", "state", "copy", "checkpoint", "set", "read"]
LOSSES = ("taylor", "spherical", "quadratic", "squared-error", "bound-fixed")


def perturbed(weight: torch.Tensor) -> torch.Tensor:
    """Weights with errors as large as those of rounding to float32 once more."""
    return weight * (1 + torch.finfo(torch.float32).eps * (torch.rand_like(weight) - 0.5))


def train(seed: int) -> str:
    """One sequence of up to 40 operations; gives what it was, and how it ended."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    d, D, N = chance.randint(1, 24), round(10 ** chance.uniform(0, 3)), chance.randint(1, 64)
    bias, loss = chance.random() < 0.7, chance.choice(LOSSES)
    with mock.patch.object(factored_head, "FEW_CLASSES", chance.choice([0, 256])):  # the factored step, and the dense one
        head = FactoredHead(d, D, bias=bias)
    dense = DenseReference(head.weight, head.bias)
    nearby = DenseReference(perturbed(head.weight), head.bias)
    lr = 10 ** chance.uniform(-2, 2) * (0.03 if loss in ("squared-error", "bound-fixed") else 1)
    decay, clip = chance.choice([0.0, 0.01]), chance.choice([None, None, 10.0])
    optimizer = FactoredSGD(head, lr, decay, clip)
    what = f"{loss}, d={d}, D={D}, N={N}, lr={lr:.3g}, weight decay {decay}, clipping {clip}"
    done = []
    for k in range(chance.randint(5, 40)):
        operation = chance.choice(OPERATIONS)
        done.append(operation)
        if operation in ("step", "accumulate"):
            optimizer.zero_grad()
            gradients = None
            for part in range(1 + (operation == "accumulate")):
                hidden, target, _ = random_batch(N, d, D, seed=1000 * seed + 2 * k + part)
                _, _, grads = dense.gradients(FAMILY[loss].oracle, hidden.float(), target)
                grads += nearby.gradients(FAMILY[loss].oracle, hidden.float(), target)[2]
                gradients = grads if gradients is None else [a + b for a, b in zip(gradients, grads, strict=True)]
                try:
                    found = FAMILY[loss].make()(head(hidden.float(), target))
                except FloatingPointError as error:
                    return f"{what}: {error}"
                found.backward()
            try:
                optimizer.step()
            except (FloatingPointError, ValueError) as error:  # it says what is wrong, and writes nothing
                return f"{what}: {error}"
            count = len(dense.parameters())
            dense.step(gradients[:count], lr, decay, clip)
            nearby.step(gradients[count:], lr, decay, clip)
        elif operation == "refactor":
            head.refactor()
        elif operation == "close":
            head.close_frame()
        elif operation == "state":
            file = io.BytesIO()
            torch.save(head.state_dict(), file)
            file.seek(0)
            head.load_state_dict(torch.load(file, weights_only=True))
        elif operation == "copy":
            head, optimizer = copy.deepcopy((head, optimizer))
        elif operation == "checkpoint":
            with tempfile.TemporaryDirectory() as folder:
                save_checkpoint(head, folder)
                load_checkpoint(head, folder)
        elif operation == "set":
            weight = head.weight
            head.set_weight(weight)
            dense.W, nearby.W = weight.double(), perturbed(weight).double()
        else:
            head.eval()
            head.topk(torch.rand(3, d), min(3, D), FAMILY[loss].make())
            head.train()
        size = float(dense.W.abs().max())
        if not size < 1e6:
            return f"{what}: dense SGD diverges"
        if float((nearby.W - dense.W).abs().max()) > 0.1 * TOLERANCE * size:
            return f"{what}: dense SGD itself goes elsewhere from weights that differ in the last bit of float32"
        error = float((head.weight.double() - dense.W).abs().max())
        assert error <= TOLERANCE * size, f"{what}: {error / size:.1e} off after {' '.join(done)} (seed {seed})"
    return what
