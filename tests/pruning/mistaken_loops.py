"""A small prepared model to train wrongly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import Residual, randomise
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig

SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)


def prepared_model(model: nn.Module | None = None, **options: Any) -> smcp_fx.PreparedModel:
    model = model or randomise(Residual(16, 24))
    config = MethodConfig(multiple=2, batch_norm_scaling=True)
    image = torch.randn(2, 3, 8, 8)
    return smcp_fx.prepare(model.train(), image, config=config, **{"schedule": SCHEDULE, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def backward(prepared: nn.Module) -> None:
    output = prepared(torch.randn(4, 3, 8, 8))
    nn.functional.cross_entropy(output, torch.randint(5, (4,))).backward()


def train(prepared: smcp_fx.PreparedModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(prepared)
        prepared.pruner.step()
        optimizer.step()


def told(action: Callable[[], Any]) -> list[str]:
    """The library's warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if issubclass(w.category, smcp_fx.TrainingWarning)]
