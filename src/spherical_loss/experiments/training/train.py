"""One run, from top to bottom: plain PyTorch."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spherical_loss.experiments.models.loss_names import make_loss
from spherical_loss.experiments.models.network import Network
from spherical_loss.experiments.training.display import Display
from spherical_loss.experiments.training.distributed import Objective, device_of, objective_of, on_first, part_of, rank, summed
from spherical_loss.experiments.training.load import Load, alone
from spherical_loss.experiments.training.metrics import as_in_paper
from spherical_loss.experiments.training.recipes import RECIPES, Examples
from spherical_loss.experiments.training.records import check, check_metrics, is_count, is_number
from spherical_loss.experiments.training.run_folder import RunFolder
from spherical_loss.experiments.training.settings import Run, Settings
from spherical_loss.experiments.training.tensorboard import event_writer, write_events

DEFAULT_THREADS = torch.get_num_threads()
CHECK_EVERY = 50  # steps between checks of the loss


class DivergedError(Exception):
    """The loss, or a validation metric, is no longer a number."""


@dataclass
class Progress:
    """Where a run stands after an epoch; with the network, the optimizer and the random state, all a checkpoint needs."""

    epoch: int = 0
    best: float = math.inf
    best_epoch: int = 0
    stale: int = 0
    """Epochs since the best one."""
    history: list[dict[str, Any]] = field(default_factory=list)
    start: dict[str, float | None] | None = None
    """The validation before the first step, if the task asks for it."""
    best_weights: dict[str, Tensor] = field(default_factory=dict)

    def finished(self, settings: Settings) -> bool:
        return self.epoch >= settings.epochs or self.stale >= settings.patience


def train(
    run: Run,
    root: Path,
    display: Display,
    checkpoint_seconds: float = 10.0,
    tensorboard: bool = False,
    wait: bool = True,
    until: int | None = None,
) -> dict[str, Any]:
    """Train ``run`` in its folder under ``root`` and return its result; a finished run's result is only read.

    With ``until`` the run pauses after that many epochs, unless it is finished before: it keeps a checkpoint, and returns
    ``{"status": "paused", "epochs": ..., "valid": ...}`` with the best validation so far.

    If another process is training the run, wait for it, or, without ``wait``, raise a
    :class:`~spherical_loss.experiments.files.locks.BusyError`.
    """
    folder = RunFolder(root, run)
    if (result := on_first(folder.result)) is None:
        waiting = partial(display.note, run, "another process is training it; waiting for its result")
        with ExitStack() as held:
            on_first(lambda: held.enter_context(folder.lock(wait, waiting)))
            if (result := on_first(folder.result)) is None:
                return train_in(folder, display, checkpoint_seconds, tensorboard, until)
    if tensorboard:
        on_first(lambda: write_events(folder.path, folder.history()))
    display.kept(run, result, on_first(folder.other_versions))
    return result


def train_in(
    folder: RunFolder, display: Display, checkpoint_seconds: float, tensorboard: bool, until: int | None = None
) -> dict[str, Any]:
    """Train the run of ``folder``, from its checkpoint if it has one.

    The order of the examples depends on the seed and the epoch alone, so a run that resumes from a checkpoint makes the same
    steps as one that was never stopped. Checkpoints are written at most every ``checkpoint_seconds``.
    """
    on_first(folder.create)
    run = folder.run
    recipe, settings = RECIPES[run.task], run.settings
    device = device_of(settings.device)
    if device.type == "cuda":  # the same seed gives the same numbers; on the CPU it does so already
        torch.backends.cudnn.deterministic = True
    torch.set_num_threads(settings.threads or DEFAULT_THREADS)
    torch.manual_seed(run.seed)
    splits = recipe.load(settings, run.seed)
    train_set, valid_set, test_set = (part.to(device) for part in splits)
    loss = make_loss(run.loss, run.loss_options).to(device)
    network = recipe.network(settings, train_set, loss).to(device)
    optimizer = recipe.optimizer(network, settings)

    progress = Progress()
    if (state := on_first(folder.load_checkpoint)) is not None:
        try:
            progress = restore(state, network, optimizer, folder.language)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # from another version, or forged
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            on_first(partial(folder.put_checkpoint_aside, f"{folder.path / 'checkpoint.pt'} does not fit this run ({reason})"))
            return train_in(folder, display, checkpoint_seconds, tensorboard, until)
    objective = objective_of(network, loss, partial(display.note, run))
    events = event_writer(folder.path, progress.epoch) if tensorboard and rank() == 0 else None
    saved, saved_epoch = time.monotonic(), progress.epoch
    display.started(run, progress.epoch)
    if progress.epoch and (versions := on_first(folder.other_versions)):
        display.note(run, f"was started with {versions}; delete {folder.path} to train it with one version")
    try:
        if recipe.start and progress.start is None:
            progress.start = on_first(lambda: recipe.evaluate(network, loss, valid_set))
        while not progress.finished(settings):
            if until is not None and progress.epoch >= until:
                if progress.epoch > saved_epoch:
                    on_first(lambda: folder.save_checkpoint(checkpoint(progress, network, optimizer)))
                return {"status": "paused", "epochs": progress.epoch, "valid": best_validation(progress)}
            began, load = time.perf_counter(), Load()
            train_loss = train_epoch(network, objective, optimizer, train_set, run, progress.epoch, display)
            trained = time.perf_counter()
            valid = on_first(lambda: recipe.evaluate(network, loss, valid_set))
            record = {
                "epoch": progress.epoch + 1,
                "lr": optimizer.param_groups[0]["lr"],
                "train_loss": as_in_paper(train_loss, loss, train_set.D),
                "valid": valid,
                "train_seconds": trained - began,
                "seconds": time.perf_counter() - began,
                **load.seconds(),
            }
            after_epoch(progress, record, network, optimizer, settings)
            on_first(partial(folder.log, record))
            display.epoch(run, record)
            if events is not None:
                events.add(record)
            passed = time.monotonic() - saved
            if on_first(partial(bool, passed >= checkpoint_seconds)) and not progress.finished(settings):
                on_first(lambda: folder.save_checkpoint(checkpoint(progress, network, optimizer)))
                saved, saved_epoch = time.monotonic(), progress.epoch
        network.load_state_dict(progress.best_weights)
        sizes = {"train": len(train_set), "valid": len(valid_set), "test": len(test_set), "D": train_set.D}
        result = on_first(lambda: finished_result(progress, sizes, recipe.evaluate(network, loss, test_set)))
        on_first(lambda: folder.finish(result, progress.best_weights))
    except (DivergedError, FloatingPointError) as why:  # the factored head's step raises it by itself
        result = {"status": "diverged", "epoch": progress.epoch + 1, "reason": str(why)}
        on_first(lambda: folder.finish(result, None))
    finally:
        if events is not None:
            events.close()
    display.finished(run, result)
    return result


def train_epoch(
    network: Network,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    data: Examples,
    run: Run,
    epoch: int,
    display: Display,
) -> float:
    """One pass over ``data``, in the order it gives for this epoch; returns the mean training loss."""
    network.train()
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + epoch)
    order = data.order(epoch, generator)
    device = next(network.parameters()).device
    batches = batches_of(order, run.settings.batch_size, network.smallest_batch)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for step, rows in enumerate(batches):
        x, target = data.batch(rows.to(device), generator)
        part = part_of(len(rows))
        value = objective(x[part.rows], target[part.rows])
        optimizer.zero_grad()
        (value * part.share).backward()
        optimizer.step()
        value = value.detach()
        total += value * part.n
        if step % CHECK_EVERY == 0 or step == len(batches) - 1:
            if not math.isfinite(float(summed(total))):
                raise DivergedError(f"the training loss is {float(value)} at step {step + 1} of epoch {epoch + 1}")
            display.step(run, epoch, step + 1, len(batches), float(value))
    return float(summed(total)) / len(order)


def batches_of(order: Tensor, size: int, smallest: int) -> list[Tensor]:
    """The rows of each step. A last batch of fewer than ``smallest`` joins the one before it."""
    batches = list(order.split(size))
    if len(batches) > 1 and len(batches[-1]) < smallest:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def after_epoch(
    progress: Progress, record: dict[str, Any], network: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings
) -> None:
    """Keep the best weights, and lower the learning rate: to the next point of a cosine, or by half after ``halve_after``
    epochs in a row without a better validation."""
    valid = record["valid"]
    if any(value is not None and not math.isfinite(value) for value in valid.values()):
        raise DivergedError(f"the validation metrics are not finite after epoch {record['epoch']}: {valid}")
    monitored = valid[settings.monitor]
    if monitored is None:  # nll of a loss without a distribution
        monitored = valid["loss"]
    progress.epoch += 1
    progress.stale += 1
    progress.history.append(record)
    if monitored < progress.best:
        progress.best, progress.best_epoch, progress.stale = monitored, progress.epoch, 0
        progress.best_weights = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    factor = 1.0
    if settings.decay == "cosine":
        factor = cosine(progress.epoch / settings.epochs) / cosine((progress.epoch - 1) / settings.epochs)
    elif progress.stale > 0 and progress.stale % settings.halve_after == 0:
        factor = 0.5
    for group in optimizer.param_groups:
        group["lr"] *= factor


def cosine(part: float) -> float:
    """The factor of the learning rate after this part of the epochs: 1 at the start, 0 at the end.

    >>> [round(cosine(part), 3) for part in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 0.854, 0.5, 0.0]
    """
    return (1 + math.cos(math.pi * part)) / 2


def best_validation(progress: Progress) -> dict[str, float | None]:
    return progress.history[progress.best_epoch - 1]["valid"]


def finished_result(progress: Progress, sizes: dict[str, int], test: dict[str, float | None]) -> dict[str, Any]:
    seconds = [record["seconds"] for record in progress.history]
    start = {} if progress.start is None else {"start": progress.start}
    return {
        "status": "finished",
        "best_epoch": progress.best_epoch,
        "epochs": progress.epoch,
        "seconds_per_epoch": sum(seconds) / len(seconds),
        "seconds_to_best": sum(seconds[: progress.best_epoch]),
        "alone": alone(progress.history),
        **start,
        "valid": best_validation(progress),
        "test": test,
        "data": sizes,
    }


def checkpoint(progress: Progress, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        **vars(progress),
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random_state": torch.get_rng_state(),
    }


def restore(state: dict[str, Any], network: nn.Module, optimizer: torch.optim.Optimizer, language: bool) -> Progress:
    """Restore the state of the run; raises one error or another if it does not fit."""
    if wrong := {*state} ^ {*vars(Progress()), "network", "optimizer", "random_state"}:
        raise ValueError(f"it has wrong or missing keys: {', '.join(sorted(wrong))}")
    if state["best_weights"]:
        network.load_state_dict(state["best_weights"])  # only to check them now: at the end it would be too late to fail
    network.load_state_dict(state.pop("network"))
    restore_optimizer(state.pop("optimizer"), optimizer)
    torch.set_rng_state(state.pop("random_state"))
    check(state, "it", epoch=is_count, best=is_number, best_epoch=is_count, stale=is_count)
    progress = Progress(**state)
    if len(progress.history) != progress.epoch or not 0 < progress.best_epoch <= progress.epoch:
        raise ValueError(f"its history is not that of {progress.epoch} epochs, the best of which is {progress.best_epoch}")
    if progress.start is not None:
        check_metrics(progress.start, "'start'", language)
    return progress


def restore_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """``load_state_dict``, which takes values of any type and tensors of any shape; here they are an error."""
    ours = [{name: type(value) for name, value in group.items()} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    if ours != [{name: type(value) for name, value in group.items()} for group in optimizer.param_groups]:
        raise ValueError("its optimizer has other options, or options of another type")
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape not in ((), parameter.shape):
                raise ValueError(f"{name} of its optimizer is no tensor of the shape {tuple(parameter.shape)}")
