"""The million-class example with a few thousand classes: it learns, resumes where it was stopped, and exports."""

from __future__ import annotations

import sys

import pytest
import torch

from spherical_loss import AdaptiveSphericalSoftmax

from .scripts import script

million = script("million_classes")
OPTIONS = ["--classes=2500", "--d=16", "--batch-size=128", "--every=100", "--queries=200", "--frequent=100"]


def run(monkeypatch, folder, steps):
    monkeypatch.setattr(sys, "argv", ["million_classes.py", "--folder", str(folder), "--steps", str(steps), *OPTIONS])
    million.main()


def state(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_learns_and_exports(tmp_path, monkeypatch, capsys):
    run(monkeypatch, tmp_path, 300)
    shown = capsys.readouterr().out
    assert "step 300: loss" in shown
    assert "ratio:" in shown

    layer = AdaptiveSphericalSoftmax(16, 2500, 100)
    layer.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    shop = million.Shop(2500)
    trunk = million.Trunk(shop.models, 16)
    trunk.load_state_dict(state(tmp_path)["parts"][0])
    item, target = shop.batch(12345, 500)
    right = layer.predict(trunk(item)) == target
    most_popular = float((target == target.mode().values).float().mean())
    assert float(right.float().mean()) > 2 * most_popular


def test_goes_on_from_the_checkpoint(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(monkeypatch, whole, 200)
    with monkeypatch.context() as patch:
        patch.setattr(million, "accuracy", stop)  # which is called right after the first checkpoint
        with pytest.raises(KeyboardInterrupt):
            run(patch, stopped, 200)
    assert state(stopped)["step"] == 100
    run(monkeypatch, stopped, 200)
    assert "resuming from step 100" in capsys.readouterr().out
    for part, expected in zip(state(stopped)["parts"][:2], state(whole)["parts"][:2], strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(part[name], value)


def test_most_items_are_followed_by_the_one_that_goes_with_them():
    shop = million.Shop(10_000)
    item, target = shop.batch(0, 2000)
    followed = shop.brand_after[item // 100] * 100 + shop.model_after[item % 100] == target
    assert 0.87 < float(followed.float().mean()) < 0.93
