"""The coupled allocation problem against brute force, an MILP solver and its own contract."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_instances import (
    FAMILIES,
    enumerate_all,
    random_instance,
    true_value,
    width,
)

from smcp_fx.allocation import allocate
from smcp_fx.allocation.certificate import certify
from smcp_fx.allocation.dual import Relaxation, bundle
from smcp_fx.allocation.local_search import Moves
from smcp_fx.allocation.planning import plan
from smcp_fx.allocation.problem import tabulate
from smcp_fx.allocation.solve import node_choice
from smcp_fx.cost_model import CostTerm, NetworkCost
from smcp_fx.errors import InfeasibleBudgetError


@pytest.mark.parametrize("family", FAMILIES)
def test_small_instances_reach_the_optimum_of_brute_force(family: str) -> None:
    for seed in range(40):
        values, cost = random_instance(family, seed)
        value, total = enumerate_all(values, cost)
        for share in (0.05, 0.3, 0.6):
            budget = float(np.quantile(total, share))
            best = float(value[total <= budget * (1 + 1e-12)].max())
            found = allocate(values, cost, budget)
            assert found.cost == pytest.approx(cost.cost(found.counts), rel=1e-12)
            assert found.cost <= budget * (1 + 1e-9)
            assert found.value == pytest.approx(true_value(values, cost, found.counts), abs=1e-12)
            assert found.bound >= best - 1e-9 * max(1.0, abs(best)), (seed, share)
            assert found.value == pytest.approx(best, rel=1e-9, abs=1e-9), (seed, share)
            assert found.gap <= 1e-6


@pytest.mark.parametrize("max_cells", [1, 20, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_loosened_sums_and_copies_still_bound_the_optimum(family: str, max_cells: int) -> None:
    links, optimal, total_runs = 0, 0, 0
    seeds = 8 if family == "overlapping" else 40  # which takes ten times as long as another
    for seed in range(seeds):
        values, cost = random_instance(family, 1000 + seed)
        value, total = enumerate_all(values, cost)
        problem = tabulate(cost)
        links += len(plan(problem, max_cells).links)
        arrays = [values[group] for group in problem.groups]
        budget = float(np.quantile(total, 0.3))
        best = float(value[total <= budget * (1 + 1e-12)].max())
        try:
            choice, bound, _ = node_choice(problem, arrays, budget, max_cells=max_cells)
        except InfeasibleBudgetError:
            continue
        reached = float(sum(v[i] for v, i in zip(arrays, choice, strict=True)))
        assert cost.cost(problem.counts(choice)) <= budget * (1 + 1e-9)
        assert reached <= best + 1e-9
        assert bound >= best - 1e-9 * max(1.0, abs(best)), seed
        optimal += reached >= best - 1e-9
        total_runs += 1
    assert links > 0 or (family in ("chain", "residual") and max_cells > 1)
    assert total_runs >= 0.95 * seeds
    assert optimal >= 0.9 * total_runs


@pytest.mark.parametrize(("family", "max_cells"), [("overlapping", 20), ("residual", 1), ("nested", 1)])
def test_a_listing_from_the_worst_start_finds_the_optimum(family: str, max_cells: int) -> None:
    improved, links = 0, 0
    for seed in range(20):
        values, cost = random_instance(family, 3000 + seed)
        value, total = enumerate_all(values, cost)
        budget = float(np.quantile(total, 0.3))
        best = float(value[total <= budget * (1 + 1e-12)].max())
        problem = tabulate(cost)
        arrays = [values[group] for group in problem.groups]
        moves = Moves(problem, arrays)
        start = np.array(np.unravel_index(int(np.argmin(total)), [len(v) for v in arrays]), np.int64)
        if best <= moves.value(start) or best == value.max():
            continue
        relaxation = Relaxation(plan(problem, max_cells), arrays, cost.constant, budget)
        links += len(relaxation.plan.links)
        most = np.array([int(np.argmax(v)) for v in arrays], np.int64)
        rise = moves.value(most) - moves.value(start)
        dual = bundle(relaxation, rise / (moves.cost(most) - moves.cost(start)))
        assert dual.bound >= best - 1e-9 * max(1.0, abs(best))
        choice, bound = certify(relaxation, dual, moves, start)
        assert moves.cost(choice) <= budget
        assert bound >= best - 1e-9 * max(1.0, abs(best)), seed
        improved += moves.value(choice) > moves.value(start)
    assert links > 0
    assert improved > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_infeasible_budget_names_the_smallest_reachable_cost(family: str) -> None:
    for seed in range(25):
        values, cost = random_instance(family, 2000 + seed)
        _, total = enumerate_all(values, cost)
        smallest = float(total.min())
        with pytest.raises(InfeasibleBudgetError, match="smallest reachable cost") as raised:
            allocate(values, cost, smallest - 0.01 * abs(smallest) - 1e-3)
        assert raised.value.smallest == pytest.approx(smallest, rel=1e-12)
        found = allocate(values, cost, smallest)
        assert found.cost <= smallest * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    share=st.floats(0.0, 1.0),
)
def test_any_tables_in_a_cycle_reach_the_optimum(data: st.DataObject, sizes: list[int], share: float) -> None:
    number = st.integers(-6, 6)
    permitted = {f"g{k}": tuple(range(1, size + 1)) for k, size in enumerate(sizes)}
    values = {
        name: np.array(data.draw(st.lists(number, min_size=len(counts), max_size=len(counts))), float)
        for name, counts in permitted.items()
    }
    terms = []
    for k, size in enumerate(sizes):
        after = (k + 1) % len(sizes)
        cells = data.draw(st.lists(number, min_size=size * sizes[after], max_size=size * sizes[after]))
        table = np.array(cells, float).reshape(size, sizes[after])
        widths = (width(f"g{k}"), width(f"g{after}"))
        terms.append(CostTerm(f"layer{k}", widths, lambda x, y, table=table: table[x - 1, y - 1]))
    cost = NetworkCost("ms", permitted, tuple(terms))
    value, total = enumerate_all(values, cost)
    budget = float(np.quantile(total, share))
    best = value[total <= budget + 1e-9 * abs(budget)].max(initial=-math.inf)
    if best == -math.inf:
        with pytest.raises(InfeasibleBudgetError):
            allocate(values, cost, budget)
        return
    found = allocate(values, cost, budget)
    assert found.value == pytest.approx(best)
    assert found.bound == pytest.approx(best)
