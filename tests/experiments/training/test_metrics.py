"""Metrics against straightforward computations of the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spherical_loss.experiments.models.loss_names import LOSSES, make_loss
from spherical_loss.experiments.training.metrics import calibration_error, classifier_metrics, evaluate_classifier


@pytest.mark.parametrize("loss_name", LOSSES)
def test_against_plain_loops(loss_name: str) -> None:
    torch.manual_seed(0)
    o, target = 2 * torch.randn(60, 12), torch.randint(12, (60,))
    loss = make_loss(loss_name, {})
    metrics = classifier_metrics(loss, o, target)
    losses = torch.stack([torch.stack([loss(o[i : i + 1], torch.tensor([k])) for k in range(12)]) for i in range(60)])
    order = losses.argsort(1)  # the smaller its loss, the more probable a class
    top1 = (order[:, 0] != target).double().mean()
    top5 = sum(int(target[i]) not in order[i, :5].tolist() for i in range(60)) / 60
    assert metrics["error"] == pytest.approx(float(top1))
    assert metrics["top5"] == pytest.approx(top5)
    mean = float(losses.gather(1, target[:, None]).mean())
    assert metrics["loss"] == pytest.approx(mean / 12 if loss_name == "mse" else mean, rel=1e-5)


def test_negative_log_likelihood() -> None:
    torch.manual_seed(0)
    o, target = torch.randn(50, 10), torch.randint(10, (50,))
    for name in ("softmax", "abs", "spherical", "taylor"):
        metrics = classifier_metrics(make_loss(name, {}), o, target)
        assert metrics["nll"] == pytest.approx(metrics["loss"], rel=1e-5)
    bound = classifier_metrics(make_loss("bound", {}), o, target)
    assert bound["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(o, target)), rel=1e-5)
    assert bound["nll"] < bound["loss"]
    for name in ("mse", "z"):
        metrics = classifier_metrics(make_loss(name, {}), o, target)
        assert metrics["nll"] is None
        assert metrics["calibration"] is None


def test_the_ranking_is_the_loss_s_own() -> None:
    o, target = torch.tensor([[-5.0, 1.0, 2.0]]), torch.tensor([0])
    error = {name: classifier_metrics(make_loss(name, {}), o, target)["error"] for name in LOSSES}
    assert error == {"mse": 1, "softmax": 1, "abs": 0, "spherical": 0, "taylor": 0, "z": 1, "bound": 1, "bound-fixed": 1}


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=60))
def test_calibration_error(pairs: list[tuple[float, bool]]) -> None:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for confidence, correct in pairs:
        index = min(int(torch.tensor(confidence) * 15), 14)
        bins.setdefault(index, []).append((confidence, correct))
    expected = sum(abs(sum(correct - confidence for confidence, correct in items)) for items in bins.values()) / len(pairs)
    confidence, correct = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    assert calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-9)


def test_evaluation_does_not_depend_on_batches_and_leaves_the_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from spherical_loss.experiments.training import metrics
    from spherical_loss.experiments.training.recipes import RECIPES
    from spherical_loss.experiments.training.tasks import TASKS

    recipe, settings = RECIPES["digits"], TASKS["digits"].settings
    train, valid, _ = recipe.load(settings, 0)
    loss = make_loss("taylor", {})
    network = recipe.network(settings, train, loss)
    whole = evaluate_classifier(network, loss, valid)
    monkeypatch.setattr(metrics, "BATCH", 7)
    parts = evaluate_classifier(network, loss, valid)
    assert whole.keys() == parts.keys()
    assert all(whole[key] == pytest.approx(parts[key], rel=1e-5) for key in whole)
    assert network.training
