"""The exact multiple-choice knapsack against brute force, HiGHS and a dynamic program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from knapsack_oracles import (
    LARGE,
    Instance,
    check_against_brute_force,
    check_consistent,
    clustered,
    solve_by_dynamic_program,
    solve_with_highs,
)

from smcp_fx.knapsack import problem, rounds, solve_knapsack
from smcp_fx.knapsack.arrays import ArrayOps, TorchOps
from smcp_fx.knapsack.core import build_core

# --- small instances, by family, against brute force -----------------------------------------------------

Family = Callable[[np.random.Generator, int], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def decimals(digits: int) -> Family:
    return lambda rng, m: (np.round(rng.random(m), digits), np.round(rng.random(m), digits))


def small_integers(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    return rng.integers(-3, 4, m).astype(float), rng.integers(-3, 4, m).astype(float)


def subset_sum(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    costs = np.round(rng.random(m), 2)
    return costs.copy(), costs


def real_subset_sum(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    costs = rng.random(m)
    return costs.copy(), costs


def clusters(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    costs = rng.integers(0, 4, m) * 100 + rng.uniform(-1, 1, m)
    return costs / 100 + rng.uniform(-0.1, 0.1, m), costs


def wide_range(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    scale = 10.0 ** rng.integers(-8, 8, 2)
    return rng.normal(size=m) * scale[0], rng.normal(size=m) * scale[1]


def worthless(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    return np.zeros(m), rng.integers(0, 3, m) * 0.1


def duplicates(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    return np.repeat(np.round(rng.random(1), 2), m), np.repeat(np.round(rng.random(1), 2), m)


def monotone(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    return np.sort(rng.random(m)), np.sort(rng.random(m))


def forbidden(rng: np.random.Generator, m: int) -> tuple[Any, Any]:
    values, costs = rng.random(m), np.round(rng.random(m), 1)
    values[rng.integers(m)] = -1e30
    costs[rng.integers(m)] = 1e30
    return values, costs


FAMILIES: dict[str, Family] = {
    "one decimal": decimals(1),
    "three decimals": decimals(3),
    "small integers": small_integers,
    "subset sum": subset_sum,
    "real subset sum": real_subset_sum,
    "clusters": clusters,
    "wide range": wide_range,
    "worthless": worthless,
    "duplicates": duplicates,
    "monotone": monotone,
    "forbidden": forbidden,
}


def small_instance(family: Family, rng: np.random.Generator) -> Instance:
    """One to five groups of one to six options, and a capacity on, near or between reachable costs."""
    pairs = [family(rng, int(rng.integers(1, 7))) for _ in range(rng.integers(1, 6))]
    values, costs = [v for v, _ in pairs], [c for _, c in pairs]
    reachable = math.fsum(c[rng.integers(len(c))] for c in costs)
    spread = math.fsum(float(abs(c).max()) for c in costs if abs(c).max() < 1e20)
    nearby = round(reachable, 2)
    anywhere = math.fsum(float(c.min()) for c in costs) + rng.uniform(-0.05, 1.5) * spread
    return values, costs, float(rng.choice([reachable, nearby, anywhere]))


@pytest.mark.parametrize("name", FAMILIES)
def test_small_instances_equal_brute_force(name: str) -> None:
    rng = np.random.default_rng(sorted(FAMILIES).index(name))
    for _ in range(200):
        check_against_brute_force(*small_instance(FAMILIES[name], rng))


def test_rounded_costs_lose_no_choice_and_leave_a_step_to_spare() -> None:
    """On a grid of steps of 1, where each group's costs are rounded by half a step, up or down."""
    costs = np.array([3.5, 4.5, 5.0, 6.5, 8.5, 2.0**59])
    found = problem.read_problem([np.arange(6.0)] * 2, [costs] * 2, 13.0, "cpu")
    core = build_core(found, np.array([0, 6]), np.arange(12))
    assert core.costs[:6].tolist() == [0, 0, 1, 2, 4, 2**59 - 4]
    for first, second in itertools.product(range(6), repeat=2):
        steps, left = int(core.costs[first] + core.costs[6 + second]), 13.0 - costs[first] - costs[second]
        assert left < 0 or steps <= core.room
        assert left >= 1 or steps > core.safe_room


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_arrays_give_what_numpy_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of a GPU, run on the CPU."""

    def torch_ops(device: torch.device) -> ArrayOps:
        return TorchOps(device)

    monkeypatch.setattr(problem, "ops_for", torch_ops)
    rng = np.random.default_rng(1000 + sorted(FAMILIES).index(name))
    for _ in range(60):
        check_against_brute_force(*small_instance(FAMILIES[name], rng))


@pytest.mark.parametrize("name", FAMILIES)
def test_searches_that_outgrow_their_size_still_end_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels so small that halves are thinned, searches repeated and rounding cuts tried."""
    monkeypatch.setattr(rounds, "_LEVELS", (2, 8, 64, 1 << 15))
    monkeypatch.setattr(rounds, "_FIRST_OPTIONS", 1)
    rng = np.random.default_rng(2000 + sorted(FAMILIES).index(name))
    for _ in range(100):
        check_against_brute_force(*small_instance(FAMILIES[name], rng))


option = st.tuples(st.integers(-50, 50), st.integers(-50, 50))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(option, min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(-200, 200),
    st.sampled_from([1.0, 0.1, 0.01, 0.125]),
)
def test_any_grid_equals_brute_force(groups: list[list[tuple[int, int]]], capacity: int, step: float) -> None:
    values = [np.array([v * step for v, _ in g]) for g in groups]
    costs = [np.array([c * step for _, c in g]) for g in groups]
    check_against_brute_force(values, costs, capacity * step)


# --- larger instances; integers, so that HiGHS's feasibility tolerance cannot matter ---------------------


@pytest.mark.parametrize("fraction", [0.15, 0.8])
@pytest.mark.parametrize("name", LARGE)
def test_large_instances_equal_highs(name: str, fraction: float) -> None:
    values, costs = LARGE[name]
    low, high = sum(c.min() for c in costs), sum(c.max() for c in costs)
    capacity = float(np.floor(low + fraction * (high - low)))
    solution = solve_knapsack(values, costs, capacity)
    check_consistent(solution, values, costs, capacity)
    assert solution.optimal
    assert solution.value == round(solve_with_highs(values, costs, capacity))


@pytest.mark.parametrize("between", [250, 500, 900])
@pytest.mark.parametrize(("groups", "options"), [(20, 8), (60, 4), (100, 2)])
def test_capacities_between_clusters_equal_the_dynamic_program(
    groups: int, options: int, between: int
) -> None:
    values, costs = clustered(groups, options, groups)
    capacity = 1000.0 * (groups * (options + 1) // 2) + between
    solution = solve_knapsack(values, costs, capacity)
    check_consistent(solution, values, costs, capacity)
    assert solution.optimal
    assert solution.value == solve_by_dynamic_program(values, costs, capacity)


def test_ten_thousand_groups_reach_the_best_of_their_relaxation() -> None:
    """Values and costs in {0, 1, 2} of one price: the best value is the capacity, whatever the order."""
    groups = 10_000
    options = np.array([0.0, 0.1, 0.2])
    solution = solve_knapsack([options] * groups, [options] * groups, 1234.5)
    assert solution.optimal
    assert solution.value == pytest.approx(1234.5, rel=1e-12)
