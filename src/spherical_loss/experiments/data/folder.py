"""Where the data are."""

from __future__ import annotations

import os
from pathlib import Path

import pooch

VARIABLE = "SPHERICAL_LOSS_DATA"


def data_folder() -> Path:
    """``$SPHERICAL_LOSS_DATA``, or the user's cache folder."""
    return Path(os.environ.get(VARIABLE) or pooch.os_cache("spherical-loss")).expanduser()
