"""The training loop of the commands: any task, one process or several, resumable after every epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.errors import CheckpointError, TrainingError
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning import ranks
from smcp_fx.pruning.solve import Solve
from smcp_fx.training.teacher import Teacher


@dataclass(frozen=True)
class Epoch:
    """An epoch: number (from 1), mean loss, learning rate at its end, seconds, and evaluated figures."""

    epoch: int
    loss: float
    rate: float
    seconds: float
    values: dict[str, float]


@dataclass
class TrainingLoop:
    """Trains ``network``, prepared or plain, from its present step to the end; a prepared one is pruned.

    ``batches(epoch, seed)``: an epoch's (from 0) batches, equal for equal arguments; the seed is this rank's.
    ``loss(outputs, targets)``: the loss to minimise.
    ``rate(step)``: the learning rate after ``step`` steps, times a parameter group's ``rate_factor``.
    ``evaluate(step)``: figures by name; none at steps without an evaluation.
    ``teacher``: the dense network; ``taught``: the share of its divergence in the loss.
    ``mixed``: float16 with a scaled loss on a GPU, bfloat16 on a CPU. ``advice``: the remedy for divergence.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Callable[[int, int], Iterable[tuple[Any, Any]]]
    loss: Callable[[Any, Any], Tensor]
    rate: Callable[[int], float]
    evaluate: Callable[[int], dict[str, float]]
    steps_per_epoch: int
    total_steps: int
    checkpoint: Path
    seed: int
    device: torch.device = torch.device("cpu")
    teacher: Teacher | None = None
    taught: float = 0.0
    mixed: bool = False
    advice: str = "Try a smaller learning rate"

    def __post_init__(self) -> None:
        self.step = 0
        self.results: list[Epoch] = []
        self.type = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.mixed and self.type == torch.float16
        )

    def run(
        self,
        *,
        stepped: Callable[[float, float], None] | None = None,
        solved: Callable[[Solve], None] | None = None,
        finished: Callable[[Epoch], None] | None = None,
    ) -> None:
        """Train to the end, with a checkpoint after each epoch.

        ``stepped`` is called after each optimiser step with (share of the steps done, loss), ``solved`` after each
        solve, before the optimiser's step, and ``finished`` after each epoch.
        """
        call = self._on_all_ranks()
        while self.step < self.total_steps:
            epoch, began = self.step // self.steps_per_epoch, time.monotonic()
            loss = self._epoch(epoch, call, stepped, solved)
            values = self.evaluate(self.step)
            seconds = time.monotonic() - began
            self.results.append(Epoch(epoch + 1, loss, self.rate(self.step - 1), seconds, values))
            self.save()
            if finished is not None:
                finished(self.results[-1])

    def _epoch(
        self,
        epoch: int,
        call: nn.Module,
        stepped: Callable[[float, float], None] | None,
        solved: Callable[[Solve], None] | None,
    ) -> float:
        """Train one epoch, or less at the end of training; return the mean loss of this rank."""
        pruner = self.network.pruner if isinstance(self.network, PreparedModel) else None
        call.train()
        seed = (self.seed * 100_003 + epoch) * 1009 + ranks.rank()
        torch.manual_seed(seed)
        losses: list[float] = []
        for inputs, targets in self.batches(epoch, seed):
            if self.step >= self.total_steps:
                break
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(self.step) * group.get("rate_factor", 1.0)
            loss = self._loss(call, moved(inputs, self.device, channels_last=self.mixed), targets)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            # With several ranks, all check at the epoch's end, so that none is left waiting.
            if not ranks.distributed():
                self._check(losses[-1], f"at step {self.step + 1} of {self.total_steps} (epoch {epoch + 1})")
            self.step += 1
            if pruner is not None:
                solve = pruner.step(self.scaler if self.scaler.is_enabled() else None)
                if solve is not None and solved is not None:
                    solved(solve)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if stepped is not None:
                stepped(self.step / self.total_steps, losses[-1])
        mean = math.fsum(losses) / max(len(losses), 1)
        self._check(mean, f"in epoch {epoch + 1}")
        return mean

    def _loss(self, call: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """Return the loss of one batch to minimise."""
        with torch.autocast(self.device.type, self.type, enabled=self.mixed):
            outputs = call(inputs)
            taught_loss = self.teacher(inputs, outputs) if self.teacher is not None and self.taught else None
        if taught_loss is not None and self.taught == 1:
            return taught_loss
        loss = self.loss(outputs, moved(targets, self.device))
        return loss if taught_loss is None else (1 - self.taught) * loss + self.taught * taught_loss

    def _check(self, loss: float, when: str) -> None:
        if math.isfinite(loss):
            return
        saved = f"; the last good state is in {self.checkpoint}" if self.checkpoint.exists() else ""
        raise TrainingError(f"the loss is {loss} {when}: training has diverged. {self.advice}{saved}.")

    def save(self) -> None:
        """Write the checkpoint, completely or not at all."""
        results = [[r.epoch, r.loss, r.rate, r.seconds, r.values] for r in self.results]
        state = {"step": self.step, "results": results}
        save_checkpoint(self.checkpoint, self.network, self.optimizer, self.scaler, extras=state)

    def load(self) -> bool:
        """Load the checkpoint; return False if there is none."""
        if not self.checkpoint.exists():
            return False
        extras = load_checkpoint(self.checkpoint, self.network, self.optimizer, self.scaler)
        try:
            step, results = int(extras["step"]), [Epoch(*entry) for entry in extras["results"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.checkpoint} is not a checkpoint of this version's training loop; start without --resume"
            ) from error
        self.step, self.results = step, results
        return True

    def _on_all_ranks(self) -> nn.Module:
        if not ranks.distributed():
            return self.network
        return DistributedDataParallel(
            self.network, device_ids=[self.device] if self.device.type == "cuda" else None
        )


def moved(value: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Return the value with its tensors, also in lists and dicts, on the device."""
    if isinstance(value, Tensor):
        value = value.to(device, non_blocking=True)
        last = channels_last and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if last else value
    if isinstance(value, dict):
        return {key: moved(item, device, channels_last) for key, item in value.items()}
    return [moved(item, device, channels_last) for item in value]
