"""The coupled allocation problem against brute force, an MILP solver and its own contract."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from smcp_fx.allocation import Allocation, allocate, certificate
from smcp_fx.allocation.certificate import certify
from smcp_fx.allocation.dual import Relaxation, bundle
from smcp_fx.allocation.local_search import Moves
from smcp_fx.allocation.paper import linearised
from smcp_fx.allocation.planning import plan
from smcp_fx.allocation.problem import tabulate
from smcp_fx.allocation.solve import coupled_choice
from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width
from smcp_fx.errors import InfeasibleBudgetError, InputError

Values = dict[str, NDArray[np.float64]]
Random = np.random.Generator


def load_instances() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench" / "allocation_instances.py"
    spec = importlib.util.spec_from_file_location("allocation_instances", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


instances = load_instances()


# Small random networks, and brute force over all their counts.


def width(*groups: str, constant: int = 0, per_unit: int = 1) -> Width:
    return Width(constant, tuple((group, per_unit) for group in groups))


def random_price(rng: Random) -> Price:
    kind = rng.integers(4)
    a, b, c = rng.uniform(0.5, 2.0), rng.uniform(0.0, 20.0), int(rng.integers(2, 12))
    table = rng.integers(0, 40, (7, 11)).astype(float)

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        x = np.asarray(widths[0], float)
        y = np.asarray(widths[1], float) if len(widths) > 1 else np.asarray(4.0)
        if kind == 0:
            return a * x * y
        if kind == 1:
            return b + a * np.ceil(x / c) * np.ceil(y / 4)
        if kind == 2:
            return a * np.ceil(x / c) * y + b * (x % 3 != 0) + x
        return table[np.asarray(x, int) % 7, np.asarray(y, int) % 11]

    return price


def chain(rng: Random) -> list[tuple[Width, ...]]:
    scopes: list[tuple[Width, ...]] = [(width(constant=3), width("g0"))]
    scopes += [(width(f"g{k}"), width(f"g{k + 1}")) for k in range(5)]
    return [*scopes, (width("g5", per_unit=int(rng.integers(1, 5))),), (width("g2"),)]


def residual(rng: Random) -> list[tuple[Width, ...]]:
    scopes: list[tuple[Width, ...]] = [(width("g0"),), (width("g0"), width("g1"))]
    for inner in ("g2", "g3"):
        scopes += [(width("g1"), width(inner)), (width(inner), width("g1"))]
    return [*scopes, (width("g1"), width("g4")), (width("g4"), width("g5")), (width("g5"), width("g1"))]


def nested(rng: Random) -> list[tuple[Width, ...]]:
    scopes: list[tuple[Width, ...]] = [(width("g0"), width("g1")), (width("g1"), width("g2"))]
    scopes += [(width("g0", "g2"), width("g3")), (width("g3"), width("g4"))]
    return [*scopes, (width("g0", "g2", "g4"), width("g5")), (width("g0", "g2", "g4", per_unit=3),)]


def overlapping(rng: Random) -> list[tuple[Width, ...]]:
    names = [f"g{k}" for k in range(6)]
    scopes: list[tuple[Width, ...]] = []
    for _ in range(6):
        members = rng.choice(names, int(rng.integers(2, 4)), replace=False)
        scopes.append((width(*members, constant=int(rng.integers(3))), width(str(rng.choice(names)))))
    return [*scopes, (Width(2, (("g0", 2), ("g1", 1))), Width(0, (("g2", 1), ("g3", 3))))]


FAMILIES: dict[str, Callable[[Random], list[tuple[Width, ...]]]] = {
    "chain": chain,
    "residual": residual,
    "nested": nested,
    "overlapping": overlapping,
}


def random_instance(family: str, seed: int) -> tuple[Values, NetworkCost]:
    rng = np.random.default_rng([seed, len(family)])
    permitted, values = {}, {}
    for k in range(6):
        size = int(rng.integers(1, 6))
        counts = np.sort(rng.choice(np.arange(1, 17), size, replace=False))
        permitted[f"g{k}"] = tuple(int(count) for count in counts)
        kind = rng.integers(3)
        gains = rng.exponential(1.0, size) if kind else rng.integers(0, 3, size).astype(float)
        values[f"g{k}"] = np.cumsum(gains) if kind < 2 else rng.normal(0.0, 2.0, size)
    terms = tuple(
        CostTerm(f"layer{n}", widths, random_price(rng)) for n, widths in enumerate(FAMILIES[family](rng))
    )
    return values, NetworkCost("ms", permitted, terms, float(rng.uniform(0.0, 5.0)))


def enumerate_all(values: Values, cost: NetworkCost) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return value and cost of every combination of counts, from the prices alone."""
    names = list(cost.permitted)
    rest = np.arange(math.prod(len(counts) for counts in cost.permitted.values()))
    at = {}
    for name in reversed(names):
        rest, at[name] = np.divmod(rest, len(cost.permitted[name]))
    value = sum((values[name][at[name]] for name in names), np.zeros(1))
    total = np.full(len(value), cost.constant)
    for term in cost.terms:
        channels = []
        for axis in term.widths:
            here = np.full(len(value), axis.constant)
            for name, per_unit in axis.groups:
                here = here + per_unit * np.asarray(cost.permitted[name])[at[name]]
            channels.append(here)
        total = total + term.price(*channels)
    return value, total


