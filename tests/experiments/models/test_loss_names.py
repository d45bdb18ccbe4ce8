"""The table of the losses, which names classes and numbers of the library without importing it."""

from __future__ import annotations

import spherical_loss
from spherical_loss.experiments.models.loss_names import LOSSES, make_loss
from spherical_loss.losses import DEFAULT_EPS


def test_every_loss_is_one_of_the_library() -> None:
    for name, entry in LOSSES.items():
        assert type(make_loss(name, {})) is getattr(spherical_loss, entry.class_name)


def test_the_default_is_the_librarys() -> None:
    assert LOSSES["spherical"].defaults == {"eps": DEFAULT_EPS}
