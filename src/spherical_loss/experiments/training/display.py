"""What the training loop tells about its runs; who shows it, and how, is decided elsewhere (``running/progress.py``)."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from spherical_loss.experiments.training.settings import Run


class Display:
    """Prints nothing: for ``--quiet``, and as the base of the others. Use as a context manager."""

    several_heads = False
    """Whether the label of a run includes its head."""

    def label(self, run: Run) -> str:
        head = getattr(run.settings, "head", None)
        return f"{run.loss}{f'/{head}' if self.several_heads else ''}, seed {run.seed}"

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def kept(self, run: Run, result: dict[str, Any], versions: str = "") -> None:
        """A run that was finished before, with other ``versions`` than those of now if it is not empty."""

    def started(self, run: Run, epoch: int) -> None:
        """A run starts, or resumes after ``epoch`` epochs."""

    def step(self, run: Run, epoch: int, step: int, steps: int, loss: float) -> None:
        """Within an epoch."""

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """After an epoch."""

    def finished(self, run: Run, result: dict[str, Any]) -> None:
        """A run is finished, has diverged, or was pruned while it paused."""

    def note(self, run: Run, text: str) -> None:
        """Something unusual about a run."""
