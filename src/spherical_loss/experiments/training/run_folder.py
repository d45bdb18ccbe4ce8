"""Run folders: what is written, how it survives a kill or a full disk, and how it is read again.

    OUT/TASK/LOSS-seedN-HASH/
        config.json         the run: task, loss, seed, settings
        environment.json    versions and machine
        metrics.jsonl       a line per epoch
        checkpoint.pt       everything needed to resume, while the run is not finished
        best.safetensors    the weights of the best epoch, once finished
        result.json         the last file written: the run is finished, or has diverged
        lock                held by the process that trains the run

Every file but metrics.jsonl is written to a temporary name, synced, and renamed: at any moment it is the old file or
the new one. metrics.jsonl grows by a line per epoch and is cut back to the checkpoint's epoch when a run resumes. The
checkpoint has a checksum: a damaged one is put aside, and the run starts again.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.atomic import named, write_atomically, write_json
from spherical_loss.experiments.files.failures import warn
from spherical_loss.experiments.files.locks import locked
from spherical_loss.experiments.training.records import check_environment, check_history, check_result, of_language
from spherical_loss.experiments.training.settings import Run
from spherical_loss.files import PARTIAL, DamagedFileError, load, save

DECISIVE = ("spherical-loss", "torch")
"""The packages whose version may change the numbers of a run."""


def read_json(path: Path, check: Callable[[Any], None]) -> Any:
    """A file of a run folder, if it passes the check."""
    with damage_named(path):
        value = json.loads(path.read_bytes())
        check(value)
        return value


def read_result(path: Path, language: bool) -> dict[str, Any]:
    return read_json(path, partial(check_result, language=language))


def read_history(path: Path, language: bool) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a line that was cut short is left out."""
    with damage_named(path):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        history = [json.loads(line) for line in lines if line.endswith(b"\n")]
        check_history(history, language)
        return history


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn a ``ValueError`` about ``path`` into a message with the remedy."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); delete {path.parent} to repeat this run") from error


def environment() -> dict[str, Any]:
    """Versions, and the properties of the machine that decide the last bits."""
    versions = {}
    for package in ("spherical-loss", "torch", "numpy", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "python": platform.python_version(),
        "versions": versions,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


class RunFolder:
    """The folder of one run under ``root``; :meth:`create` it before writing."""

    def __init__(self, root: Path, run: Run) -> None:
        self.run = run
        self.path = root / run.task / run.name
        self.language = of_language(run.as_dict()["settings"])

    def lock(self, wait: bool, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Keep other processes out of this folder; see :func:`~spherical_loss.experiments.files.locks.locked`."""
        self._make()
        return locked(self.path / "lock", wait, waiting)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"{self.path} is not a folder; move it, or choose another folder with --out") from error

    def create(self) -> None:
        """Make the folder, and write the files that describe the run."""
        self._make()
        for leftover in self.path.glob(f"*{PARTIAL}"):  # left by a killed process
            leftover.unlink()
        for name, content in (("config.json", self.run.as_dict()), ("environment.json", environment())):
            if not (self.path / name).exists():
                write_json(self.path / name, content)

    def result(self) -> dict[str, Any] | None:
        """The result of the run, or None if it is not finished."""
        path = self.path / "result.json"
        return read_result(path, self.language) if path.exists() else None

    def other_versions(self) -> str:
        """The versions the run was started with, where they are not those of now; empty if they are the same, or unknown."""
        path = self.path / "environment.json"
        if not path.exists():
            return ""
        then, now = read_json(path, check_environment)["versions"], environment()["versions"]
        different = [name for name in DECISIVE if "unknown" != then.get(name, "unknown") != now[name] != "unknown"]
        return ", ".join(f"{name} {then[name]} instead of {now[name]}" for name in different)

    def history(self) -> list[dict[str, Any]]:
        """The epochs' metrics; a line that was cut short is left out."""
        return read_history(self.path / "metrics.jsonl", self.language)

    def log(self, record: dict[str, Any]) -> None:
        """Append an epoch's metrics."""
        path = self.path / "metrics.jsonl"
        try:
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise named(error, path) from error

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        path = self.path / "checkpoint.pt"
        try:
            save(state, path)
        except OSError as error:
            raise named(error, path) from error

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state to resume from, with metrics.jsonl cut back to it; None to start from the beginning."""
        path = self.path / "checkpoint.pt"
        state: dict[str, Any] | None = None
        lines = ""
        if path.exists():
            try:
                state = load(path)
                check_history(state["history"], self.language)
                lines = "".join(json.dumps(record) + "\n" for record in state["history"])
            except DamagedFileError as error:
                self.put_checkpoint_aside(str(error))
            except (KeyError, TypeError, ValueError) as error:
                state = None
                self.put_checkpoint_aside(f"{path} has no history of a run ({type(error).__name__}: {error})")
        write_atomically(self.path / "metrics.jsonl", lines.encode())
        return state

    def put_checkpoint_aside(self, why: str) -> None:
        """Rename an unusable checkpoint: the run starts again from the beginning."""
        path = self.path / "checkpoint.pt"
        path.replace(aside := path.with_name("damaged-checkpoint.pt"))
        warn(f"{why}; it is now {aside.name}, and the run starts again")

    def finish(self, result: dict[str, Any], weights: dict[str, Tensor] | None) -> None:
        """Write the best weights and the result, and delete the checkpoint, which is no longer needed."""
        if weights is not None:
            tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
            write_atomically(self.path / "best.safetensors", safetensors.torch.save(tensors))
        write_json(self.path / "result.json", result)
        (self.path / "checkpoint.pt").unlink(missing_ok=True)
