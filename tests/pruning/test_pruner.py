"""The pruner in small training loops on random data: targets, masks over time, its contract, resuming."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from typing import Any

import numpy as np
import pytest
import torch
from models import Residual, chain, conv, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import CheckpointError, InfeasibleBudgetError, InputError, TrainingError
from smcp_fx.pruning.loop_watch import TrainingWarning
from smcp_fx.pruning.pruner import Solve, _eager, _Method

IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)


def prepared_model(
    model: nn.Module | None = None, target: float | str = 0.5, **options: Any
) -> smcp_fx.PreparedModel:
    """A residual network whose masks are solved for at steps 5, 7 and 9 of 12."""
    model = randomise(model or Residual(16, 24)).train()
    config = smcp_fx.PruningConfig(**{"multiple": 2, "batch_norm_scaling": True, **options})
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


def best(importance: dict[str, Tensor], prepared: smcp_fx.PreparedModel, target: float) -> float:
    """The most worth of any permitted choice within the target, by the library's allocator."""
    cost = prepared.pruner.cost
    values = {
        name: worth(
            importance[name],
            np.sort(importance[name].double().numpy())[::-1].cumsum()[np.asarray(permitted) - 1],
            prepared,
        )
        for name, permitted in cost.permitted.items()
    }
    found = smcp_fx.allocate(values, cost, target)
    return float(sum(values[n][cost.permitted[n].index(c)] for n, c in found.counts.items()))


def worth(importance: Tensor, kept: Any, prepared: smcp_fx.PreparedModel) -> Any:
    """What it is worth to keep so much of a group's importance."""
    power, whole = 1 - prepared.plan.config.width_exponent, float(importance.double().sum())
    return whole * (kept / whole) ** power / power


@pytest.mark.parametrize("target", [0.7, 0.5, 0.3])
@pytest.mark.parametrize("tolerance", [0.0, 0.008])
def test_the_true_cost_is_within_the_target_and_close_to_it(target: float, tolerance: float) -> None:
    """Below 97 % of the target only where no group could keep one permitted step more."""
    prepared = prepared_model(target=target, tolerance=tolerance)
    pruner = prepared.pruner
    assert pruner.target == pytest.approx(target * pruner.full_cost)
    solves = train(prepared, optimizer_of(prepared), range(12))
    assert [solve.step for solve in solves] == [5, 7, 9]
    assert solves[-1].target == pruner.target
    assert pruner.history == solves
    counts = pruner.counts
    assert all(count in pruner.cost.permitted[name] for name, count in counts.items())
    cost = pruner.cost.cost(counts)
    assert solves[-1].cost == pytest.approx(cost)
    assert cost <= pruner.target
    if cost < 0.97 * pruner.target:
        for name, permitted in pruner.cost.permitted.items():
            more = [count for count in permitted if count > counts[name]]
            assert not more or pruner.cost.cost({**counts, name: more[0]}) > pruner.target, name
    assert {n: int(m.sum()) for n, m in prepared.masks.items() if n in counts} == counts


@pytest.mark.parametrize("exponent", [0.0, 0.9])
@pytest.mark.parametrize("tolerance", [0.0, 0.008])
def test_every_solve_keeps_nearly_the_best_importance(tolerance: float, exponent: float) -> None:
    """At most 1 % of the importance kept is given up of the best worth for its target; none with tolerance 0."""
    prepared = prepared_model(tolerance=tolerance, width_exponent=exponent)
    optimizer = optimizer_of(prepared)
    train(prepared, optimizer, range(4))
    for target in (0.9, 0.6, 0.4, 0.5):
        importance = prepared.pruner.importance
        total = float(sum(v.double().sum() for v in importance.values()))
        solve = prepared.pruner.solve(target)
        sums = {n: float(v.double()[prepared.masks[n]].sum()) for n, v in importance.items()}
        kept = sum(sums.values())
        reached = sum(worth(v, sums[n], prepared) for n, v in importance.items())
        missing = best(importance, prepared, solve.target) - reached
        assert missing <= (0.01 if tolerance else 1e-6) * kept, f"target {target}: {missing / kept:.4f}"
        assert solve.importance_kept == pytest.approx(kept / total, rel=1e-5)
        assert solve.bound >= (kept + missing) / total * (1 - 1e-6)
        train(prepared, optimizer, range(2))


@pytest.mark.parametrize("tolerance", [0.0, 0.008])
def test_the_papers_allocation_prunes_too(tolerance: float) -> None:
    """Its linearised costs may miss the target, by either side; that nothing goes would be a mistake."""
    prepared = prepared_model(allocation="paper", tolerance=tolerance)
    train(prepared, optimizer_of(prepared), range(4))
    assert prepared.pruner.solve(0.5).cost < 0.9 * prepared.pruner.full_cost


def test_masks_are_fixed_outside_the_pruning_phase() -> None:
    prepared = prepared_model()
    optimizer = optimizer_of(prepared)
    train(prepared, optimizer, range(4))
    assert all(bool(mask.all()) for mask in prepared.masks.values())
    train(prepared, optimizer, range(4, 9))
    masks = prepared.masks
    assert not all(bool(mask.all()) for mask in masks.values())
    assert train(prepared, optimizer, range(9, 16)) == []
    assert all(torch.equal(mask, masks[name]) for name, mask in prepared.masks.items())


