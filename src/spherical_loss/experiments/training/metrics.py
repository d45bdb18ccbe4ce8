"""Metrics on a data set: loss, negative log-likelihood, error rates, calibration. Classes are ranked as the loss ranks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spherical_loss import Loss, SquaredErrorLoss
from spherical_loss.experiments.models.network import Network

BATCH = 500


@torch.no_grad()
def evaluate_classifier(network: Network, loss: Loss, data: Any) -> dict[str, float | None]:
    """Metrics of ``network`` on ``data`` (anything with ``len``, ``batch`` and ``D``, such as ``Images``).

    - ``loss``: the training loss; for the squared error its mean over the classes, as the paper gives it.
    - ``nll``: the mean negative log-likelihood under the loss's own distribution; None if it has none.
    - ``error``, ``top5``: how often the target is not the most probable class, or not among the five most probable.
    - ``calibration``: see :func:`calibration_error`; None if it has no distribution.
    """
    was_training = network.training
    network.eval()
    device = next(network.parameters()).device
    o, target = [], []
    for rows in torch.arange(len(data), device=device).split(BATCH):
        x, y = data.batch(rows)
        o.append(network(x))
        target.append(y)
    network.train(was_training)
    return classifier_metrics(loss, torch.cat(o), torch.cat(target))


def as_in_paper(value: float, loss: Loss, D: int) -> float:
    """A loss as the paper gives it: of the squared error, the mean over the D classes instead of the sum."""
    return value / D if isinstance(loss, SquaredErrorLoss) else value


def classifier_metrics(loss: Loss, o: Tensor, target: Tensor) -> dict[str, float | None]:
    """The metrics of logits ``(N, D)`` and targets ``(N,)``; see :func:`evaluate_classifier`.

    >>> import spherical_loss
    >>> o, target = torch.tensor([[2.0, -5.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([1, 0])
    >>> metrics = classifier_metrics(spherical_loss.TaylorSoftmaxLoss(), o, target)
    >>> metrics["error"], round(metrics["nll"], 4)
    (0.0, 0.5609)
    """
    D = o.shape[1]
    best = loss.predict(o, k=min(5, D))
    hit = best == target[:, None]
    metrics: dict[str, float | None] = {
        "loss": as_in_paper(float(loss(o, target)), loss, D),
        "nll": None,
        "error": 1 - hit[:, 0].double().mean().item(),
        "top5": 1 - hit.any(1).double().mean().item(),
        "calibration": None,
    }
    if not loss.has_probabilities:
        return metrics
    log_p = loss.log_probabilities(o)
    metrics["nll"] = -log_p.gather(1, target[:, None]).double().mean().item()
    confidence = log_p.gather(1, best[:, :1]).squeeze(1).exp()
    metrics["calibration"] = calibration_error(confidence, hit[:, 0])
    return metrics


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Expected calibration error: |accuracy - mean confidence| in equal bins of confidence, weighted by their examples.

    >>> calibration_error(torch.tensor([0.75, 0.75, 0.75, 0.75]), torch.tensor([True, True, True, False]))
    0.0
    """
    which = (confidence * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gap.index_add_(0, which, correct.double() - confidence.double())
    return float(gap.abs().sum() / len(confidence))
