"""TensorBoard event files, on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from spherical_loss.experiments.errors import UserError
from spherical_loss.experiments.files.atomic import named
from spherical_loss.experiments.files.failures import silent_threads


class EventWriter:
    """Writes an epoch's record as scalars, with a ``SummaryWriter`` that writes to ``folder`` in its own thread."""

    def __init__(self, make: Callable[[], Any], folder: Path) -> None:
        self.folder, self.silence = folder, ExitStack()
        self.silence.enter_context(silent_threads(OSError))
        with self.errors_named():
            self.writer = make()

    def add(self, record: dict[str, Any]) -> None:
        epoch = record["epoch"]
        values = {name: record[name] for name in ("lr", "train_loss", "seconds")}
        values |= {f"valid/{name}": value for name, value in record["valid"].items() if value is not None}
        with self.errors_named():
            for name, value in values.items():
                self.writer.add_scalar(name, value, epoch)
            self.writer.flush()

    def close(self) -> None:
        with self.silence, self.errors_named():
            self.writer.close()

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise named(
                error, self.folder
            ) from error  # the thread stays silenced: it may still be about to print the same error


def event_writer(folder: Path, epoch: int) -> EventWriter:
    """Events go to ``folder/tensorboard``; those after ``epoch``, of a process that was killed, are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs TensorBoard: pip install 'spherical-loss[tensorboard]'") from error
    place = folder / "tensorboard"
    return EventWriter(lambda: SummaryWriter(str(place), purge_step=epoch + 1), place)


def write_events(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write the events of a run that was finished before, if it has none."""
    if not (folder / "tensorboard").exists():
        writer = event_writer(folder, 0)
        for record in history:
            writer.add(record)
        writer.close()