def favour(prepared: smcp_fx.PreparedModel, high: Tensor) -> None:
    """One step whose gradients give the units of group "0.0" in ``high`` all importance but a little."""
    weight = prepared.get_parameter("1.0.weight")
    share = torch.where(high, 1.0, 0.01).view(1, -1, 1, 1)
    weight.grad = share / weight.detach().where(weight != 0, 1.0)
    last = prepared.get_parameter("4.weight")
    last.grad = 0.5 / last.detach().where(last != 0, 1.0)  # permanent masks leave zeros
    prepared.pruner.step()


@pytest.mark.parametrize("mask", ["soft", "hard", "permanent"])
def test_soft_masks_can_return_and_permanent_ones_never_do(mask: str) -> None:
    model = randomise(chain(8, 8)).train()
    config = smcp_fx.PruningConfig(multiple=2, batch_norm_scaling=True, mask=mask, memory=0.0, tolerance=0.0)  # type: ignore[arg-type]
    prepared = smcp_fx.prepare(model, IMAGE, config=config)
    first = torch.arange(8) < 4
    favour(prepared, first)
    prepared.pruner.solve(0.5)
    before = prepared.masks["0.0"]
    gone = ~before
    assert bool(gone.any()) and not bool((gone & first).any())
    assert bool((prepared.get_parameter("1.0.weight")[:, gone] == 0).all()) is (mask == "permanent")
    with torch.no_grad():  # as if an optimiser with momentum had moved what was pruned
        prepared.get_parameter("1.0.weight").add_(0.1)
    favour(prepared, ~first)
    solve = prepared.pruner.solve(0.5)
    after = prepared.masks["0.0"]
    assert solve.returned == int((after & gone).sum())
    if mask == "permanent":
        assert not bool((after & gone).any())
    else:
        assert bool((after & gone).any())


def test_permanent_masks_shrink_over_a_whole_training() -> None:
    prepared = prepared_model(mask="permanent", target=0.3)
    optimizer = optimizer_of(prepared)
    kept = prepared.smcp.keep.clone()
    for step in range(12):
        train(prepared, optimizer, range(step, step + 1))
        now = prepared.smcp.keep.clone()
        assert not bool((now & ~kept).any())
        kept = now
    assert not bool(kept.all())
    train(prepared, optimizer, range(12, 13))
    assert prepared.pruner.solve(1.0).returned == 0  # not even when there is room for all
    assert torch.equal(prepared.smcp.keep, kept)


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


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    """Bit by bit, stopped before, between and after the solves; also the solves that are still to come."""
    whole = prepared_model()
    optimizer = optimizer_of(whole)
    start = copy.deepcopy(whole)
    solves = train(whole, optimizer, range(12))
    assert len(solves) == 3
    for stop in (2, 6, 7, 10):
        part = copy.deepcopy(start)
        first = optimizer_of(part)
        train(part, first, range(stop))
        resumed = prepared_model(Residual(16, 24))
        second = optimizer_of(resumed)
        resumed.load_state_dict(part.state_dict())
        second.load_state_dict(first.state_dict())
        later = train(resumed, second, range(stop, 12))
        expected = [solve for solve in solves if solve.step > stop]
        assert [(s.step, s.cost, s.importance_kept, s.changed) for s in later] == [
            (s.step, s.cost, s.importance_kept, s.changed) for s in expected
        ]
        for name, tensor in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], tensor), f"stopped after {stop}: {name}"


def test_memory_and_momentum() -> None:
    """Gathered: g <- m g + (1 - m) I. Between solves: share <- memory * old share + (1 - memory) * new share."""
    model = randomise(nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4)))
    config = smcp_fx.PruningConfig(multiple=2, batch_norm_scaling=True, momentum=0.75, memory=0.5)
    prepared = smcp_fx.prepare(model, IMAGE, config=config)
    weight = prepared.get_parameter("2.weight")

    def gather(importance: Tensor) -> None:
        weight.grad = importance.view(1, 8, 1, 1) / (weight.detach() * 4 * 9)
        prepared.pruner.step()

    one, two, three = torch.rand(3, 8).unbind()
    gather(one)
    gather(two)
    both = 0.75 * 0.25 * one + 0.25 * two
    assert_close(prepared.pruner.importance["0"], both / both.sum(), "importance")
    prepared.pruner.solve(0.5)
    gather(three)
    expected = 0.5 * both / both.sum() + 0.5 * three / three.sum()
    assert_close(prepared.pruner.importance["0"], expected, "importance")


@pytest.mark.parametrize("layer_pruning", [False, True])
def test_masks_by_hand_need_not_keep_permitted_counts(layer_pruning: bool) -> None:
    """A solve from them lands on counts that are."""
    for seed in range(6):
        prepared = prepared_model(multiple=8, tolerance=0.3, layer_pruning=layer_pruning)
        optimizer = optimizer_of(prepared)
        train(prepared, optimizer, range(2))
        generator = torch.Generator().manual_seed(seed)
        masks = {
            group.name: torch.arange(group.size)
            < int(torch.randint(1, group.size, (1,), generator=generator))
            for group in prepared.channels.groups
            if group.free
        }
        prepared.set_masks(masks)
        solve = prepared.pruner.solve(0.6)
        permitted = prepared.pruner.cost.permitted
        assert all(count in permitted[name] for name, count in prepared.pruner.counts.items())
        assert solve.cost <= solve.target


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
    assert typing.get_type_hints(_eager) == {"method": _Method, "return": _Method}
    assert list(inspect.signature(smcp_fx.pruning.pruner.Pruner.step).parameters) == ["self", "scaler"]
    assert list(inspect.signature(smcp_fx.pruning.pruner.Pruner.solve).parameters) == ["self", "target"]
