"""The command line, as a user sees it."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spherical_loss.experiments import cli
from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.running import compare
from spherical_loss.experiments.training.tasks import TASKS


@pytest.fixture
def spherical_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs a command with OUT in the test's folder; gives exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        arguments = tuple(a.replace("OUT", str(tmp_path / "runs")) for a in arguments)
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # tyro's help and errors
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


QUICK = ("--out", "OUT", "--epochs", "2", "--runs", "2")


def test_compare_prints_and_writes_tables_and_curves(spherical_loss, tmp_path: Path) -> None:
    code, out, err = spherical_loss("compare", "digits", "--losses", "softmax", "taylor", *QUICK)
    assert code == 0
    assert err == ""
    assert "Log softmax" in out
    assert "Log Taylor softmax" in out
    picture = tmp_path / "runs/digits/curves.png"
    assert str(picture) in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs/digits").glob("taylor-*/result.json"))]
    assert len(results) == 2
    mean = 100 * sum(result["test"]["error"] for result in results) / 2
    row = next(line for line in (tmp_path / "runs/digits/table.md").read_text().splitlines() if "Taylor" in line)
    assert f"| {mean:.3g} (" in row


def test_digits_is_the_default_task(spherical_loss) -> None:
    code, out, _ = spherical_loss("compare", "--losses", "taylor", "--out", "OUT", "--epochs", "1", "--runs", "1")
    assert code == 0
    assert "taylor, seed 0: test error" in out


def test_the_same_command_continues(spherical_loss, tmp_path: Path) -> None:
    command = ("compare", "digits", "--losses", "softmax", "taylor", *QUICK)
    assert spherical_loss(*command)[0] == 0
    (removed,) = (tmp_path / "runs/digits").glob("taylor-seed1-*/result.json")
    removed.unlink()  # as if it had been stopped there
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/digits").glob("*/result.json")}
    table = (tmp_path / "runs/digits/table.md").read_text()
    code, out, _ = spherical_loss(*command)
    assert code == 0
    assert out.count("(stored)") == 3
    assert removed.exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    without_seconds = [re.sub(r"(\|[^|]*){2}\|$", "", line) for line in table.splitlines()]
    again = (tmp_path / "runs/digits/table.md").read_text().splitlines()
    assert [re.sub(r"(\|[^|]*){2}\|$", "", line) for line in again] == without_seconds


def test_quiet(spherical_loss) -> None:
    _, out, _ = spherical_loss("compare", "digits", "--losses", "taylor", *QUICK, "--quiet")
    assert "test error" not in out
    assert "Log Taylor softmax" in out


def test_a_diverging_run_does_not_stop_the_others(spherical_loss, tmp_path: Path) -> None:
    code, out, err = spherical_loss("compare", "digits", "--losses", "mse", "taylor", "--lr", "50", *QUICK)
    assert code == 0
    assert "mse, seed 0: diverged in epoch 1 at learning rate 50" in out
    assert "0 (+ 2 diverged)" in out
    assert "taylor, seed 1: test error" in out
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        (("frobnicate",), cli.COMMANDS.choices),
        (("compare", "mnits"), TASKS),
        (("tune", "mnits"), TASKS),
        (("reproduce", "mnist"), TABLES),
        (("reproduce",), TABLES),
        (("data", "get", "mnits"), ["mnist", "cifar10", "cifar100", "ptb"]),
        (("data", "put"), ["get"]),
        (("compare", "digits", "--losses", "softmax", "tailor"), ["taylor", "spherical", "mse"]),
        (("tune", "digits", "--loss", "tailor"), ["taylor", "spherical", "mse"]),
        (("compare", "digits", "--bacth-size", "3"), ["--batch-size", "--losses", "--width", "--quiet"]),
        (("compare", "digits", "--zzz"), ["--batch-size", "--losses", "--width", "--quiet"]),
        (("compare", "digits", "--monitor", "speed"), ["error", "loss", "nll"]),
        (("compare", "digits", "--activation", "tanh"), ["relu", "softmax", "exp"]),
    ],
)
def test_unknown_names_list_the_valid_ones(spherical_loss, arguments: tuple[str, ...], valid) -> None:
    code, out, err = spherical_loss(*arguments)
    assert code == 2
    assert all(name in err for name in valid)
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lr", "-1"), "--lr is -1.0"),
        (("--runs", "0"), "--runs is 0"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--momentum", "1"), "--momentum is 1.0"),
        (("--weight-decay", "-1"), "--weight-decay is -1.0"),
        (("--eps", "0"), "--eps is 0.0"),
        (("--lr", "fast"), "fast"),
        (("--device", "abacus"), "--device is 'abacus'"),
        (("--losses", "z", "--b", "nan"), "b is nan"),
        (("--lr", "inf"), "--lr is inf"),
        (("--weight-decay", "inf"), "--weight-decay is inf"),
        (("--seed", "99999999999999"), "--seed is 99999999999999"),
        (("--seed", "-1"), "--seed is -1"),
        (("--device", "meta"), "--device is 'meta'"),
        (("--losses", "--epochs", "1"), "--losses needs at least one loss, of: mse"),
        (("--activation", "exp", "--batch-size", "1", "--losses", "softmax"), "--batch-size is 1"),
    ],
)
def test_values_that_make_no_sense(spherical_loss, options: tuple[str, ...], said: str) -> None:
    code, out, err = spherical_loss("compare", "digits", "--out", "OUT", *options)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("compare", "--help"), ("compare", "mnist", "--help")])
def test_help(spherical_loss, arguments: tuple[str, ...]) -> None:
    code, out, err = spherical_loss(*arguments)
    assert code == 0
    assert err == ""
    assert ("--halve-after" in out) == ("mnist" in arguments)
    assert ("cifar100" in out) == (arguments == ("compare", "--help"))


def test_missing_data(spherical_loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", str(tmp_path / "nowhere"))
    code, out, err = spherical_loss("compare", "mnist", *QUICK)
    assert code == 1
    assert "train-images-idx3-ubyte.gz is missing" in err
    assert "spherical-loss data get mnist" in err
    assert "Traceback" not in out + err


def test_reproduce_puts_the_paper_beside_ours(spherical_loss, small_data, tmp_path: Path) -> None:
    small_data("mnist")
    small = (*QUICK, "--width", "2", "--batch-size", "50")
    assert spherical_loss("reproduce", "mnist-random-splits", "--losses", "softmax", "taylor", *small)[0] == 0
    code, out, _ = spherical_loss("reproduce", "mnist-official", *small)
    assert code == 0
    assert "0.688 (0.061)" in out  # the paper's error of the Taylor softmax on the official split
    table = (tmp_path / "runs/reproduce-mnist-official/table.md").read_text()
    assert "Table 2" in table
    assert "Taylor beats softmax in error on official MNIST" in table
    row = next(line for line in table.splitlines() if "official split is easier (softmax" in line)
    assert "Welch t" in row  # against the stored runs of table 1


def test_reproduce_has_the_papers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(compare, "compare", lambda options, console: seen.update({options.task: options}))
    for name in TABLES:
        cli.main(["reproduce", name])
        table, options = TABLES[name], seen[TABLES[name].task]
        assert (options.runs, options.losses) == (table.runs, table.losses)
        assert all(getattr(options.settings, key) == value for key, value in table.settings.items())
        images = table.number <= 4
        assert options.settings.batch_size == (200 if images else 250)
        assert options.settings.momentum == (0.9 if images else 0)
        assert options.settings.halve_after == (5 if images else 1)
    assert seen["cifar10"].settings.width == seen["cifar100"].settings.width == 64
    assert seen["cifar10"].settings.weight_decay > 0


def test_a_full_disk_stops_with_a_message_and_keeps_the_results(
    spherical_loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("compare", "digits", "--losses", "softmax", "taylor", *QUICK)
    fsync, left = os.fsync, [9]  # files that still fit: the first run, and some of the second

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, out, err = spherical_loss(*command)
    assert code == 1
    assert "no space left to write" in err
    assert "run the same command again" in err
    assert "Traceback" not in out + err
    (result,) = (tmp_path / "runs/digits").glob("*/result.json")
    assert json.loads(result.read_text())["status"] == "finished"
    monkeypatch.setattr(os, "fsync", fsync)
    code, out, _ = spherical_loss(*command)
    assert code == 0
    assert out.count("(stored)") == 1


def test_an_unwritable_folder(spherical_loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def refuse(path, *rest, **options) -> None:  # root may write everywhere, so permissions alone would not refuse
        if "forbidden" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mkdir(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    code, out, err = spherical_loss("compare", "digits", "--out", str(tmp_path / "forbidden"))
    assert code == 1
    assert f"no permission for {tmp_path / 'forbidden'}" in err
    assert "--out" in err
    (tmp_path / "file").write_text("")
    code, out, err = spherical_loss("compare", "digits", "--out", str(tmp_path / "file"))
    assert code == 1
    assert str(tmp_path / "file") in err
    assert "is not a folder" in err
    assert "Traceback" not in out + err


def test_a_closed_pipe_is_no_error_to_talk_about(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spherical_loss", "compare", "digits", "--losses", "softmax", "--runs", "1"]
    command += ["--epochs", "1", "--out", str(tmp_path)]
    with open(tmp_path / "errors", "w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 1
    assert (tmp_path / "errors").read_text() == ""


def test_the_last_batch_of_one_joins_the_one_before(spherical_loss) -> None:
    """Batch normalization cannot take it; 1,077 of the digits train."""
    options = ("--losses", "softmax", "--activation", "exp", "--batch-size", "1076")
    code, out, err = spherical_loss("compare", "digits", "--out", "OUT", "--epochs", "1", "--runs", "1", *options)
    assert code == 0, err
    assert "Log softmax" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("compare", "ptb", "--help"),
        ("compare", "mnits"),
        ("compare", "digits", "--lr", "fast"),
        ("compare", "digits", "--lr", "-1"),
        ("tune", "ptb", "--trials", "0"),
    ],
)
def test_help_and_errors_do_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    """Nor for anything else that takes long to import."""
    slow = {"torch", "numpy", "matplotlib", "optuna", "scipy", "sklearn", "distributed", "filelock", "pooch"}
    program = f"""
