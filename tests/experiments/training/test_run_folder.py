"""Files are written completely or not at all, whatever happens."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.atomic import write_atomically
from spherical_loss.experiments.files.failures import explain
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run, Settings

RUN = Run("digits", "taylor", 0, Settings(lr=0.1))


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


def test_the_log_names_the_file_on_a_full_disk(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    folder.create()
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        folder.log({"epoch": 1})


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "--out"), (errno.EROFS, "--out"), (errno.EDQUOT, "free some"), (errno.EIO, "error")]
)
def test_explanations(number: int, remedy: str) -> None:
    text = explain(OSError(number, os.strerror(number), "runs/x"))
    assert "runs/x" in text
    assert remedy in text


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    folder.create()
    (folder.path / "checkpoint.pt.partial").write_bytes(b"half")
    folder.create()
    assert sorted(os.listdir(folder.path)) == ["config.json", "environment.json"]


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    folder.create()
    valid = {"loss": 1.0, "error": 0.5, "nll": None}
    record = {"epoch": 1, "lr": 0.1, "train_loss": 1.0, "valid": valid, "seconds": 1.0, "train_seconds": 1.0}
    (folder.path / "metrics.jsonl").write_text(json.dumps(record) + '\n{"epo')
    assert folder.history() == [record]
    assert folder.load_checkpoint() is None
    assert folder.history() == []


def test_a_place_is_chosen_by_what_put_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", "/shared/data")
    for path, option in (("/shared/data/encoded/x", "the variable SPHERICAL_LOSS_DATA"), ("/shared/runs/x", "--out")):
        for number in (errno.EACCES, errno.ENOTDIR):
            assert f"({option})" in explain(OSError(number, os.strerror(number), path))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    folder.create()
    (folder.path / "result.json").write_text("{")
    with pytest.raises(UserError, match=r"result\.json is damaged.*delete"):
        folder.result()
    (folder.path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged.*delete"):
        folder.history()


def test_a_file_instead_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    RunFolder(tmp_path, RUN).path.write_text("")
    with pytest.raises(UserError, match=r"is not a folder.*--out"):
        RunFolder(tmp_path, RUN).create()
