"""Schedules, targets and modes that do not fit the training: noticed and explained."""

from __future__ import annotations

import re

import pytest
import torch
from mistaken_loops import prepared_model, sgd, told, train
from models import Residual, randomise
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InfeasibleBudgetError, TrainingError


def test_eval_mode_in_training() -> None:
    prepared = prepared_model().eval()
    (message,) = told(lambda: train(prepared, sgd(prepared), 3))
    assert "in eval mode" in message and "prepared.train()" in message
    frozen_norms = prepared_model()
    for module in frozen_norms.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert told(lambda: train(frozen_norms, sgd(frozen_norms), 3)) == []


def test_a_schedule_longer_than_the_training() -> None:
    prepared = prepared_model()
    optimizer = sgd(prepared)
    train(prepared, optimizer, 6)
    (message,) = told(lambda: smcp_fx.convert(prepared))
    assert "brings the target after 7 steps, and only 6 were counted" in message
    assert "Schedule.scaled" in message
    told_costs = re.findall(r"([\d.]+) k multiply-adds", message)
    costs = [prepared.pruner.cost.cost(prepared.pruner.counts), prepared.pruner.target]
    assert [1e3 * float(value) for value in told_costs] == pytest.approx(costs, rel=5e-3)  # three digits
    train(prepared, optimizer, 1)
    assert told(lambda: smcp_fx.convert(prepared)) == []


def test_a_schedule_shorter_than_the_training_so_far() -> None:
    """A run resumed with one that is over already: no further solve comes."""
    long = smcp_fx.Schedule(epochs=1, steps_per_epoch=24, warmup=0.1, ramp=0.7, cooldown=0.1, every=1)
    first = prepared_model(schedule=long)
    train(first, sgd(first), 12)
    resumed = prepared_model()
    resumed.load_state_dict(first.state_dict())
    assert told(lambda: train(resumed, sgd(resumed), 2)) == []
    (message,) = told(lambda: smcp_fx.convert(resumed))
    assert "last solve was due at step 9 of 14" in message and "prepared.pruner.solve()" in message
    resumed.pruner.solve()
    resumed.pruner._solve_watch._told.clear()
    assert told(lambda: smcp_fx.convert(resumed)) == []


def test_a_target_that_is_there_before_its_time() -> None:
    whole = prepared_model(target=1.0)
    train(whole, sgd(whole), 2)
    assert told(lambda: smcp_fx.convert(whole)) == []


def test_a_model_that_was_not_trained_converts_in_peace() -> None:
    prepared = prepared_model()
    prepared.set_masks({"stem.0": torch.arange(16) < 8})
    assert told(lambda: smcp_fx.convert(prepared)) == []


def test_a_target_out_of_reach_is_told_at_the_first_step() -> None:
    prepared = prepared_model(target=0.001)
    optimizer = sgd(prepared)
    (message,) = told(lambda: train(prepared, optimizer, 4))
    assert "smallest reachable cost" in message
    with pytest.raises(InfeasibleBudgetError, match="smallest reachable cost"):
        train(prepared, optimizer, 4)


class Detached(nn.Module):
    """Only the bias of its head learns: no gradient reaches a masked weight but zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Residual(16, 24)
        self.head = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x) * 0.0)
        return y


def test_importances_that_are_all_zero() -> None:
    """With nothing known, an error; with importances from before, a warning."""
    prepared = prepared_model()
    optimizer = sgd(prepared)
    train(prepared, optimizer, 5)
    assert len(prepared.pruner.history) == 1

    def without_gradients() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (prepared(torch.randn(4, 3, 8, 8)) * 0.0).sum().backward()
            prepared.pruner.step()
            optimizer.step()

    (message,) = told(without_gradients)
    assert "all importances of the 2 steps before step 7 are zero" in message
    nothing = prepared_model(randomise(Detached()))
    with pytest.raises(TrainingError, match="every importance is zero"):
        train(nothing, sgd(nothing), 6)


def test_masks_that_oscillate() -> None:
    """Importances that favour one half, then the other; forgetful, and without tolerance."""
    schedule = smcp_fx.Schedule(epochs=1, steps_per_epoch=40, warmup=0.1, ramp=0.0, cooldown=0.1, every=2)
    config = MethodConfig(multiple=2, batch_norm_scaling=True, memory=0.0, tolerance=0.0)
    image = torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(randomise(Residual(16, 24)).train(), image, schedule=schedule, config=config)
    weights = [prepared.get_parameter(f"{name}.weight") for name in ("conv1", "conv2", "conv4", "fc")]

    def alternate() -> None:
        for step in range(24):
            for weight in weights:
                half = torch.arange(weight.shape[1]) % 2 == (step // 2) % 2
                share = torch.where(half, 1.0, 0.01).view(1, -1, *[1] * (weight.dim() - 2))
                weight.grad = share / weight.detach()
            prepared.pruner.step()
            with torch.no_grad():
                weights[0].mul_(1.0)

    (message,) = told(alternate)
    solve = prepared.pruner.history[-1]
    assert "masks oscillate" in message
    assert solve.reverted == sum(solve.changed.values()) > 0.05 * solve.units


def test_a_search_without_training_between_its_solves_is_no_oscillation() -> None:
    prepared = prepared_model()
    train(prepared, sgd(prepared), 8)

    def search() -> None:
        for _ in range(8):
            for target in (0.9, 0.4):
                prepared.pruner.solve(target)

    assert told(search) == []
    assert prepared.pruner.history[-1].reverted_share > 0.05
