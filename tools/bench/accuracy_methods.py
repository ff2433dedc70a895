"""The cases of the accuracy benchmark, and how each gets from the dense network to its own.

All methods of a seed start from the same dense network (the narrow one trains from scratch instead, for as many
steps as the dense network and the pruning took together), see the same images in the same order, and have the same
number of steps and learning rates.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accuracy_rivals import (
    GreedyPruner,
    TorchPruningTaylor,
    magnitude_masks,
    stage_widths,
    uniform_counts,
)
from accuracy_task import SmallResNet, Task
from torch import nn

import smcp_fx
from smcp_fx.channels import ChannelGraph
from smcp_fx.costs.binding import CostModel
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.pruning.pruner import Solve

#: The paper's ImageNet schedule: epochs of 90, and so are the others that its supplement tries.
EPOCHS, SCHEDULE = 90, (10, 30, 45)

Config = smcp_fx.PruningConfig
_PUBLISHED = {
    "width_exponent": 0.0,
    "memory": 0.0,
    "tolerance": 0.0,
    "allocation": "paper",
    "batch_norm_scaling": True,
}

#: This library's pruner with other options; each changes only what it names.
OPTIONS: dict[str, dict[str, Any]] = {
    "soft": {},
    "soft + scaling": {"batch_norm_scaling": True},
    "permanent": {"mask": "permanent"},
    "permanent + scaling": {"mask": "permanent", "batch_norm_scaling": True},
    "importances added up": {"width_exponent": 0.0},
    "paper allocation": {"allocation": "paper"},
    "as published": _PUBLISHED,
    "as published, no scaling": {**_PUBLISHED, "batch_norm_scaling": False},
    "as published, permanent": {**_PUBLISHED, "batch_norm_scaling": False, "mask": "permanent"},
    "direct γ gradient": {"gamma_gradient": "direct", "batch_norm_scaling": True},
    "layer pruning": {"layer_pruning": True},
}
#: The default at other intervals between solves, and on other schedules.
INTERVALS = {"r × 1/2": 0.5, "r × 2": 2.0, "r × 4": 4.0}
SCHEDULES = {
    f"schedule {triple}": triple for triple in ((10, 35, 45), (10, 40, 35), (5, 20, 60), (5, 30, 50))
}
RIVALS = ("uniform width", "one-shot magnitude", "greedy output channels", "Torch-Pruning Taylor")
ABLATION = ("soft", "soft + scaling", "permanent", "permanent + scaling")
METHODS = (*OPTIONS, *INTERVALS, *SCHEDULES, *RIVALS)


@dataclass(frozen=True)
class Case:
    """One method at one target: a fraction of the dense network's ``cost``, "flops" or "latency"."""

    method: str
    cost: str
    target: float


@dataclass
class Outcome:
    """The final network, the units it keeps by group, and what was noted on the way.

    ``at_stop``: test accuracy when masks were fixed; ``solves``: the pruner's history, where it has one.
    """

    model: nn.Module
    counts: dict[str, int]
    at_stop: float | None = None
    solves: list[Solve] = field(default_factory=list)


class UnavailableError(Exception):
    """A case that cannot run here, and why."""


def blocks() -> list[list[Case]]:
    """Every case, in blocks that are run for all seeds one after the other, the most telling first."""

    def at(cost: str, targets: tuple[float, ...], methods: tuple[str, ...]) -> list[Case]:
        return [Case(method, cost, target) for target in targets for method in methods]

    sensitivity = (*INTERVALS, *SCHEDULES)
    published = ("as published, no scaling", "as published, permanent")
    return [
        at("flops", (0.25,), (*ABLATION, *RIVALS)),
        at("flops", (0.1, 0.5), (*ABLATION, "uniform width")),
        at(
            "flops",
            (0.25,),
            ("importances added up", "paper allocation", "as published", "direct γ gradient"),
        ),
        at("flops", (0.25,), sensitivity),
        at("latency", (0.5, 0.4, 0.25, 0.1), ABLATION),
        at("flops", (0.25,), ("layer pruning", *published)),
        at("flops", (0.1,), ("layer pruning",)),
    ]


def config_of(method: str) -> Config:
    """The options of a method of this library; `UnavailableError` if this version lacks one."""
    options = OPTIONS.get(method, {})
    known = {option.name for option in dataclasses.fields(Config)}
    if missing := options.keys() - known:
        raise UnavailableError(f"this version has no option {', '.join(sorted(missing))}")
    return Config(**options)


def schedule_of(method: str, task: Task) -> smcp_fx.Schedule:
    """The paper's schedule at this length, or the method's own."""
    effort = task.effort
    plain = smcp_fx.Schedule.scaled(effort.epochs, effort.steps_per_epoch)
    every = max(1, round(plain.every * INTERVALS.get(method, 1.0)))
    parts = [part * effort.epochs / EPOCHS for part in SCHEDULES.get(method, SCHEDULE)]
    return smcp_fx.Schedule(effort.epochs, effort.steps_per_epoch, parts[0], parts[1], parts[2], every)


