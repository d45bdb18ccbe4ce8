"""The files of a run: what is written, damaged, left over, or of another version."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from spherical_loss.experiments.cli import main
from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run, Settings
from spherical_loss.experiments.training.train import train
from tests.experiments.training.test_train import make_run

RUN = Run("digits", "taylor", 0, Settings(lr=0.1))


def test_the_log_names_the_file_on_a_full_disk(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    folder.create()
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        folder.log({"epoch": 1})


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


def test_other_versions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that is stored, on its line; for those who see no line, below the table."""
    arguments = ["compare", "digits", "--losses", "taylor", "--runs", "2", "--epochs", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "instead of" not in capsys.readouterr().out
    path = min(tmp_path.glob("digits/taylor-*/environment.json"))
    written = json.loads(path.read_text())
    written["versions"] |= {"torch": "1.0", "numpy": "1.0", "spherical-loss": "unknown"}
    path.write_text(json.dumps(written))
    assert main(arguments) == 0
    out = capsys.readouterr().out
    different = f"torch 1.0 instead of {torch.__version__}"
    assert out.count(f"(stored, with {different})") == 1
    assert out.count("(stored)") == 1
    assert f"1 of 2 runs was made with other versions ({different})" in out
    assert main([*arguments, "--quiet"]) == 0
    assert f"1 of 2 runs was made with other versions ({different})" in capsys.readouterr().out
    path.write_text("{}")
    assert main(arguments) == 1
    assert "environment.json is damaged" in capsys.readouterr().err


def test_a_run_that_resumes_with_another_version_says_so(tmp_path: Path) -> None:
    told = []

    class Notes(Display):
        def note(self, run: Run, text: str) -> None:
            told.append(text)

    run = make_run(epochs=4)
    train(run, tmp_path, Notes(), until=2)
    path = RunFolder(tmp_path, run).path / "environment.json"
    path.write_text(path.read_text().replace(f'"{torch.__version__}"', '"1.0"'))
    train(run, tmp_path, Notes())
    assert told == [
        f"was started with torch 1.0 instead of {torch.__version__}; delete {path.parent} to train it with one version"
    ]