def true_value(values: Values, cost: NetworkCost, counts: Mapping[str, int]) -> float:
    return float(sum(values[name][cost.permitted[name].index(counts[name])] for name in cost.permitted))


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_small_instances_reach_the_optimum_of_brute_force(family: str, block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
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
    for seed in range(40):
        values, cost = random_instance(family, 1000 + seed)
        value, total = enumerate_all(values, cost)
        problem = tabulate(cost)
        links += len(plan(problem, max_cells).links)
        arrays = [values[group] for group in problem.groups]
        budget = float(np.quantile(total, 0.3))
        best = float(value[total <= budget * (1 + 1e-12)].max())
        try:
            choice, bound = coupled_choice(problem, arrays, budget, max_cells=max_cells)
        except InfeasibleBudgetError:
            continue
        reached = float(sum(v[i] for v, i in zip(arrays, choice, strict=True)))
        assert cost.cost(problem.counts(choice)) <= budget * (1 + 1e-9)
        assert reached <= best + 1e-9
        assert bound >= best - 1e-9 * max(1.0, abs(best)), seed
        optimal += reached >= best - 1e-9
        total_runs += 1
    assert links > 0 or (family in ("chain", "residual") and max_cells > 1)
    assert total_runs >= 38
    assert optimal >= 0.9 * total_runs


@pytest.mark.parametrize(("family", "max_cells"), [("overlapping", 20), ("residual", 1), ("nested", 1)])
def test_a_listing_from_the_worst_start_finds_the_optimum(family: str, max_cells: int) -> None:
    improved, links = 0, 0
    for seed in range(40):
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


@settings(max_examples=100, deadline=None)
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


# Known networks.


def budgets(cost: NetworkCost) -> list[float]:
    full, low = cost.cost(cost.full_counts), cost.cost(cost.smallest_counts)
    return [share * full for share in (0.8, 0.55, 0.3, 0.15) if share * full > 1.05 * low]


def network(name: str, kind: str, seed: int = 0) -> tuple[Values, NetworkCost]:
    cost = instances.network_cost(name, kind)
    return instances.values_of(cost, instances.synthetic_importances(cost, seed)), cost


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("resnet18", 1814073344),
        ("resnet50", 4089184256),
        ("resnet101", 7801405440),
        ("mobilenet_v2", 300774272),
        ("efficientnet_b0", 385816672),
        ("densenet121", 2834161664),
        ("googlenet", 1498376192),
    ],
)
def test_networks_have_their_published_multiply_accumulates(name: str, flops: int) -> None:
    cost = instances.network_cost(name, "flops")
    assert cost.cost(cost.full_counts) == flops


@pytest.mark.parametrize("kind", ["flops", "latency"])
@pytest.mark.parametrize("name", [name for name in instances.NETWORKS if name != "hardnet68"])
def test_networks_are_solved_to_a_hundredth_percent_within_the_budget(name: str, kind: str) -> None:
    values, cost = network(name, kind)
    for budget in budgets(cost):
        found = allocate(values, cost, budget)
        assert 0.99 * budget <= found.cost <= budget * (1 + 1e-9)
        assert found.cost == cost.cost(found.counts)
        assert found.value == pytest.approx(true_value(values, cost, found.counts))
        assert found.gap <= 1e-4


def test_concats_that_are_not_nested_are_solved_to_a_tenth_percent() -> None:
    values, cost = network("hardnet68", "flops")
    for budget in budgets(cost)[1:3]:
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
        ("resnet18", "flops", 16),
        ("resnet18", "latency", 16),
        ("resnet50", "latency", 64),
        ("mobilenet_v2", "latency", 16),
        ("mobilenet_v2", "flops", 16),
        ("efficientnet_b0", "flops", 16),
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


# Stability.


