"""A small prepared model and what tells how well it was pruned."""

from __future__ import annotations

from typing import Any

import torch
from models import Residual, randomise
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.pruning.pruner import Solve

IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)


def prepared_model(
    model: nn.Module | None = None, target: float | str = 0.5, **options: Any
) -> smcp_fx.PreparedModel:
    """A residual network whose masks are solved for at steps 5, 7 and 9 of 12."""
    model = randomise(model or Residual(16, 24)).train()
    config = MethodConfig(**{"multiple": 2, "batch_norm_scaling": True, **options})
    return smcp_fx.prepare(model, IMAGE, target=target, schedule=SCHEDULE, config=config)


def optimizer_of(prepared: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(prepared.parameters(), lr=0.01, momentum=0.9)


def train(prepared: smcp_fx.PreparedModel, optimizer: torch.optim.Optimizer, steps: range) -> list[Solve]:
    """Train on noise that depends on the step's number only."""
    solves = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 3, 8, 8, generator=generator)
        labels = torch.randint(5, (4,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(x), labels).backward()
        solve = prepared.pruner.step()
        solves += [] if solve is None else [solve]
        optimizer.step()
    return solves
