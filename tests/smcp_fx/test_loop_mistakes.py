"""Training loops that use the pruner wrongly: each is noticed and explained, and right ones are left in peace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Residual, randomise
from torch import nn

import smcp_fx
from smcp_fx.errors import InfeasibleBudgetError, TrainingError

SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)


def prepared_model(model: nn.Module | None = None, **options: Any) -> smcp_fx.PreparedModel:
    model = model or randomise(Residual(16, 24))
    config = smcp_fx.PruningConfig(multiple=2, batch_norm_scaling=True)
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


def test_step_forgotten() -> None:
    prepared = prepared_model()
    optimizer = sgd(prepared)

    def forgetful(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            backward(prepared)
            optimizer.step()

    assert told(lambda: forgetful(3)) == []
    (message,) = told(lambda: forgetful(8))
    assert "without prepared.pruner.step()" in message and "before optimizer.step()" in message
    (message,) = told(lambda: smcp_fx.convert(prepared))
    assert "only 0 were counted" in message


def test_step_forgotten_now_and_then_or_not_needed_is_no_mistake() -> None:
    prepared = prepared_model()
    optimizer = sgd(prepared)

    def sometimes() -> None:
        for step in range(9):
            optimizer.zero_grad()
            backward(prepared)
            if step % 2:
                prepared.pruner.step()
            optimizer.step()

    assert told(sometimes) == []
    by_hand = prepared_model(schedule=None)
    hand = sgd(by_hand)
    assert told(lambda: [(hand.zero_grad(), backward(by_hand), hand.step()) for _ in range(8)]) == []
    done = prepared_model()
    last = sgd(done)
    train(done, last, 12)
    assert told(lambda: [(last.zero_grad(), backward(done), last.step()) for _ in range(8)]) == []
    assert told(lambda: smcp_fx.convert(done)) == []


def test_step_before_the_first_backward() -> None:
    prepared = prepared_model()
    with pytest.raises(TrainingError, match=r"no weight has a gradient: .*after loss\.backward\(\)"):
        prepared.pruner.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_step_before_backward_in_every_iteration(to_none: bool) -> None:
    prepared = prepared_model()
    optimizer = sgd(prepared)
    train(prepared, optimizer, 1)
    optimizer.zero_grad(set_to_none=to_none)
    with pytest.raises(TrainingError, match=r"no weight has a gradient|without a backward pass"):
        prepared.pruner.step()
    assert int(prepared.smcp.steps) == 1


def test_step_called_twice() -> None:
    prepared = prepared_model()
    train(prepared, sgd(prepared), 1)
    backward(prepared)
    prepared.pruner.step()
    with pytest.raises(TrainingError, match="count the same gradients twice"):
        prepared.pruner.step()
    assert int(prepared.smcp.steps) == 2


def test_gradients_set_by_hand_are_no_mistake() -> None:
    prepared = prepared_model()
    train(prepared, sgd(prepared), 1)
    for _ in range(2):
        loss = prepared(torch.randn(4, 3, 8, 8)).square().sum()
        parameters = list(prepared.parameters())
        found = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        prepared.pruner.step()
    assert int(prepared.smcp.steps) == 3


def test_step_after_the_optimiser() -> None:
    prepared = prepared_model()
    optimizer = sgd(prepared)

    def late() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            backward(prepared)
            optimizer.step()
            prepared.pruner.step()

    (message,) = told(late)
    assert "Call it before optimizer.step()" in message


def test_step_for_every_micro_batch() -> None:
    prepared = prepared_model(schedule=None)
    optimizer = sgd(prepared)

    def accumulating(steps: int, every_time: bool) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            for part in range(3):
                backward(prepared)
                if every_time or part == 2:
                    prepared.pruner.step()
            optimizer.step()

    assert told(lambda: accumulating(12, False)) == []
    other = prepared
    prepared = prepared_model(schedule=None)
    optimizer = sgd(prepared)
    (message,) = told(lambda: accumulating(12, True))
    assert "step() is called for every micro-batch" in message
    assert other is not prepared


def test_the_optimiser_of_the_model_that_was_given_to_prepare() -> None:
    model = randomise(Residual(16, 24))
    prepared = prepared_model(model, schedule=None)
    (message,) = told(lambda: [train_wrongly(prepared, sgd(model)) for _ in range(8)])
    assert "prepare copies the model: build the optimiser on prepared.parameters()" in message


def train_wrongly(prepared: smcp_fx.PreparedModel, optimizer: torch.optim.Optimizer) -> None:
    prepared.zero_grad()
    backward(prepared)
    prepared.pruner.step()
    optimizer.step()


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
    cost = prepared.pruner.cost.cost(prepared.pruner.counts)
    assert f"costs {cost:.6g}, not {prepared.pruner.target:.6g}" in message
    train(prepared, optimizer, 1)
    assert told(lambda: smcp_fx.convert(prepared)) == []


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
    config = smcp_fx.PruningConfig(multiple=2, batch_norm_scaling=True, memory=0.0, tolerance=0.0)
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