def test_equal_inputs_give_equal_counts_with_and_without_a_start() -> None:
    for name, kind in (("resnet50", "latency"), ("densenet121", "flops")):
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


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "unet", "densenet121"])
@pytest.mark.parametrize("kind", ["flops", "latency"])
def test_importances_disturbed_by_one_percent_change_under_five_percent(name: str, kind: str) -> None:
    cost = instances.network_cost(name, kind)
    importances = instances.synthetic_importances(cost, 1)
    rng = np.random.default_rng(2)
    disturbed = {g: i * (1.0 + 0.01 * rng.standard_normal(len(i))) for g, i in importances.items()}
    units = sum(len(i) for i in importances.values())
    for budget in budgets(cost):
        before = allocate(instances.values_of(cost, importances), cost, budget)
        after = allocate(instances.values_of(cost, disturbed), cost, budget, start=before.counts)
        changed = 0
        for group in importances:
            kept = set(np.argsort(-importances[group])[: before.counts[group]])
            changed += len(kept ^ set(np.argsort(-disturbed[group])[: after.counts[group]]))
        assert changed <= 0.05 * units


# The certificate's limits, and the paper's method.


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


def test_the_papers_method_prices_layers_at_the_current_neighbours() -> None:
    a, b = width("a"), width("b")
    terms = (
        CostTerm("conv1", (Width(3), a), lambda x, y: 1.0 * x * y),
        CostTerm("conv2", (a, b), lambda x, y: 1.0 * x * y),
        CostTerm("conv3", (b, Width(10)), lambda x, y: 1.0 * x * y),
    )
    cost = NetworkCost("MAC", {"a": (1, 2, 4), "b": (2, 8)}, terms, 7.0)
    current = {"a": 2, "b": 8}
    costs, constant = linearised(cost, tabulate(cost), current)
    np.testing.assert_allclose(costs[0], [8.0, 16.0, 32.0])
    np.testing.assert_allclose(costs[1], [20.0, 80.0])
    assert constant == 7.0 + 3 * 2
    values = {"a": np.array([1.0, 2.0, 2.5]), "b": np.array([1.0, 2.0])}
    found = allocate(values, cost, 7.0 + 6.0 + 96.0, "paper", current=current)
    assert found.counts == {"a": 2, "b": 8}
    assert found.method == "paper"
    assert found.bound == found.gap == math.inf
    found = allocate(values, cost, 7.0 + 6.0 + 100.0, "paper", current={"a": 4, "b": 2})
    assert found.cost == cost.cost(found.counts)
    assert found.counts == {"a": 4, "b": 8}
    assert found.cost > 7.0 + 6.0 + 100.0


def test_the_papers_method_takes_the_cheapest_counts_where_its_capacity_has_none() -> None:
    values, cost = tiny()
    assert allocate(values, cost, 0.5, "paper").counts == {"a": 1, "b": 1}


def test_the_papers_costs_add_up_at_the_current_counts() -> None:
    for family in FAMILIES:
        _, cost = random_instance(family, 5)
        current = cost.full_counts
        costs, constant = linearised(cost, tabulate(cost), current)
        assert constant + sum(c[-1] for c in costs) == pytest.approx(cost.cost(current))


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "densenet121"])
def test_the_coupled_method_beats_the_paper_at_its_own_true_cost(name: str) -> None:
    values, cost = network(name, "flops")
    counts: Mapping[str, int] = cost.full_counts
    full = cost.cost(counts)
    for step in range(1, 9):
        last = allocate(values, cost, full * 0.3 ** (step / 8), "paper", current=counts)
        counts = last.counts
    assert allocate(values, cost, last.cost).value >= last.value


# Corner cases and refusals.


def tiny() -> tuple[dict[str, list[float]], NetworkCost]:
    terms = (CostTerm("conv", (width("a"), width("b")), lambda x, y: 1.0 * x * y),)
    return {"a": [1.0, 2.0], "b": [1.0, 3.0]}, NetworkCost("ms", {"a": (1, 2), "b": (1, 2)}, terms)


def solved(values: Mapping[str, list[float]], cost: NetworkCost, budget: float) -> Allocation:
    return allocate(values, cost, budget)


