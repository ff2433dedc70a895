"""Ways from a trained network to a smaller one, each with so many optimiser steps: ours, and rivals.

Some choose channels before any step (`without_training_methods`; ours repairs as well), some learn masks in all of
the steps, and a narrow network starts from random weights. All learn by the product's training loop, from the same
images in the same order, with the dense network as teacher.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from pretrained.networks import STEPS
from pretrained.tasks import Task, cosine
from torch import nn
from without_training_methods import METHODS as CHOICES
from without_training_methods import Found, Setting

import smcp_fx
from smcp_fx.training import TrainingLoop

_BATCH, _SMOOTHING, _DECAY = 64, 0.05, 1e-4
#: Share of the dense network's answers in the loss, as in smcp-compile.
_TAUGHT = 0.9
#: What a schedule counts as an epoch; the shares of it are what matter.
_EPOCH = 10
_PUBLISHED = smcp_fx.PruningConfig(
    width_exponent=0, memory=0, tolerance=0, allocation="paper", batch_norm_scaling=True
)


@dataclass(frozen=True)
class Effort:
    """Optimiser steps, their peak learning rate, the seed of their images, the dense network's share of the loss.

    ``dense_steps``: what the dense network was trained for.
    """

    steps: int
    rate: float
    seed: int
    dense_steps: int
    taught: float = _TAUGHT


def train(model: nn.Module, setting: Setting, task: Task, effort: Effort) -> None:
    """Train to the end of the effort: SGD with Nesterov momentum, a short rise of the rate and a cosine."""
    if not effort.steps:
        return
    first = (effort.seed + 77) * 1_000_003
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": _DECAY}, {"params": plain, "weight_decay": 0.0}]
    with tempfile.TemporaryDirectory() as folder:
        TrainingLoop(
            model,
            torch.optim.SGD(groups, effort.rate, momentum=0.9, nesterov=True),
            batches=lambda *_: (task.draw(_BATCH, first + step) for step in range(effort.steps)),
            loss=lambda outputs, labels: F.cross_entropy(outputs, labels, label_smoothing=_SMOOTHING),
            rate=lambda step: effort.rate * cosine(step, effort.steps),
            evaluate=lambda _: {},
            steps_per_epoch=effort.steps,
            total_steps=effort.steps,
            checkpoint=Path(folder) / "end.safetensors",
            seed=effort.seed,
            teacher=smcp_fx.Teacher(setting.model) if effort.taught else None,
            taught=effort.taught,
        ).run()


def _first(choice: str, taught: float = _TAUGHT) -> Callable[[Setting, Task, float, Effort], Found]:
    """Channels go first, then what is left is trained."""

    def method(setting: Setting, task: Task, target: float, effort: Effort) -> Found:
        model, share = CHOICES[choice](setting, target)
        train(model, setting, task, replace(effort, taught=taught))
        return model, share

    return method


def _masks(config: smcp_fx.PruningConfig) -> Callable[[Setting, Task, float, Effort], Found]:
    """Masks are learnt over all of the steps."""

    def method(setting: Setting, task: Task, target: float, effort: Effort) -> Found:
        schedule = smcp_fx.Schedule.scaled(effort.steps / _EPOCH, _EPOCH)
        prepared = smcp_fx.prepare(
            setting.model, setting.example, target=target, cost=setting.cost, schedule=schedule, config=config
        )
        train(prepared, setting, task, effort)
        share = prepared.pruner.present_cost / prepared.pruner.full_cost
        return smcp_fx.convert(prepared, check=False), share

    return method


def _narrow(longer: int) -> Callable[[Setting, Task, float, Effort], Found]:
    """The same share of every layer, from random weights; ``longer``: for the dense network's steps as well."""

    def method(setting: Setting, task: Task, target: float, effort: Effort) -> Found:
        model, share = CHOICES["uniform L2"](setting, target)
        torch.manual_seed(effort.seed)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        train(model, setting, task, replace(effort, steps=effort.steps + longer * effort.dense_steps))
        return model, share

    return method


#: Method by name. Those of `CHOICES` give a usable network without any step.
METHODS: dict[str, Callable[[Setting, Task, float, Effort], Found]] = {
    "ours": _first("ours"),
    "ours, by FLOPs": _first("ours, by FLOPs"),
    "ours without teacher": _first("ours", taught=0.0),
    "ours without repair": _first("ours without repair"),
    "uniform, eliminated and repaired": _first("uniform, eliminated and repaired"),
    "uniform L2": _first("uniform L2"),
    "random": _first("random"),
    "Torch-Pruning": _first("Torch-Pruning"),
    "Torch-Pruning, isomorphic": _first("Torch-Pruning, isomorphic"),
    "torch-kirigami": _first("torch-kirigami"),
    "soft masks": _masks(smcp_fx.PruningConfig()),
    "permanent masks": _masks(smcp_fx.PruningConfig(mask="permanent")),
    "as published": _masks(_PUBLISHED),
    "narrow, from scratch": _narrow(0),
    "narrow, dense steps as well": _narrow(1),
}
_UNIFORM = (
    "random",
    "uniform, eliminated and repaired",
    "narrow, from scratch",
    "narrow, dense steps as well",
)


def chooser(method: str) -> str:
    """Return the method without training that chooses the same widths at the same cost, or nearly so."""
    if method in _UNIFORM:
        return "uniform L2"
    return "ours" if method.startswith("ours without") or method not in CHOICES else method


def steps_of(task: Task, network: str, budget: float) -> int:
    """Optimiser steps of a budget, a share of what the dense network was trained for."""
    return round(budget * STEPS[network] * task.steps)
