"""Train an output layer sharded over processes, with checkpoints, so that a process that dies costs only the last steps.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/sharded_training.py --folder runs/sharded

Each rank keeps its share of the rows of the output layer and brings its own minibatches; the trunk is replicated with
DistributedDataParallel. When a rank dies the others stop, and torchrun starts all of them again, here three times at most: they
resume from the last checkpoint. So does the same command later, with this or another number of processes. The task is made up:
to find which of many classes a noisy vector belongs to.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spherical_loss import FactoredHead, FactoredSGD, TaylorSoftmaxLoss, files
from spherical_loss.files import DamagedFileError
from spherical_loss.heads.checkpoint import load_checkpoint, save_checkpoint
from spherical_loss.processes import end, only_job, process_group


def batch(step: int, rank: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy codes of random classes: the binary digits of the class, as -1 and 1."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    target = torch.randint(classes, (size,), generator=generator)
    bits = target.unsqueeze(1) >> torch.arange(classes.bit_length()) & 1
    return (2.0 * bits - 1) + 0.1 * torch.randn(bits.shape, generator=generator), target


def load(folder: Path, head: FactoredHead, trunk: nn.Module, rank: int) -> None:
    """Load the newest complete checkpoint, if there is one; one that was being written when a process died has another name."""
    for checkpoint in sorted(folder.glob("step-*"), key=lambda path: -int(path.name.split("-")[1])):
        try:
            state = files.load(checkpoint / "trunk.pt")
            load_checkpoint(head, checkpoint)
        except (DamagedFileError, FileNotFoundError) as error:  # on all ranks, or on none
            if rank == 0:
                print(f"{checkpoint.name} is put aside: {error}", flush=True)
                checkpoint.rename(folder / checkpoint.name.replace("step", "damaged"))
            continue
        trunk.load_state_dict(state)
        if rank == 0:
            print(f"resuming from {checkpoint.name}", flush=True)
        return


def save(folder: Path, step: int, head: FactoredHead, trunk: nn.Module, rank: int) -> None:
    partial = folder / f"partial-{step}"
    save_checkpoint(head, partial)
    if rank == 0:
        files.save(trunk.state_dict(), partial / "trunk.pt")
        partial.rename(folder / f"step-{step}")
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=64, help="examples of each rank")
    parser.add_argument("--lr", type=float, default=300.0, help="of the output layer")
    options = parser.parse_args()
    with process_group("gloo", timeout=timedelta(minutes=5)) as group, only_job(options.folder):  # the longest wait
        train(options, group)
    end()


def train(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()

    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(options.classes.bit_length(), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    head = FactoredHead(64, options.classes, group=group)
    load(options.folder, head, trunk, rank)
    network, loss = DistributedDataParallel(trunk), TaylorSoftmaxLoss()
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1), FactoredSGD(head, lr=options.lr)]

    for step in range(head.steps + 1, options.steps + 1):
        x, target = batch(step, rank, options.batch_size, options.classes)
        value = loss(head(network(x), target))
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % options.every == 0 or step == options.steps:
            save(options.folder, step, head, trunk, rank)
            if rank == 0:
                print(f"step {step}: loss {value.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
