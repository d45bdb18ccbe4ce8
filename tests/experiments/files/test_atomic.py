"""A file is written completely or not at all, and what went wrong is said in one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.files.failures import explain


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")
    (tmp_path / "result.json.partial").symlink_to("/dev/full")  # a real "no space left on device"
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["result.json"]
    assert str(path) in explain(error.value)
    assert "free some" in explain(error.value)


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "--out"), (errno.EROFS, "--out"), (errno.EDQUOT, "free some"), (errno.EIO, "error")]
)
def test_explanations(number: int, remedy: str) -> None:
    text = explain(OSError(number, os.strerror(number), "runs/x"))
    assert "runs/x" in text
    assert remedy in text


def test_a_place_is_chosen_by_what_put_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", "/shared/data")
    for path, option in (("/shared/data/encoded/x", "the variable SPHERICAL_LOSS_DATA"), ("/shared/runs/x", "--out")):
        for number in (errno.EACCES, errno.ENOTDIR):
            assert f"({option})" in explain(OSError(number, os.strerror(number), path))