import atexit, sys
from spherical_loss.__main__ import main
atexit.register(lambda: print(*sorted({slow} & sys.modules.keys()), file=sys.stderr))
raise SystemExit(main())"""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == (2 if "help" not in arguments[-1] and "version" not in arguments[-1] else 0)
    *_, imported = done.stderr.splitlines()
    assert imported == ""


def test_a_comparison_starts_without_what_only_other_commands_need() -> None:
    slow = {"matplotlib", "optuna", "pandas", "scipy.stats", "sklearn", "torch._dynamo", "distributed"}
    program = f"import sys, spherical_loss.experiments.running.compare; print(*sorted({slow} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_version(spherical_loss) -> None:
    code, out, _ = spherical_loss("--version")
    assert code == 0
    assert re.fullmatch(r"spherical-loss \d+\.\d+.*\n", out)


@pytest.mark.parametrize("dataset", ["ptb", "one-billion-word", "imdb", "simlex"])
def test_where_a_text_comes_from(spherical_loss, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", str(tmp_path / "data"))
    code, _, err = spherical_loss("data", "get", dataset)
    assert code == 1
    assert re.search(r"https?://", err)
    assert str(tmp_path / "data") in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_the_columns(spherical_loss, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = spherical_loss("compare", "digits", "--losses", "softmax", "taylor", *QUICK, "--quiet")
    table = [line for line in out.splitlines() if line.startswith(("┏", "┃", "┡", "│", "└"))]
    assert len(table) > 4
    assert max(map(len, table)) <= columns
    assert "error %" in out
    assert "…" not in out
