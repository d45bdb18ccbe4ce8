"""TensorBoard event files, on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spherical_loss.experiments.errors import UserError


class EventWriter:
    """Writes an epoch's record as scalars; ``writer`` is torch's ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def add(self, record: dict[str, Any]) -> None:
        epoch = record["epoch"]
        for name in ("lr", "train_loss", "seconds"):
            self.writer.add_scalar(name, record[name], epoch)
        for name, value in record["valid"].items():
            if value is not None:
                self.writer.add_scalar(f"valid/{name}", value, epoch)

    def close(self) -> None:
        self.writer.close()


def event_writer(folder: Path, epoch: int) -> EventWriter:
    """Events go to ``folder/tensorboard``; those after ``epoch``, of a process that was killed, are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs TensorBoard: pip install 'spherical-loss[tensorboard]'") from error
    return EventWriter(SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1))


def write_events(folder: Path, history: list[dict[str, Any]]) -> None:
    """The events of a run that was finished before, if it has none."""
    if not (folder / "tensorboard").exists():
        writer = event_writer(folder, 0)
        for record in history:
            writer.add(record)
        writer.close()