def run_case(case: Case, dense: SmallResNet, task: Task, seed: int, latency: LatencyCost | None) -> Outcome:
    """Get to the case's target from a copy of ``dense``; `UnavailableError` where that cannot be done here."""
    torch.manual_seed(10_007 + seed)
    if case.method in RIVALS:
        if case.cost != "flops":
            raise UnavailableError(f"{case.method} is compared at equal FLOPs only")
        return _RIVAL_RUNS[case.method](case, copy.deepcopy(dense), task, seed)
    cost: str | CostModel = case.cost
    if case.cost == "latency":
        if latency is None:
            raise UnavailableError("no latency table was given")
        cost = latency
    config, schedule = config_of(case.method), schedule_of(case.method, task)
    prepared = smcp_fx.prepare(
        dense, task.example, target=case.target, cost=cost, schedule=schedule, config=config
    )
    pruner = prepared.pruner
    pruner.check_target()
    noted = _AtStop(task, prepared, schedule.last_step)

    def before_step(_: int) -> bool:
        pruner.step()
        return False

    _fit(task, prepared, seed, before_step, noted)
    return Outcome(smcp_fx.convert(prepared), pruner.counts, noted.accuracy, pruner.history)


class _AtStop:
    """Called after every step; notes the test accuracy after step ``last``."""

    def __init__(self, task: Task, model: nn.Module, last: int) -> None:
        self.task, self.model, self.last = task, model, last
        self.accuracy: float | None = None

    def __call__(self, step: int) -> None:
        if step == self.last:
            self.accuracy = self.task.accuracy(self.model)


def _fit(task: Task, model: nn.Module, seed: int, before_step: Any, after_step: Any) -> None:
    """The steps of pruning and fine-tuning that every method has."""
    task.fit(model, task.effort.steps, task.effort.pruning_lr, 2 * seed + 1, before_step, after_step)


def sizes_of(channels: ChannelGraph) -> dict[str, int]:
    """The free groups' sizes."""
    return {group.name: group.size for group in channels.groups if group.free}


def _uniform(case: Case, dense: SmallResNet, task: Task, seed: int) -> Outcome:
    prepared = smcp_fx.prepare(dense, task.example, target=case.target, config=Config(multiple=1))
    pruner, channels = prepared.pruner, prepared.channels
    counts = uniform_counts(pruner.cost, sizes_of(channels), pruner.target)
    model = SmallResNet(stage_widths(channels, counts))
    effort = task.effort
    task.fit(model, effort.dense_steps + effort.steps, effort.lr, seed=2 * seed)
    return Outcome(model, counts)


def _magnitude(case: Case, dense: SmallResNet, task: Task, seed: int) -> Outcome:
    prepared = smcp_fx.prepare(dense, task.example, target=case.target, config=Config(multiple=1))
    counts = uniform_counts(prepared.pruner.cost, sizes_of(prepared.channels), prepared.pruner.target)
    prepared.set_masks(magnitude_masks(prepared, counts))
    model = smcp_fx.convert(prepared)
    at_once = task.accuracy(model)
    _fit(task, model, seed, None, None)
    return Outcome(model, counts, at_once)


def _greedy(case: Case, dense: SmallResNet, task: Task, seed: int) -> Outcome:
    config = Config(mask="permanent", batch_norm_scaling=False)
    schedule = schedule_of(case.method, task)
    prepared = smcp_fx.prepare(dense, task.example, target=case.target, config=config)
    pruner = GreedyPruner(prepared, prepared.pruner.cost)
    full, final = prepared.pruner.full_cost, prepared.pruner.target
    noted = _AtStop(task, prepared, schedule.last_step)

    def before_step(step: int) -> bool:
        pruner.step()
        if schedule.due(step):
            pruner.prune(schedule.target(step, full, final))
        return False

    _fit(task, prepared, seed, before_step, noted)
    return Outcome(smcp_fx.convert(prepared), pruner.counts, noted.accuracy)


def _torch_pruning(case: Case, dense: SmallResNet, task: Task, seed: int) -> Outcome:
    channels = smcp_fx.prepare(dense, task.example).channels
    schedule = schedule_of(case.method, task)
    try:
        pruner = TorchPruningTaylor(dense, task, schedule, case.target, seed=3_000_017 + seed)
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{error}: pip install torch-pruning==1.6.1") from error
    noted = _AtStop(task, dense, schedule.last_step)
    _fit(task, dense, seed, pruner.before_step, noted)
    counts = {
        group.name: dense.get_submodule(group.producers[0]).out_channels
        for group in channels.groups
        if group.free
    }
    return Outcome(dense, counts, noted.accuracy)


_RIVAL_RUNS: dict[str, Callable[[Case, SmallResNet, Task, int], Outcome]] = dict(
    zip(RIVALS, (_uniform, _magnitude, _greedy, _torch_pruning), strict=True)
)
