"""Variants of our way that were tried in order to gain more from a training budget (docs: experiments.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pretrained.tasks import Task
from torch import Tensor, nn
from without_training_methods import METHODS as CHOICES
from without_training_methods import Found, Setting

import smcp_fx
from accuracy.training import Effort, train
from smcp_fx.kept_channels import Kept, kept_channels

#: Of the budget, what is trained between the two steps of an elimination in two steps.
_BETWEEN = 0.3
#: Weight of a stage's squared error, as a share of its variance, beside the divergence of the answers.
_STAGES = 0.3


class StageTeacher(smcp_fx.Teacher):
    """A teacher of inner outputs as well: of the last batch norm of each width, where both keep the channel."""

    def __init__(self, dense: nn.Module, smaller: nn.Module, kept: Kept) -> None:
        super().__init__(dense, outputs="classes")
        last = {m.num_features: name for name, m in dense.named_modules() if isinstance(m, nn.BatchNorm2d)}
        self._kept = {name: kept[name][1] for name in last.values()}
        self._told: dict[tuple[bool, str], Tensor] = {}
        for network in (self.model, smaller):
            for name in self._kept:
                network.get_submodule(name).register_forward_hook(self._keep(network is smaller, name))

    def _keep(self, ours: bool, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            self._told[ours, name] = output.clone()  # what follows may write into it

        return hook

    def __call__(self, inputs: Any, outputs: Any) -> Tensor:
        """The divergence of the answers, and the errors of the stages."""
        divergence = super().__call__(inputs, outputs)
        errors = []
        for name, channels in self._kept.items():
            wanted = self._told[False, name][:, channels]
            errors.append(F.mse_loss(self._told[True, name], wanted) / wanted.var())
        return divergence + _STAGES * torch.stack(errors).mean()


def taught_by_stages(setting: Setting, task: Task, target: float, effort: Effort) -> Found:
    """With inner outputs of the dense network as targets, too."""
    prepared = copy.deepcopy(setting.ours)
    prepared.pruner.solve(target)
    smaller = smcp_fx.convert(prepared, check=False).eval()
    smcp_fx.repair(smaller, prepared, setting.images)
    kept = kept_channels(prepared.channels, prepared.smcp.units_kept())
    train(smaller, setting, task, effort, StageTeacher(setting.model, smaller, kept))
    return smaller, prepared.pruner.present_cost / prepared.pruner.full_cost


def in_two_steps(setting: Setting, task: Task, target: float, effort: Effort) -> Found:
    """Half of the way, three tenths of the training, then the rest of both."""
    half = copy.copy(setting)
    half.target, half.narrow = target**0.5, None  # shares of the cost, as it is predicted
    model, share = CHOICES["ours"](half, half.target)
    between = round(_BETWEEN * effort.steps)
    train(model, setting, task, replace(effort, steps=between))
    images, labels = (torch.cat(part) for part in zip(*setting.batches, strict=True))
    middle = Setting(model.eval(), images, labels, setting.seed, setting.cost, setting.example)
    middle.target = min(1.0, target / share)
    smaller, rest = CHOICES["ours"](middle, middle.target)
    train(smaller, setting, task, replace(effort, steps=effort.steps - between))
    return smaller, share * rest


def whole_blocks(setting: Setting, task: Task, target: float, effort: Effort) -> Found:
    """Groups may keep nothing, so that whole branches go."""
    torch.manual_seed(setting.seed)
    config = smcp_fx.PruningConfig(layer_pruning=True)
    prepared = smcp_fx.prepare(
        setting.model, setting.example, target=target, cost=setting.cost, config=config
    )
    smcp_fx.gather_importance(prepared, setting.batches)
    return _trained(prepared, setting, task, target, effort)


def _trained(
    prepared: smcp_fx.PreparedModel, setting: Setting, task: Task, target: float, effort: Effort
) -> Found:
    prepared.pruner.solve(target)
    smaller = smcp_fx.convert(prepared, check=False).eval()
    smcp_fx.repair(smaller, prepared, setting.images)
    train(smaller, setting, task, effort)
    return smaller, prepared.pruner.present_cost / prepared.pruner.full_cost


VARIANTS: dict[str, Callable[[Setting, Task, float, Effort], Found]] = {
    "ours, taught by stages": taught_by_stages,
    "ours, in two steps": in_two_steps,
    "ours, whole blocks": whole_blocks,
}
