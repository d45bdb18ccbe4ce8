"""``python -m spherical_loss``, and ``torchrun --nproc-per-node 2 -m spherical_loss``: the command line."""

from __future__ import annotations

import torch.distributed as dist

from spherical_loss.processes import end


def main() -> int:
    """The command line of the experiments; without what they need, a message."""
    try:
        from spherical_loss.experiments.cli import main as command_line
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("spherical_loss"):
            raise
        raise SystemExit(f"spherical-loss: {error.name} is missing; pip install 'spherical-loss[experiments]'") from None
    except KeyboardInterrupt:  # before there was a command that could say so
        return 130
    code = command_line()
    if dist.is_torchelastic_launched():
        end(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
