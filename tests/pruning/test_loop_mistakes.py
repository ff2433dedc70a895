"""Training loops that use the pruner wrongly: each is noticed and explained, and right ones are left in peace."""

from __future__ import annotations

import warnings
from typing import Any

import mistaken_loops
import pytest
import torch
from mistaken_loops import backward, prepared_model, sgd, told, train
from models import Residual, randomise
from torch import nn

import smcp_fx
from smcp_fx.errors import TrainingError


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


class WithoutCounters(torch.optim.Optimizer):
    """Writes to ``parameter.data``, as many optimisers do: no version counter is raised."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad.data, alpha=-0.01)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("make", [fused, WithoutCounters])
def test_optimisers_that_raise_no_version_counter(make: Any) -> None:
    """Right loops are left in peace; wrong ones are noticed as with other optimisers, or later."""
    prepared = prepared_model()
    assert told(lambda: train(prepared, make(prepared.parameters()), 12)) == []
    model = randomise(Residual(16, 24))
    other = prepared_model(model, schedule=None)
    backward(model)
    (message,) = told(lambda: [train_wrongly(other, make(model.parameters())) for _ in range(8)])
    assert "prepare copies the model" in message
    forgotten = prepared_model()
    optimizer = make(forgotten.parameters())
    (message,) = told(
        lambda: [(optimizer.zero_grad(), backward(forgotten), optimizer.step()) for _ in range(52)]
    )
    assert "without prepared.pruner.step()" in message


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimiser_with_a_closure(search: str | None) -> None:
    """L-BFGS: one call of the closure before `step()`, and the optimiser calls it as often as it likes."""
    prepared = prepared_model()
    optimizer = torch.optim.LBFGS(prepared.parameters(), lr=0.01, max_iter=4, line_search_fn=search)
    x, labels = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(prepared(x), labels)
        loss.backward()
        return loss

    assert (
        told(lambda: [(closure(), prepared.pruner.step(), optimizer.step(closure)) for _ in range(12)]) == []
    )
    assert [solve.step for solve in prepared.pruner.history] == [5, 7, 9]


def test_a_converted_model_is_trained_without_the_pruner() -> None:
    prepared = prepared_model()
    train(prepared, sgd(prepared), 12)
    smaller = smcp_fx.convert(prepared)
    optimizer = sgd(smaller)
    assert (
        told(lambda: [(optimizer.zero_grad(), backward(smaller), optimizer.step()) for _ in range(6)]) == []
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.body(x)
        return [head(y) for head in self.heads]


@pytest.mark.parametrize("to_none", [True, False])
def test_losses_that_reach_a_part_of_the_weights(to_none: bool) -> None:
    """Heads that take turns, also with the gradients of the other one kept as zeros."""
    prepared = prepared_model(TwoHeads())
    optimizer = sgd(prepared)

    def alternate() -> None:
        for step in range(12):
            optimizer.zero_grad(set_to_none=to_none)
            outputs = prepared(torch.randn(4, 3, 8, 8))
            nn.functional.cross_entropy(outputs[(step // 2 + 1) % 2], torch.randint(5, (4,))).backward()
            prepared.pruner.step()
            optimizer.step()

    assert told(alternate) == []
    with pytest.raises(TrainingError, match="count the same gradients twice"):
        prepared.pruner.step()


def test_warnings_point_at_the_users_line() -> None:
    prepared = prepared_model()
    optimizer = sgd(prepared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            backward(prepared)
            optimizer.step()
        prepared.eval().pruner.step()
    assert len(caught) == 3
    assert {warning.filename for warning in caught} == {__file__, mistaken_loops.__file__}


def test_gradients_that_are_never_finite() -> None:
    """No step is counted and no solve comes: that is told when the first one should."""
    prepared = prepared_model()
    optimizer = sgd(prepared)

    def hopeless() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            (prepared(torch.randn(4, 3, 8, 8)) * float("nan")).sum().backward()
            prepared.pruner.step()
            optimizer.step()

    (message,) = told(hopeless)
    assert "5 of the 5 steps before step 1 had gradients that are not finite" in message


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