def test_corner_cases() -> None:
    values, cost = tiny()
    assert solved(values, cost, 2.0).counts == {"a": 1, "b": 2}
    assert solved(values, cost, 100.0).counts == {"a": 2, "b": 2}
    assert solved({"a": [0.0, 0.0], "b": [0.0, 0.0]}, cost, 3.0).value == 0.0
    assert solved({"a": [-1.0, -5.0], "b": [-2.0, -1.0]}, cost, 1.0).counts == {"a": 1, "b": 1}
    no_choice = NetworkCost("ms", {}, (), 3.0)
    assert solved({}, no_choice, 3.0).counts == {}
    assert allocate({}, no_choice, 3.0, "paper").cost == 3.0
    with pytest.raises(InfeasibleBudgetError):
        solved({}, no_choice, 2.0)
    free = NetworkCost("ms", {"a": (1, 2), "b": (1, 2), "free": (4, 8)}, cost.terms)
    assert solved({**values, "free": [1.0, 2.0]}, free, 1.0).counts == {"a": 1, "b": 1, "free": 8}
    negative = NetworkCost("ms", cost.permitted, cost.terms, -10.0)
    assert solved(values, negative, -8.0).counts == {"a": 1, "b": 2}
    single = NetworkCost("ms", {"a": (2,), "b": (1, 2)}, cost.terms)
    assert solved({"a": [1.0], "b": [1.0, 3.0]}, single, 2.0).counts == {"a": 2, "b": 1}


def test_groups_without_a_choice_cost_nothing_to_carry() -> None:
    fixed = {f"fixed{k}": (3,) for k in range(40)}
    permitted = {"a": (1, 2, 3), **fixed, "b": (1, 5), "c": (2, 4), "hub": (1, 2)}
    terms = (
        CostTerm("concat", (width("a", "b", *fixed), width("c")), lambda x, y: 1.0 * x * y),
        CostTerm("other", (width("b", "c", *fixed), width("a")), lambda x, y: 2.0 * x * np.sqrt(y)),
        *(CostTerm(name, (width("hub"), width(name)), lambda x, y: 1.0 * x * y) for name in fixed),
    )
    cost = NetworkCost("ms", permitted, terms)
    values = {name: 0.1 * np.arange(1.0, len(counts) + 1.0) for name, counts in permitted.items()}
    value, total = enumerate_all(values, cost)
    for share in (0.2, 0.5, 0.9):
        budget = float(np.quantile(total, share))
        assert allocate(values, cost, budget).value == pytest.approx(value[total <= budget].max())


def test_a_width_shared_by_both_axes_is_priced_on_the_diagonal() -> None:
    grouped = CostTerm("grouped", (width("a", per_unit=4), width("a", constant=1)), lambda x, y: 1.0 * x * y)
    cost = NetworkCost("ms", {"a": (1, 2, 3)}, (grouped,))
    found = solved({"a": [1.0, 2.0, 3.0]}, cost, 24.0)
    assert found.counts == {"a": 2}
    assert found.cost == 24.0


def test_arguments_that_do_not_fit_are_refused() -> None:
    values, cost = tiny()
    with pytest.raises(InputError, match=r"missing \['b'\]"):
        solved({"a": [1.0, 2.0]}, cost, 2.0)
    with pytest.raises(InputError, match="one value each"):
        solved({"a": [1.0], "b": [1.0, 2.0]}, cost, 2.0)
    with pytest.raises(InputError, match="not all finite"):
        solved({"a": [1.0, math.nan], "b": [1.0, 2.0]}, cost, 2.0)
    with pytest.raises(InputError, match="budget must be finite"):
        solved(values, cost, math.inf)
    with pytest.raises(InputError, match="method"):
        allocate(values, cost, 2.0, "greedy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not permitted"):
        allocate(values, cost, 2.0, start={"a": 1, "b": 7})
    with pytest.raises(InputError, match=r"missing for groups \['b'\]"):
        allocate(values, cost, 2.0, "paper", current={"a": 1})


@pytest.mark.parametrize(
    ("price", "message"),
    [
        (lambda x, y: np.where(x > 1, np.nan, 1.0 * x * y), r"is nan at widths \[2, 1\]"),
        (lambda x, y: np.ones(5), "must be vectorised"),
    ],
)
def test_prices_that_cannot_be_tabulated_are_refused(price: Price, message: str) -> None:
    values, cost = tiny()
    broken = NetworkCost("ms", cost.permitted, (CostTerm("conv", cost.terms[0].widths, price),))
    with pytest.raises(InputError, match=message):
        solved(values, broken, 2.0)


def test_permitted_counts_must_ascend() -> None:
    cost = NetworkCost("ms", {"a": (2, 1)}, ())
    with pytest.raises(InputError, match="'a' must be ascending"):
        solved({"a": [1.0, 2.0]}, cost, 2.0)
    three = NetworkCost("ms", {"a": (1, 2)}, (CostTerm("t", (width("a"),) * 3, lambda x, y, z: x),))
    with pytest.raises(InputError, match="at most two"):
        solved({"a": [1.0, 2.0]}, three, 2.0)
