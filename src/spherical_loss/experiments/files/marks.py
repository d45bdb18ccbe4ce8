"""Generated text in documents written by hand, between ``<!-- name -->`` and ``<!-- end name -->``."""

from __future__ import annotations

import re
from pathlib import Path

from spherical_loss.experiments.errors import UserError


def replace_marked(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end {name} -->)", re.DOTALL)
    before = path.read_text(encoding="utf-8")
    after, count = pattern.subn(lambda match: match[1] + text + match[2], before)
    if count != 1:
        raise UserError(f"{path} must have <!-- {name} --> and <!-- end {name} --> exactly once, but has them {count} times")
    path.write_text(after, encoding="utf-8")
