"""The pruner in small training loops on random data: targets, masks over time, its contract, resuming."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from models import Residual, chain, conv, randomise
from pruner_models import IMAGE, optimizer_of, prepared_model, train
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.allocation import allocate
from smcp_fx.config import MethodConfig


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
    found = allocate(values, cost, target)
    return float(sum(values[n][cost.permitted[n].index(c)] for n, c in found.counts.items()))


def worth(importance: Tensor, kept: Any, prepared: smcp_fx.PreparedModel) -> Any:
    """What it is worth to keep so much of a group's importance."""
    power, whole = 1 - prepared.plan.config.width_exponent, float(importance.double().sum())
    return whole * (kept / whole) ** power / power


@pytest.mark.parametrize("target", [0.7, 0.5, 0.3])
@pytest.mark.parametrize("tolerance", [0.0, 0.008])
def test_the_true_cost_is_within_the_target_and_close_to_it(target: float, tolerance: float) -> None:
    """Below 97% of the target only where no group could keep one permitted step more."""
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
    """At most 1% of the importance kept is given up of the best worth for its target; none with tolerance 0."""
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


@pytest.mark.parametrize("mask", ["soft", "permanent"])
def test_soft_masks_can_return_and_permanent_ones_never_do(mask: str) -> None:
    model = randomise(chain(8, 8)).train()
    config = MethodConfig(multiple=2, batch_norm_scaling=True, mask=mask, memory=0.0, tolerance=0.0)  # type: ignore[arg-type]
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
    config = MethodConfig(multiple=2, batch_norm_scaling=True, momentum=0.75, memory=0.5)
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
