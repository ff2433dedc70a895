"""The pruner's contract: what it refuses, what it warns of, and what it keeps on resuming."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from typing import Any

import pytest
import torch
from models import Residual
from pruner_models import IMAGE, SCHEDULE, optimizer_of, prepared_model, train

import smcp_fx
from smcp_fx.errors import CheckpointError, InfeasibleBudgetError, InputError, TrainingError
from smcp_fx.pruning.loop_watch import TrainingWarning


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_skipped_and_not_counted(value: float) -> None:
    """One at the step that a solve is due at: the next one solves."""
    prepared = prepared_model()
    optimizer = optimizer_of(prepared)
    train(prepared, optimizer, range(4))
    before = {name: t.clone() for name, t in prepared.smcp.state_dict().items()}
    prepared(IMAGE).sum().backward()
    weight = prepared.get_parameter("conv2.weight")
    assert weight.grad is not None
    weight.grad[0, 3, 1, 1] = value
    assert prepared.pruner.step() is None
    for name, tensor in prepared.smcp.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with pytest.warns(smcp_fx.TrainingWarning, match=r"1 of the 6 steps before step 5 .*not finite"):
        (solve,) = train(prepared, optimizer, range(4, 5))
    assert (solve.step, solve.skipped) == (5, 1)


def skip(prepared: smcp_fx.PreparedModel, steps: int) -> None:
    """Steps whose gradients are not finite."""
    for _ in range(steps):
        prepared.zero_grad()
        prepared(IMAGE).sum().backward()
        weight = prepared.get_parameter("conv2.weight")
        assert weight.grad is not None
        weight.grad[0, 0, 0, 0] = float("nan")
        prepared.pruner.step()


@pytest.mark.filterwarnings("ignore:.* not finite:smcp_fx.TrainingWarning")
@pytest.mark.parametrize("way", ["on", "copy", "load"])
@pytest.mark.parametrize("skipped", [1, 3, 7])
def test_skipped_steps_add_no_solve_and_take_none_away(way: str, skipped: int) -> None:
    """Right after a solve; also in a copy, and in a model that takes up an earlier state."""
    prepared = prepared_model()
    optimizer = optimizer_of(prepared)
    train(prepared, optimizer, range(7))
    assert prepared.pruner.history[-1].step == 7
    before = copy.deepcopy(prepared.state_dict())
    skip(prepared, skipped)
    if way == "copy":
        prepared = copy.deepcopy(prepared)
    elif way == "load":
        prepared.load_state_dict(before)
    train(prepared, optimizer_of(prepared), range(7, 12))
    assert [solve.step for solve in prepared.pruner.history] == [5, 7, 9]
    assert prepared.pruner.history[-1].skipped == (0 if way == "load" else skipped)


@pytest.mark.parametrize("options", [{"schedule": {"epochs": 3}}, {"config": {"multiple": 2}}], ids=str)
def test_options_of_another_type_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"prepare needs a (Schedule|PruningConfig), not a dict"):
        smcp_fx.prepare(Residual(16, 24), IMAGE, **options)


def test_a_step_before_backward_is_an_error() -> None:
    prepared = prepared_model()
    with pytest.raises(TrainingError, match=r"after loss\.backward"):
        prepared.pruner.step()
    assert int(prepared.smcp.steps) == 0


def test_a_solve_without_importances_is_an_error() -> None:
    prepared = prepared_model()
    with pytest.raises(TrainingError, match="every importance is zero"):
        prepared.pruner.solve(0.5)
    assert all(bool(mask.all()) for mask in prepared.masks.values())


def test_an_infeasible_target_names_the_smallest_cost_and_what_is_pinned() -> None:
    prepared = prepared_model(target=0.5)
    train(prepared, optimizer_of(prepared), range(2))
    pruner = prepared.pruner
    smallest = pruner.cost.cost(pruner.cost.smallest_counts)
    before = prepared.masks
    with pytest.raises(InfeasibleBudgetError) as caught:
        pruner.solve(0.001)
    error = caught.value
    assert error.smallest == pytest.approx(smallest)
    assert error.budget == pytest.approx(0.001 * pruner.full_cost)
    assert f"{smallest:.6g} FLOPs" in str(error)
    assert "fc (reaches the network's output)" in str(error) and "network input" in str(error)
    assert all(torch.equal(mask, before[name]) for name, mask in prepared.masks.items())
    assert pruner.history == []
    pruner.solve(f"{smallest * (1 + 1e-9)} FLOPs")
    assert pruner.counts == pruner.cost.smallest_counts


def test_check_target_says_so_before_training() -> None:
    prepared_model(target=0.5).pruner.check_target()
    with pytest.raises(InfeasibleBudgetError, match="smallest reachable"):
        prepared_model(target=0.001).pruner.check_target()


def test_a_solve_after_losses_that_are_not_finite_says_so() -> None:
    prepared = prepared_model()
    for _ in range(3):
        prepared.zero_grad()
        (prepared(IMAGE).sum() * float("nan")).backward()
        prepared.pruner.step()
    with pytest.raises(TrainingError, match="all 3 steps so far had gradients that are not finite"):
        prepared.pruner.solve()


def test_a_model_that_was_trained_and_never_pruned_is_told_of() -> None:
    """Without a schedule, nothing solves for masks but a call; with masks of whatever origin, nothing is said."""
    prepared = smcp_fx.prepare(Residual(16, 24), IMAGE, target=0.5)
    assert train(prepared, optimizer_of(prepared), range(2)) == []
    with pytest.warns(TrainingWarning, match="nothing was pruned.*without a schedule"):
        smcp_fx.convert(prepared)
    for act in (lambda p: p.pruner.solve(), lambda p: p.set_masks({"conv1": torch.arange(24) < 8})):
        pruned = copy.deepcopy(prepared)
        act(pruned)
        smcp_fx.convert(pruned)


@pytest.mark.parametrize("target", [0.5, "50%", "50 %", "90 kFLOPs"])
def test_a_target_that_nothing_was_solved_for_is_told_of(target: float | str) -> None:
    """Also of a model that was not trained; not where no target was given, or the whole network meets it."""
    prepared = smcp_fx.prepare(Residual(16, 24), IMAGE, target=target)
    copied = copy.deepcopy(prepared)
    for whole in (prepared, copied):
        with pytest.warns(TrainingWarning, match="nothing was pruned.*without a schedule"):
            smcp_fx.convert(whole)
    scheduled = smcp_fx.prepare(Residual(16, 24), IMAGE, target=target, schedule=SCHEDULE)
    with pytest.warns(TrainingWarning, match="the target"):
        smcp_fx.convert(scheduled)
    for asked in (None, 1.0):
        smcp_fx.convert(smcp_fx.prepare(Residual(16, 24), IMAGE, target=asked))
    scheduled.set_masks({"conv1": torch.arange(24) < 8})
    smcp_fx.convert(scheduled)


def test_a_target_above_the_whole_cost_is_told_of() -> None:
    with pytest.warns(TrainingWarning, match="more than the whole network costs"):
        prepared = smcp_fx.prepare(Residual(16, 24), IMAGE, target="1 TFLOPs")
    train(prepared, optimizer_of(prepared), range(1))
    with pytest.warns(TrainingWarning, match="more than the whole network costs"):
        copy.deepcopy(prepared).pruner.solve("2 TFLOPs")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: p.pruner.step("scaler"), "scaler"),
        (lambda p: p.pruner.solve([0.5]), "target"),
        (lambda p: setattr(p.pruner, "correction", float("nan")), "correction"),
        (lambda p: setattr(p.pruner, "correction", "1"), "correction"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(act: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        act(prepared_model())


def test_what_holds_a_model_and_its_pruner_is_copied_as_a_whole() -> None:
    prepared = prepared_model()
    copied = copy.deepcopy({"pruner": prepared.pruner, "model": prepared})
    assert copied["pruner"] is copied["model"].pruner is not prepared.pruner
    with pytest.raises(CheckpointError, match="not pickled"):
        pickle.dumps(prepared.pruner)


def test_the_methods_of_the_loop_keep_their_types() -> None:
    """What type checkers read: signatures and annotations of the functions that users call."""
    prepared_model()  # which keeps torch.compile out of them
    step, solve = smcp_fx.pruning.pruner.Pruner.step, smcp_fx.pruning.pruner.Pruner.solve
    assert list(inspect.signature(step).parameters) == ["self", "scaler"]
    assert list(inspect.signature(solve).parameters) == ["self", "target"]
    assert typing.get_type_hints(solve)["return"] is smcp_fx.pruning.pruner.Solve
