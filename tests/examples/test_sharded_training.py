"""The sharded example under torchrun, with ranks that are really killed."""

from __future__ import annotations

from pathlib import Path

import torch

from spherical_loss import FactoredHead
from spherical_loss.heads.checkpoint import load_checkpoint
from tests.support.torchrun import run, torchrun

SCRIPT = Path(__file__).parents[2] / "examples" / "sharded_training.py"
CLASSES, STEPS = 500, 100

# Runs the script; its first argument has a word per start, such as "1:step", at which moment that rank of that start is killed.
PROGRAM = '''
import os, pathlib, runpy, signal, sys
import torch.distributed as dist
from spherical_loss import FactoredSGD

rank, start = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
who, moment = [*sys.argv[1].split(), "nobody:"][start].split(":")

def or_die(call, when):
    def wrapper(*arguments, **options):
        if rank == who and when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return wrapper

def damage(checkpoint):
    """A bit of its weights flips."""
    path = max(pathlib.Path(sys.argv[sys.argv.index("--folder") + 1], checkpoint).glob("rows-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return path.write_bytes(content)

if moment == "joining":
    dist.init_process_group = or_die(dist.init_process_group, lambda *_: True)
elif moment == "step":
    FactoredSGD.step = or_die(FactoredSGD.step, lambda optimizer: optimizer.head.steps == 49 and damage("step-40"))
elif moment == "saving":
    pathlib.Path.rename = or_die(pathlib.Path.rename, lambda path, _: path.name == "partial-60")
sys.argv[1:] = sys.argv[2:]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
'''


def trained(folder: Path, deaths: str, restarts: int) -> tuple[int, list[str], str]:
    """The exit code, the checkpoints it resumed from, and all that was printed."""
    program = folder.with_name("program.py")
    program.write_text(PROGRAM)
    options = ("--folder", str(folder), "--classes", str(CLASSES), "--steps", str(STEPS), "--every", "20")
    launcher = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts))
    code, output = run(torchrun(program, deaths, str(SCRIPT), *options, options=launcher))
    return code, [line.split()[-1] for line in output.splitlines() if line.startswith("resuming from")], output


def weights(folder: Path) -> torch.Tensor:
    head = FactoredHead(64, CLASSES, init="zero")
    load_checkpoint(head, folder / f"step-{STEPS}")
    return head.weight


def test_killed_ranks_cost_only_the_last_steps(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    code, resumed_from, output = trained(undisturbed, "", restarts=0)
    assert code == 0, output
    assert resumed_from == []

    code, resumed_from, output = trained(killed, "1:step 1:joining 0:saving", restarts=3)
    assert code == 0, output
    assert output.count("exitcode: -9") == 3
    assert resumed_from == ["step-20", "step-40"], output  # the second start did not get that far
    assert "step-40 is put aside" in output
    assert ".pt is damaged" in output
    assert (killed / "damaged-40").is_dir()
    assert torch.equal(weights(killed), weights(undisturbed))
