"""Ways from a trained network to a smaller one, each with so many optimiser steps: ours, and rivals.

Some choose channels before any step (`without_training_methods`; ours repairs as well), some learn masks in all of
the steps, and a narrow network starts from random weights. All learn by the product's training loop, from the same
images in the same order, with the dense network as teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from pretrained.networks import STEPS
from pretrained.tasks import Task
from without_training_methods import METHODS as CHOICES
from without_training_methods import Found, Setting

import smcp_fx
from accuracy.training import TAUGHT, Effort, train
from accuracy.variants import VARIANTS
from smcp_fx.config import MethodConfig

#: What a schedule counts as an epoch; the shares of it are what matter.
_EPOCH = 10


def _first(choice: str, taught: float = TAUGHT) -> Callable[[Setting, Task, float, Effort], Found]:
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
    "soft masks": _masks(smcp_fx.PruningConfig()),
    "permanent masks": _masks(MethodConfig(mask="permanent")),
    "as published": _masks(MethodConfig.published()),
    "narrow, from scratch": _narrow(0),
    "narrow, dense steps as well": _narrow(1),
    "ours, half taught": _first("ours", taught=0.5),
    "ours, taught alone": _first("ours", taught=1.0),
    **VARIANTS,
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
    return method if method in CHOICES and not method.startswith("ours without") else "ours"


def steps_of(task: Task, network: str, budget: float) -> int:
    """Optimiser steps of a budget, a share of what the dense network was trained for."""
    return round(budget * STEPS[network] * task.steps)
