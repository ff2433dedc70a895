"""Allocation of whole networks: published costs, an MILP solver, stability."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from random_instances import (
    Values,
    instances,
    network,
    true_value,
    width,
)

from smcp_fx.allocation import allocate, certificate
from smcp_fx.allocation.problem import tabulate
from smcp_fx.cost_model import CostTerm, NetworkCost
from smcp_fx.errors import InfeasibleBudgetError

#: Networks are traced once: tests that share them stay in one process.
pytestmark = pytest.mark.xdist_group("allocation of networks")


def budgets(cost: NetworkCost) -> list[float]:
    full, low = cost.cost(cost.full_counts), cost.cost(cost.smallest_counts)
    return [share * full for share in (0.8, 0.55, 0.3, 0.15) if share * full > 1.05 * low]


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("resnet18", 1814073344),
        ("mobilenet_v2", 300774272),
        ("efficientnet_b0", 385814752),
        ("densenet121", 2834161664),
        ("googlenet", 1498376192),
    ],
)
def test_networks_have_the_multiply_adds_that_pytorch_counts(name: str, flops: int) -> None:
    """By `torch.utils.flop_counter`."""
    cost = instances.network_cost(name, "flops")
    assert cost.cost(cost.full_counts) == flops


@pytest.mark.parametrize("kind", ["flops", "latency"])
@pytest.mark.parametrize(
    "name", [name for name in instances.MODULES if name not in ("resnet101", "hardnet68")]
)
def test_networks_are_solved_to_a_hundredth_percent_within_the_budget(name: str, kind: str) -> None:
    values, cost = network(name, kind)
    for budget in budgets(cost)[kind == "latency" :: 2]:  # two of the four each
        found = allocate(values, cost, budget)
        assert 0.99 * budget <= found.cost <= budget * (1 + 1e-9)
        assert found.cost == cost.cost(found.counts)
        assert found.value == pytest.approx(true_value(values, cost, found.counts))
        assert found.gap <= 1e-4


def test_concats_that_are_not_nested_are_solved_to_a_tenth_percent() -> None:
    values, cost = network("hardnet68", "flops")
    for budget in budgets(cost)[2:3]:
        found = allocate(values, cost, budget)
        assert 0.99 * budget <= found.cost <= budget * (1 + 1e-9)
        assert found.gap <= 0.001


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "googlenet"])
def test_the_least_cost_is_exact_on_staircases(name: str) -> None:
    values, cost = network(name, "latency")
    with pytest.raises(InfeasibleBudgetError) as raised:
        allocate(values, cost, 0.01 * cost.cost(cost.full_counts))
    assert raised.value.smallest <= cost.cost(cost.smallest_counts) * (1 + 1e-12)
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = {name: int(rng.choice(options[:4])) for name, options in cost.permitted.items()}
        assert raised.value.smallest <= cost.cost(counts) * (1 + 1e-12)


def milp_optimum(values: Values, cost: NetworkCost, budget: float) -> tuple[float, float]:
    """Return HiGHS's value and bound: one binary an option, one variable a cell of each table."""
    problem = tabulate(cost)
    arrays = [values[group] for group in problem.groups]
    sizes = [len(v) for v in arrays]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    gain = [np.concatenate(arrays)]
    price = [np.zeros(starts[-1])]
    rows: list[tuple[list[int], list[float], float]] = [
        (list(range(starts[k], starts[k + 1])), [1.0] * sizes[k], 1.0) for k in range(len(sizes))
    ]
    offset = int(starts[-1])
    for table in problem.tables:
        if len(table.scope) == 1:
            (k,) = table.scope
            price[0][starts[k] : starts[k + 1]] += table.costs
            continue
        cells = np.arange(table.costs.size).reshape(table.costs.shape) + offset
        for axis, k in enumerate(table.scope):
            for option in range(sizes[k]):
                line = np.take(cells, option, axis=axis).ravel().tolist()
                rows.append(([*line, int(starts[k]) + option], [1.0] * len(line) + [-1.0], 0.0))
        gain.append(np.zeros(table.costs.size))
        price.append(table.costs.ravel())
        offset += table.costs.size
    matrix = scipy.sparse.lil_array((len(rows), offset))
    for n, (columns, coefficients, _) in enumerate(rows):
        matrix[n, columns] = coefficients
    right = np.array([r for _, _, r in rows])
    solved = scipy.optimize.milp(
        -np.concatenate(gain),
        integrality=np.concatenate([np.ones(starts[-1]), np.zeros(offset - starts[-1])]),
        bounds=scipy.optimize.Bounds(0.0, 1.0),
        constraints=[
            scipy.optimize.LinearConstraint(matrix.tocsr(), right, right),
            scipy.optimize.LinearConstraint(
                np.concatenate(price)[None, :] / budget, -np.inf, 1.0 - problem.constant / budget
            ),
        ],
        options={"mip_rel_gap": 1e-6, "time_limit": 120.0},
    )
    assert solved.x is not None
    return -float(solved.fun), -float(solved.mip_dual_bound)


