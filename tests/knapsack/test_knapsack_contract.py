"""The contract of the multiple-choice knapsack: tolerance, errors, kinds of arrays, limits, determinism."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from knapsack_oracles import LARGE, ROUNDING, Vectors, check_consistent, random_integers

from smcp_fx.errors import InfeasibleBudgetError, InputError
from smcp_fx.knapsack import KnapsackSolution, solve_knapsack


@pytest.mark.parametrize("count", [1, 3, 6, 10, 33, 100, 1000])
@pytest.mark.parametrize("step", [0.1, 0.01, 0.7, 1.1])
def test_decimal_costs_that_fit_exactly_are_used(count: int, step: float) -> None:
    capacity = round(count * step, 2)
    solution = solve_knapsack([np.array([0.0, 1.0])] * count, [np.array([0.0, step])] * count, capacity)
    assert solution.optimal
    assert solution.value == count


def test_costs_beyond_the_tolerance_do_not_fit() -> None:
    for excess, taken in ((5e-13, 2), (2e-12, 1)):
        solution = solve_knapsack([[0, 1], [0, 1]], [[0, 0.5], [0, 0.5 + excess]], 1.0)
        assert solution.value == taken


def test_infeasible_capacity_names_the_smallest_cost() -> None:
    with pytest.raises(InfeasibleBudgetError, match="raise it to at least that") as caught:
        solve_knapsack([[1, 2], [3, 4]], [[0.25, 1], [0.5, 0.75]], 0.7)
    assert caught.value.smallest == 0.75
    assert caught.value.budget == 0.7


@pytest.mark.parametrize(
    ("values", "costs", "capacity", "message"),
    [
        ([], [], 1.0, "no groups"),
        ([[1.0]], [[1.0], [2.0]], 1.0, "1 groups and costs has 2"),
        ([[1.0], []], [[1.0], []], 3.0, r"values\[1\] has shape \(0,\)"),
        ([np.array([1.0]), np.array([])], [np.array([1.0]), np.array([])], 3.0, r"values\[1\] has shape"),
        ([[1.0, 2.0]], [[1.0]], 3.0, "group 0 has 2 values and 1 costs"),
        ([[1.0], [math.nan, 1.0]], [[1.0], [1.0, 1.0]], 3.0, r"values\[1\]\[0\] is nan"),
        ([[1.0], [1.0, 1.0]], [[1.0], [1.0, math.inf]], 3.0, r"costs\[1\]\[1\] is inf"),
        ([[-math.inf, 1.0]], [[1.0, 1.0]], 3.0, r"values\[0\]\[0\] is -inf"),
        ([[1e308], [1e308]], [[1.0], [1.0]], 3.0, r"values\[0\]\[0\] is 1e\+308"),
        ([[1.0]], [[1.0]], math.nan, "capacity is nan"),
        ([[1.0]], [[1.0]], math.inf, "capacity is inf"),
        ([[1.0]], [[1.0]], "much", "capacity must be a number"),
        ([np.ones((2, 2))], [np.ones((2, 2))], 3.0, r"shape \(2, 2\)"),
        ([np.array(1.0)], [np.array(1.0)], 3.0, r"shape \(\)"),
        ([np.array([1j])], [np.array([1.0])], 3.0, "complex"),
        ([torch.tensor([True])], [torch.tensor([1.0])], 3.0, "bool"),
        ([["a"]], [[1.0]], 3.0, "not a 1-D array of numbers"),
    ],
)
def test_unusable_arguments_are_refused(values: Any, costs: Any, capacity: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        solve_knapsack(values, costs, capacity)


@pytest.mark.parametrize("limits", [{"time_limit": -1.0}, {"memory_limit": math.nan}, {"device": "abacus"}])
def test_unusable_settings_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(limits))):
        solve_knapsack([[1.0]], [[1.0]], 1.0, **limits)


def test_every_kind_of_array_gives_the_same_answer() -> None:
    values, costs = random_integers(12, 6, 7)
    expected = solve_knapsack(values, costs, 3000)
    kinds: list[Callable[[np.ndarray[Any, Any]], Any]] = [
        lambda x: x.tolist(),
        lambda x: x.astype(np.int32),
        lambda x: x.astype(np.float32),
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.float32, requires_grad=True),
        lambda x: torch.tensor(x).to(torch.int64),
    ]
    for kind in kinds:
        solution = solve_knapsack([kind(v) for v in values], [kind(c) for c in costs], 3000)
        assert (solution.choices, solution.value) == (expected.choices, expected.value)
    mixed = [torch.tensor(v) if g % 2 else v for g, v in enumerate(values)]
    assert solve_knapsack(mixed, costs, 3000).choices == expected.choices


def test_arguments_are_left_as_they_are() -> None:
    values, costs = random_integers(12, 6, 8)
    before = [v.copy() for v in values], [c.copy() for c in costs]
    solve_knapsack(values, costs, 3000)
    for x, y in zip([*values, *costs], [*before[0], *before[1]], strict=True):
        np.testing.assert_array_equal(x, y)


def test_order_of_groups_and_options_does_not_change_the_value() -> None:
    rng = np.random.default_rng(9)
    values, costs = [rng.random(8) for _ in range(30)], [rng.random(8) for _ in range(30)]
    expected = solve_knapsack(values, costs, 10.0)
    for _ in range(10):
        order = rng.permutation(30)
        inner = [rng.permutation(8) for _ in range(30)]
        shuffled = solve_knapsack(
            [values[g][inner[g]] for g in order], [costs[g][inner[g]] for g in order], 10.0
        )
        assert shuffled.value == expected.value
        back = {int(g): int(inner[g][i]) for g, i in zip(order, shuffled.choices, strict=True)}
        assert tuple(back[g] for g in range(30)) == expected.choices


@pytest.mark.parametrize("name", ["resnet50", "even 40 x 8", "strongly correlated 20 x 8"])
def test_equal_arguments_give_equal_answers(name: str) -> None:
    values, costs = LARGE[name]
    capacity = 0.4 * sum(c.max() for c in costs)

    def answer(solution: KnapsackSolution) -> tuple[Any, ...]:
        return solution.choices, solution.value, solution.bound

    first = solve_knapsack(values, costs, capacity)
    assert answer(solve_knapsack(values, costs, capacity)) == answer(first)


# --- when time or memory runs out ------------------------------------------------------------------------


def classical_greedy(values: Vectors, costs: Vectors, capacity: float) -> float:
    """From the cheapest options, the exchange of most value per cost that fits, until none does."""
    chosen = [int(np.lexsort((-v, c))[0]) for v, c in zip(values, costs, strict=True)]
    while True:
        room = capacity - math.fsum(c[i] for c, i in zip(costs, chosen, strict=True))
        best = (0.0, -1, -1)
        for g, i in enumerate(chosen):
            for j in range(len(values[g])):
                gain, price = values[g][j] - values[g][i], costs[g][j] - costs[g][i]
                if gain > 0 and price <= room:
                    best = max(best, (gain / price if price > 0 else math.inf, g, j))
        if best[1] < 0:
            return math.fsum(v[i] for v, i in zip(values, chosen, strict=True))
        chosen[best[1]] = best[2]


@pytest.mark.parametrize("limits", [{"time_limit": 0.0}, {"memory_limit": 0}])
@pytest.mark.parametrize("name", [*LARGE, "real subset sum"])
def test_without_means_the_answer_is_no_worse_than_greedy(name: str, limits: dict[str, float]) -> None:
    if name in LARGE:
        values, costs = LARGE[name]
    else:
        rng = np.random.default_rng(10)
        costs = [rng.random(12) for _ in range(30)]
        values = costs
    for fraction in (0.15, 0.8):
        low, high = sum(c.min() for c in costs), sum(c.max() for c in costs)
        capacity = low + fraction * (high - low)
        solution = solve_knapsack(values, costs, capacity, **limits)
        check_consistent(solution, values, costs, capacity)
        assert solution.value >= classical_greedy(values, costs, capacity)
        assert solution.bound >= solve_knapsack(values, costs, capacity, time_limit=0.5).value


def test_real_subset_sum_is_certified_to_a_billionth() -> None:
    rng = np.random.default_rng(11)
    costs = [rng.random(64) for _ in range(38)]
    solution = solve_knapsack(costs, costs, 19.0, time_limit=60.0)
    check_consistent(solution, costs, costs, 19.0)
    assert solution.bound - solution.value <= 1e-9 * solution.value
    assert solution.bound >= 19.0 * (1 - ROUNDING)


def test_memory_stays_within_its_limit() -> None:
    rng = np.random.default_rng(12)
    costs = [np.cumsum(np.sort(rng.integers(1, 10_000, 20))).astype(float) for _ in range(100)]
    values = [c + 10.0 * np.arange(20) for c in costs]
    capacity = float(np.floor(sum(c.mean() for c in costs)))
    limit = 16 * 2**20
    tracemalloc.start()
    try:
        solution = solve_knapsack(values, costs, capacity, memory_limit=limit, time_limit=60.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= limit
    check_consistent(solution, values, costs, capacity)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gpu_gives_the_cpus_value() -> None:
    for values, costs in LARGE.values():
        low, high = sum(c.min() for c in costs), sum(c.max() for c in costs)
        capacity = float(np.floor(low + 0.3 * (high - low)))
        on_cpu = solve_knapsack(values, costs, capacity)
        on_gpu = solve_knapsack(
            [torch.tensor(v, device="cuda") for v in values],
            [torch.tensor(c, device="cuda") for c in costs],
            capacity,
            device="cuda",
        )
        assert on_gpu.optimal
        assert on_gpu.value == on_cpu.value
