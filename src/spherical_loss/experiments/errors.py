"""Errors that the user can fix: the command line prints the message alone, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can fix; the message says what is wrong, with the value, and the remedy."""


class UsageError(UserError):
    """The command line itself is wrong."""


def choose(kind: str, name: str, valid: Iterable[str]) -> str:
    """``name`` if it is one of ``valid``; otherwise an error that lists them.

    >>> choose("loss", "taylor", ["softmax", "taylor"])
    'taylor'
    >>> choose("loss", "tailor", ["softmax", "taylor"])
    Traceback (most recent call last):
    ...
    spherical_loss.experiments.errors.UsageError: unknown loss 'tailor' (perhaps taylor?); the valid ones are: softmax, taylor
    """
    names = list(valid)
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, 1)
    hint = f" (perhaps {close[0]}?)" if close else ""
    raise UsageError(f"unknown {kind} {name!r}{hint}; the valid ones are: {', '.join(names)}")
