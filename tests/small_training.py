"""Shared by the tests of training stacks: a small residual network, its batches, and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Residual, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig

SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)
SOLVES = [5, 7, 9]


def network() -> nn.Module:
    """The same one every time."""
    torch.manual_seed(3)
    return randomise(Residual(16, 24)).train()


def prepared_model(model: nn.Module | None = None, **options: Any) -> smcp_fx.PreparedModel:
    model = network() if model is None else randomise(model).train()
    config = MethodConfig(**{"multiple": 2, "batch_norm_scaling": True, **options})
    return smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), schedule=SCHEDULE, config=config)


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randint(5, (size,), generator=generator)


def loss_of(model: Callable[..., Tensor], step: int) -> Tensor:
    x, labels = batch(step)
    return nn.functional.cross_entropy(model(x), labels)


def pruned_to_target(prepared: smcp_fx.PreparedModel, solves: list[int] = SOLVES) -> None:
    """Check that the schedule's solves took place, and that the result computes what the masked model does."""
    pruner = prepared.pruner
    assert [solve.step for solve in pruner.history] == solves
    assert pruner.cost.cost(pruner.counts) <= pruner.target < 0.51 * pruner.full_cost
    x = torch.randn(2, 3, 8, 8)
    smaller = smcp_fx.convert(prepared.eval())
    assert_close(smaller(x), prepared(x), "slicing")
    prepared.train()
