"""The training of recipes: SGD along a timeline, on this rank's share of a task's batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, DistributedSampler, Subset

from smcp_fx.pruning import ranks
from smcp_fx.recipes.recipe import Training
from smcp_fx.recipes.task import Task
from smcp_fx.recipes.timeline import Timeline
from smcp_fx.training import TrainingLoop, moved


def training_loop(
    network: nn.Module,
    batches: Batches,
    timeline: Timeline,
    device: torch.device,
    checkpoint: Path,
    seed: int,
    batch_norms: frozenset[str],
) -> TrainingLoop:
    """Return the loop that trains ``network``, prepared or plain, along a timeline.

    ``batch_norms``: names of batch norms' parameters, whose weight decay has its own setting.
    """
    training, schedule = timeline.recipe.training, timeline.schedule
    groups = parameter_groups(network, training, batch_norms)

    def evaluated(step: int) -> dict[str, float]:
        return evaluate(network, batches, device) if timeline.evaluated(step) else {}

    return TrainingLoop(
        network,
        torch.optim.SGD(groups, lr=timeline.peak_rate, momentum=training.momentum),
        batches=batches.epoch,
        loss=batches.task.loss,
        rate=timeline.rate,
        evaluate=evaluated,
        steps_per_epoch=schedule.steps_per_epoch,
        total_steps=schedule.total_steps,
        checkpoint=checkpoint,
        seed=seed,
        device=device,
        mixed=training.mixed_precision and device.type == "cuda",
        advice=f"Try a smaller learning rate (--set training.rate={training.rate / 2:g})",
    )


class Batches:
    """This rank's batches of a task: shuffled ones for training, and its share of the test set."""

    def __init__(self, task: Task, timeline: Timeline, seed: int, workers: int, pinned: bool) -> None:
        self.task = task
        self._batch, self._ranks = timeline.recipe.training.batch, timeline.ranks
        self._workers, self._pinned = workers, pinned
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            task.train, timeline.ranks, ranks.rank(), shuffle=True, seed=seed, drop_last=True
        )
        self._draws = torch.Generator()
        self._train = self._loader(task.train, self._sampler)

    def epoch(self, epoch: int, seed: int) -> Iterable[tuple[Any, Any]]:
        """Return an epoch's training batches, in one order for all ranks; ``seed`` is for augmentation."""
        self._sampler.set_epoch(epoch)
        self._draws.manual_seed(seed)
        return self._train

    def tests(self) -> Iterable[tuple[Any, Any]]:
        """Return this rank's share of the test set; every image is on exactly one rank."""
        size = len(self.task.test)  # type: ignore[arg-type]
        return self._loader(Subset(self.task.test, range(ranks.rank(), size, self._ranks)))

    def _loader(self, data: Any, sampler: Any = None) -> DataLoader[Any]:
        training = sampler is not None
        return DataLoader(
            data, self._batch, sampler=sampler, drop_last=training, num_workers=self._workers,
            persistent_workers=training and self._workers > 0, collate_fn=self.task.collate,
            generator=self._draws if training else None, pin_memory=self._pinned,
        )  # fmt: skip


@torch.no_grad()
def evaluate(network: nn.Module, batches: Batches, device: torch.device) -> dict[str, float]:
    """Return a network's percentages by name on the test set, over all ranks. Its mode is kept."""
    meter = batches.task.meter(device)
    training = network.training
    network.eval()
    try:
        for images, targets in batches.tests():
            meter.update(network(moved(images, device)), moved(targets, device))
    finally:
        network.train(training)
    return meter.compute()


def batch_norm_parameters(network: nn.Module) -> frozenset[str]:
    """Return the names of batch norms' parameters."""
    return frozenset(
        f"{path}.{name}"
        for path, module in network.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_parameters(recurse=False)
    )


def parameter_groups(
    network: nn.Module, training: Training, batch_norms: frozenset[str]
) -> list[dict[str, Any]]:
    """Group parameters by weight decay (own rule for batch norms) and learning rate (own factor for biases)."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        decay = 0.0 if name in batch_norms and not training.batch_norm_decay else training.weight_decay
        factor = training.bias_rate if name.endswith("bias") else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor}
        for (decay, factor), parameters in groups.items()
    ]
