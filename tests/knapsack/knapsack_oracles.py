"""Oracles and instances for the tests of the multiple-choice knapsack."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.knapsack import KnapsackSolution, solve_knapsack

Vectors = list[np.ndarray[Any, Any]]
Instance = tuple[Vectors, Vectors, float]

#: Two float64 sums of the same few numbers differ by no more than this, relatively.
ROUNDING = 1e-12


def limit_of(capacity: float) -> float:
    return capacity + 1e-12 * max(1.0, abs(capacity))


def check_consistent(solution: KnapsackSolution, values: Vectors, costs: Vectors, capacity: float) -> None:
    """What every answer must satisfy, optimal or not."""
    assert solution.value == math.fsum(v[i] for v, i in zip(values, solution.choices, strict=True))
    assert solution.cost == math.fsum(c[i] for c, i in zip(costs, solution.choices, strict=True))
    assert solution.cost <= limit_of(capacity)
    assert solution.bound >= solution.value
    assert solution.optimal == (solution.bound == solution.value)
    assert solution.seconds >= 0


def check_against_brute_force(values: Vectors, costs: Vectors, capacity: float) -> None:
    combinations = list(itertools.product(*(range(len(v)) for v in values)))
    total_value = np.array([math.fsum(v[i] for v, i in zip(values, k, strict=True)) for k in combinations])
    total_cost = np.array([math.fsum(c[i] for c, i in zip(costs, k, strict=True)) for k in combinations])
    fits = total_cost <= limit_of(capacity)
    if not fits.any():
        with pytest.raises(InfeasibleBudgetError) as caught:
            solve_knapsack(values, costs, capacity)
        assert (caught.value.smallest, caught.value.budget) == (total_cost.min(), capacity)
        return
    solution = solve_knapsack(values, costs, capacity)
    check_consistent(solution, values, costs, capacity)
    assert solution.optimal
    best = total_value[fits].max()
    assert abs(solution.value - best) <= ROUNDING * max(1.0, abs(best)), (values, costs, capacity)


def solve_with_highs(values: Vectors, costs: Vectors, capacity: float) -> float:
    """Return the best value by an integer program over one binary an option."""
    sizes = [len(v) for v in values]
    one_each = sparse.csr_matrix(
        (np.ones(sum(sizes)), (np.repeat(np.arange(len(sizes)), sizes), np.arange(sum(sizes))))
    )
    result = milp(
        -np.concatenate(values),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(np.concatenate(costs)[None], -np.inf, capacity),
        ],
        integrality=np.ones(sum(sizes)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": 60.0},
    )
    assert result.status == 0, result.message
    picked = result.x > 0.5
    assert picked.sum() == len(sizes)
    return float(np.concatenate(values)[picked].sum())


def solve_by_dynamic_program(values: Vectors, costs: Vectors, capacity: float) -> float:
    """Return the best value for non-negative integer costs, by a table over all costs in reach."""
    best = np.full(int(capacity) + 1, -np.inf)
    best[0] = 0.0
    for v, c in zip(values, costs, strict=True):
        extended = np.full_like(best, -np.inf)
        for value, cost in zip(v, c.astype(int), strict=True):
            reached = extended[cost:]
            np.maximum(reached, best[: len(best) - cost] + value, out=reached)
        best = extended
    return float(best.max())


def network(group_sizes: list[int], seed: int, tile: int) -> tuple[Vectors, Vectors]:
    """Importances sorted and summed, staircase latencies: whole units, counts in multiples of 8."""
    rng = np.random.default_rng(seed)
    values, costs = [], []
    for size in group_sizes:
        counts = np.arange(8, size + 1, 8)
        importance = np.sort(rng.lognormal(0, 1, size) * rng.lognormal(0, 0.7))[::-1]
        values.append(np.round(1000 * np.cumsum(importance)[counts - 1]))
        steps = np.ceil(counts / tile) * rng.integers(200, 2000) + counts * rng.integers(1, 5)
        costs.append(steps + rng.integers(0, 3, len(counts)))
    return values, costs


RESNET50 = [
    64,
    *([64, 64] * 3),
    256,
    *([128, 128] * 4),
    512,
    *([256, 256] * 6),
    1024,
    *([512, 512] * 3),
    2048,
]
DENSENET = [n for _ in range(60) for n in (128, 32)]


def random_integers(groups: int, options: int, seed: int) -> tuple[Vectors, Vectors]:
    rng = np.random.default_rng(seed)
    values = [rng.integers(1, 1000, options).astype(float) for _ in range(groups)]
    return values, [rng.integers(1, 1000, options).astype(float) for _ in range(groups)]


def clustered(groups: int, options: int, seed: int) -> tuple[Vectors, Vectors]:
    """Costs within 1% of multiples of 1000, values nearly in proportion: the relaxation is blind."""
    rng = np.random.default_rng(seed)
    level = 1000.0 * np.arange(1, options + 1)
    values = [level + rng.integers(-10, 11, options) for _ in range(groups)]
    return values, [level + rng.integers(-10, 11, options) for _ in range(groups)]


def strongly_correlated(groups: int, options: int, seed: int) -> tuple[Vectors, Vectors]:
    rng = np.random.default_rng(seed)
    costs = [np.cumsum(np.sort(rng.integers(1, 100, options))).astype(float) for _ in range(groups)]
    return [c + 10.0 * np.arange(1, options + 1) for c in costs], costs


def even_costs(groups: int, options: int, seed: int) -> tuple[Vectors, Vectors]:
    """All costs even but one."""
    rng = np.random.default_rng(seed)
    costs = [2.0 * np.sort(rng.integers(1, 500, options)) for _ in range(groups)]
    costs[0][-1] += 1
    return [np.sort(rng.integers(1, 1000, options)).astype(float) for _ in range(groups)], costs


LARGE: dict[str, tuple[Vectors, Vectors]] = {
    "resnet50": network(RESNET50, 0, 32),
    "densenet, all steps coarse": network(DENSENET, 1, 64),
    "random 300 x 16": random_integers(300, 16, 2),
    "random 30 x 200": random_integers(30, 200, 3),
    "strongly correlated 20 x 8": strongly_correlated(20, 8, 5),
    "even 40 x 8": even_costs(40, 8, 6),
}
