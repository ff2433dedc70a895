"""How all methods train: the product's loop, the same images in the same order, the dense network as teacher."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from pretrained.tasks import Task, cosine
from torch import nn
from without_training_methods import Setting

import smcp_fx
from smcp_fx.training import TrainingLoop

_BATCH, _SMOOTHING, _DECAY = 64, 0.05, 1e-4
#: Share of the dense network's answers in the loss, as in smcp-compile.
TAUGHT = 0.9


@dataclass(frozen=True)
class Effort:
    """Optimiser steps, their peak learning rate, the seed of their images, the dense network's share of the loss.

    ``dense_steps``: what the dense network was trained for.
    """

    steps: int
    rate: float
    seed: int
    dense_steps: int
    taught: float = TAUGHT


def train(
    model: nn.Module, setting: Setting, task: Task, effort: Effort, teacher: smcp_fx.Teacher | None = None
) -> None:
    """Train to the end of the effort: SGD with Nesterov momentum, a short rise of the rate and a cosine.

    ``teacher``: another one than the dense network's answers.
    """
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
            teacher=(teacher or smcp_fx.Teacher(setting.model, outputs="classes")) if effort.taught else None,
            taught=effort.taught,
        ).run()
