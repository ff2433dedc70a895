"""The training loop of recipes: SGD, mixed precision, several ranks, a checkpoint an epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.errors import TrainingError
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning import ranks
from smcp_fx.recipes.recipe import Training
from smcp_fx.recipes.task import Task
from smcp_fx.recipes.timeline import Timeline


@dataclass(frozen=True)
class RecipeEpoch:
    """An epoch: number (from 1), mean loss, learning rate at its end, seconds; what was evaluated behind it."""

    epoch: int
    loss: float
    rate: float
    seconds: float
    values: dict[str, float]


class RecipeTrainer:
    """Trains ``network``, prepared or plain, along a timeline; resumable at the end of every epoch.

    ``solved`` is called after each solve.
    """

    def __init__(
        self,
        network: nn.Module,
        task: Task,
        timeline: Timeline,
        device: torch.device,
        checkpoint: Path,
        seed: int,
        workers: int,
        batch_norms: frozenset[str],
    ) -> None:
        self.network, self.task, self.timeline = network, task, timeline
        self.device, self.checkpoint, self.seed = device, checkpoint, seed
        training = timeline.recipe.training
        self.mixed = training.mixed_precision and device.type == "cuda"
        self.step = 0
        self.results: list[RecipeEpoch] = []
        groups = parameter_groups(network, training, batch_norms)
        self.optimizer = torch.optim.SGD(groups, lr=timeline.peak_rate, momentum=training.momentum)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.mixed)
        self._workers = workers
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            task.train, timeline.ranks, ranks.rank(), shuffle=True, seed=seed, drop_last=True
        )
        self._draws = torch.Generator()
        self._batches = self._loader(task.train, training.batch, self._sampler)

    def run(self, finished: Callable[[RecipeEpoch], None]) -> None:
        """Train to the end from wherever the trainer stands."""
        call = self._on_all_ranks()
        schedule = self.timeline.schedule
        while self.step < schedule.total_steps:
            epoch = self.step // schedule.steps_per_epoch
            began = time.monotonic()
            loss = self._epoch(epoch, call)
            values = self.evaluate() if self.timeline.evaluated(self.step) else {}
            rate = self.timeline.rate(self.step - 1)
            self.results.append(RecipeEpoch(epoch + 1, loss, rate, time.monotonic() - began, values))
            self.save()
            finished(self.results[-1])

    def _epoch(self, epoch: int, call: nn.Module) -> float:
        """One epoch, or what is left of the last one; returns the mean loss of this rank."""
        pruner = self.network.pruner if isinstance(self.network, PreparedModel) else None
        call.train()
        self._sampler.set_epoch(epoch)
        seed = (self.seed * 100_003 + epoch) * 1009 + ranks.rank()
        self._draws.manual_seed(seed)  # the seeds of processes that augment
        torch.manual_seed(seed)
        total, done = torch.zeros((), device=self.device), 0
        for images, targets in self._batches:
            if self.step >= self.timeline.schedule.total_steps:
                break
            rate = self.timeline.rate(self.step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["rate_factor"]
            images, targets = self._moved(images), self._moved(targets)
            with torch.autocast(self.device.type, torch.float16, enabled=self.mixed):
                outputs = call(images)
            loss = self.task.loss(outputs, targets)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if pruner is not None:
                pruner.step(self.scaler if self.mixed else None)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            total += loss.detach()
            done += 1
        mean = float(total) / max(done, 1)
        if not math.isfinite(mean):
            saved = f"; the last good state is in {self.checkpoint}" if self.checkpoint.exists() else ""
            raise TrainingError(
                f"the loss is not finite in epoch {epoch + 1}: training has diverged. Try a smaller learning rate "
                f"(--set training.rate={self.timeline.recipe.training.rate / 2:g}){saved}"
            )
        return mean

    def evaluate(self, network: nn.Module | None = None) -> dict[str, float]:
        """Return how good a network is on the test set, by default the one that is trained: percentages by name."""
        return evaluate(network or self.network, self.task, self._tests(), self.device)

    def save(self) -> None:
        """Write the checkpoint; it is complete or not there."""
        results = [[r.epoch, r.loss, r.rate, r.seconds, r.values] for r in self.results]
        state = {"step": self.step, "results": results}
        save_checkpoint(self.checkpoint, self.network, self.optimizer, self.scaler, extras=state)

    def load(self) -> bool:
        """Go back to the checkpoint; False when there is none."""
        if not self.checkpoint.exists():
            return False
        extras = load_checkpoint(self.checkpoint, self.network, self.optimizer, self.scaler)
        self.step = int(extras["step"])
        self.results = [RecipeEpoch(*entry) for entry in extras["results"]]
        return True

    def _on_all_ranks(self) -> nn.Module:
        if not ranks.distributed():
            return self.network
        return DistributedDataParallel(
            self.network, device_ids=[self.device] if self.device.type == "cuda" else None
        )

    def _tests(self) -> DataLoader[Any]:
        """This rank's share of the test set: every image is on one rank."""
        size = len(self.task.test)  # type: ignore[arg-type]
        own = Subset(self.task.test, range(ranks.rank(), size, self.timeline.ranks))
        return self._loader(own, self.timeline.recipe.training.batch)

    def _loader(self, data: Any, batch: int, sampler: Any = None) -> DataLoader[Any]:
        training = sampler is not None
        return DataLoader(
            data, batch, sampler=sampler, drop_last=training, num_workers=self._workers,
            persistent_workers=training and self._workers > 0, collate_fn=self.task.collate,
            generator=self._draws if training else None, pin_memory=self.device.type == "cuda",
        )  # fmt: skip

    def _moved(self, value: Any) -> Any:
        return moved(value, self.device, self.mixed)


@torch.no_grad()
def evaluate(
    network: nn.Module, task: Task, batches: DataLoader[Any], device: torch.device
) -> dict[str, float]:
    """Return how good a network is on batches (of all ranks): percentages by name. The network's mode is kept."""
    meter = task.meter(device)
    training = network.training
    network.eval()
    try:
        for images, targets in batches:
            meter.update(network(moved(images, device)), moved(targets, device))
    finally:
        network.train(training)
    return meter.compute()


def moved(value: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Tensors, also in lists and dicts, on the device."""
    if isinstance(value, Tensor):
        value = value.to(device, non_blocking=True)
        return (
            value.contiguous(memory_format=torch.channels_last)
            if channels_last and value.dim() == 4
            else value
        )
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return [moved(item, device) for item in value]


def batch_norm_parameters(network: nn.Module) -> frozenset[str]:
    """Names of the parameters of batch norms."""
    return frozenset(
        f"{path}.{name}"
        for path, module in network.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_parameters(recurse=False)
    )


def parameter_groups(
    network: nn.Module, training: Training, batch_norms: frozenset[str]
) -> Sequence[dict[str, Any]]:
    """Group parameters by weight decay (batch norms have their own rule) and learning rate (biases have)."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        decay = 0.0 if name in batch_norms and not training.batch_norm_decay else training.weight_decay
        factor = training.bias_rate if name.endswith("bias") else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor}
        for (decay, factor), parameters in groups.items()
    ]