@pytest.mark.parametrize(
    ("name", "kind", "step"),
    [
        ("resnet18", "latency", 16),
        ("resnet50", "latency", 64),
        ("mobilenet_v2", "flops", 16),
    ],
)
def test_networks_agree_with_an_milp_solver(name: str, kind: str, step: int) -> None:
    cost = instances.network_cost(name, kind, step=step)
    values = instances.values_of(cost, instances.synthetic_importances(cost, 3))
    budget = 0.5 * (cost.cost(cost.full_counts) + cost.cost(cost.smallest_counts))
    found = allocate(values, cost, budget)
    reached, bound = milp_optimum(values, cost, budget)
    assert found.value >= reached * (1 - 1e-6)
    assert found.bound <= bound * (1 + 1e-6)
    assert found.gap <= 1e-6


def test_equal_inputs_give_equal_counts_with_and_without_a_start() -> None:
    for name, kind in (("resnet50", "latency"), ("mobilenet_v2", "flops")):
        values, cost = network(name, kind)
        budget = budgets(cost)[1]
        first = allocate(values, cost, budget)
        assert allocate(values, cost, budget).counts == first.counts
        assert allocate(values, cost, budget, start=first.counts).counts == first.counts


def test_ties_keep_the_start() -> None:
    permitted = dict.fromkeys("abcd", (1, 2))
    terms = tuple(CostTerm(name, (width(name),), lambda x: 1.0 * x) for name in "abcd")
    cost = NetworkCost("ms", permitted, terms)
    values = {name: np.array([1.0, 2.0]) for name in "abcd"}
    for kept in ("ab", "bd", "cd"):
        start = {name: 2 if name in kept else 1 for name in "abcd"}
        assert allocate(values, cost, 6.0, start=start).counts == start


@pytest.mark.parametrize("name", ["mobilenet_v2", "densenet121"])
@pytest.mark.parametrize("kind", ["flops", "latency"])
def test_importances_disturbed_by_one_percent_change_under_five_percent(name: str, kind: str) -> None:
    cost = instances.network_cost(name, kind)
    importances = instances.synthetic_importances(cost, 1)
    rng = np.random.default_rng(2)
    disturbed = {g: i * (1.0 + 0.01 * rng.standard_normal(len(i))) for g, i in importances.items()}
    units = sum(len(i) for i in importances.values())
    for budget in budgets(cost)[::2]:
        before = allocate(instances.values_of(cost, importances), cost, budget)
        after = allocate(instances.values_of(cost, disturbed), cost, budget, start=before.counts)
        changed = 0
        for group in importances:
            kept = set(np.argsort(-importances[group])[: before.counts[group]])
            changed += len(kept ^ set(np.argsort(-disturbed[group])[: after.counts[group]]))
        assert changed <= 0.05 * units


def test_a_listing_cut_short_still_bounds_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    values, cost = network("resnet18", "latency")
    optimal = {budget: allocate(values, cost, budget) for budget in budgets(cost)}
    assert all(found.gap <= 1e-9 for found in optimal.values())
    for rows, work in ((4, 10**9), (10**9, 3000), (0, 0)):
        monkeypatch.setattr(certificate, "_MAX_ROWS", rows)
        monkeypatch.setattr(certificate, "_MAX_WORK", work)
        gaps = []
        for budget, best in optimal.items():
            found = allocate(values, cost, budget)
            assert found.bound >= best.value * (1 - 1e-12)
            assert found.value <= best.value * (1 + 1e-12)
            assert 0.99 * budget <= found.cost <= budget * (1 + 1e-9)
            gaps.append(found.gap)
        assert max(gaps) > 1e-5
