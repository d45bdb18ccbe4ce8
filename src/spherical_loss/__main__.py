"""``python -m spherical_loss``, and ``torchrun --nproc-per-node 2 -m spherical_loss``: the command line."""

import os
import sys

# At once: the module signal imports others, and Ctrl-C meanwhile is a traceback.
from _signal import SIGINT, signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> int:
    """The command line of the experiments; without what they need, a message."""
    signal(SIGINT, stop)
    try:
        from spherical_loss.experiments.cli import main as command_line

        code = command_line()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("spherical_loss"):
            raise
        raise SystemExit(f"spherical-loss: {error.name} is missing; pip install 'spherical-loss[experiments]'") from None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from spherical_loss.processes import end

        end(code)
    return code


def stop(*_: object) -> "NoReturn":
    """Ctrl-C: a line, and out at once, whatever is being imported, trained or waited for.

    Files are whole at any moment, locks end with their process, and workers end with their parent: nothing needs tidying up.
    """
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h")  # the cursor, which the progress display hides
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"\nstopped; the same command continues where it was\n" if sys.stderr.isatty() else STOPPED)
    os._exit(130)


STOPPED = b"stopped; the same command continues where it was\n"

if __name__ == "__main__":
    raise SystemExit(main())
