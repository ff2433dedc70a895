"""The exact solver: dual bound, greedy filling, reduction, then searches with a growing loss budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from smcp_fx.errors import InputError
from smcp_fx.knapsack.arrays import Array
from smcp_fx.knapsack.core import build_core
from smcp_fx.knapsack.dual import KnapsackDual, solve_dual
from smcp_fx.knapsack.problem import KnapsackProblem, read_problem
from smcp_fx.knapsack.rounds import RoundsOutcome, solve_core


@dataclass(frozen=True)
class KnapsackSolution:
    """One option per group, and a bound on the best value.

    ``choices[g]`` is the option taken of group g; ``value`` and ``cost`` are the correctly rounded sums over them. No
    fitting choice has a value above ``bound`` (up to float64's rounding), and ``optimal`` says that ``value`` reaches
    it. ``seconds`` is the wall-clock time of the solve.
    """

    choices: tuple[int, ...]
    value: float
    cost: float
    bound: float
    optimal: bool
    seconds: float


def solve_knapsack(
    values: Sequence[Any],
    costs: Sequence[Any],
    capacity: float,
    device: str | torch.device = "cpu",
    *,
    time_limit: float = 5.0,
    memory_limit: float = 2 * 2**30,
) -> KnapsackSolution:
    """Take one option of each group: total cost within ``capacity``, total value as large as possible.

    ``values[g]`` and ``costs[g]`` are 1-D, of one length, with one entry for each option of group g, in any order and
    of any sign; computed in float64 on ``device``. A choice fits if ``fsum(costs) <= capacity + 1e-12 * max(1,
    abs(capacity))``. The answer is a function of the arguments alone, unless ``time_limit`` (seconds) is reached.
    Past it, or past ``memory_limit`` (bytes for partial choices), the best choice so far is returned with the bound
    proved so far. This is SMCP's "Multiple-choice knapsack problem"; docs/explanations/allocation.md explains the
    method.

    Raises:
        InputError: arrays that do not fit together, a group without options, numbers that are not finite.
        InfeasibleBudgetError: the cheapest options together exceed ``capacity``.

    >>> solution = solve_knapsack([[0, 6, 10], [0, 7]], [[0.0, 0.1, 0.2], [0.0, 0.2]], capacity=0.3)
    >>> solution.choices, solution.value, solution.optimal
    ((1, 1), 13.0, True)
    """
    start = time.perf_counter()
    problem = read_problem(values, costs, capacity, device)
    deadline = start + _positive(time_limit, "time_limit")
    picked, value, cost, bound = _solve(problem, deadline, _positive(memory_limit, "memory_limit"))
    choices = problem.groups.ops.host(picked) - problem.starts
    return KnapsackSolution(
        tuple(choices.tolist()), value, cost, bound, bound <= value, time.perf_counter() - start
    )


def _solve(
    problem: KnapsackProblem, deadline: float, memory_limit: float
) -> tuple[Array, float, float, float]:
    """Return the options taken (flat indices), their value and cost, and a bound."""
    groups = problem.groups
    dual = solve_dual(groups, problem.worth, problem.costs, problem.limit)
    base = dual.under
    base_value, base_cost = problem.evaluate(base)
    if base_cost > problem.limit:
        # Plain sums of 10,000 costs may round differently than fsum: count the cheapest choice as fitting.
        _, base = groups.cheapest(problem.worth, problem.costs)
        base_value, base_cost = problem.evaluate(base)
    if dual.multiplier == 0.0 and float(dual.loss[base].max()) == 0.0:
        return base, base_value, base_cost, base_value
    core = build_core(problem, base, _promising(problem, dual, base, base_value))
    scale = max(1.0, abs(base_value)) / core.value_step
    outcome = solve_core(core, scale, deadline, memory_limit)
    picked, value, cost = _apply(problem, base, outcome)
    bound = value + (outcome.bound - outcome.value) * core.value_step * (1 + 2.0**-40)
    if cost > problem.limit:
        outcome = solve_core(replace(core, room=core.safe_room), scale, deadline, memory_limit)
        picked, value, cost = _apply(problem, base, outcome)
    if cost > problem.limit:
        picked, value, cost = base, base_value, base_cost
    return picked, value, cost, max(bound, value)


def _apply(problem: KnapsackProblem, base: Array, outcome: RoundsOutcome) -> tuple[Array, float, float]:
    """Return the base with the core's options put in (flat indices), its value and its cost."""
    picked = problem.groups.ops.ints(base)
    picked[problem.groups.group[outcome.options]] = outcome.options
    return picked, *problem.evaluate(picked)


def _promising(problem: KnapsackProblem, dual: KnapsackDual, base: Array, base_value: float) -> Array:
    """Return the options (flat, ascending) that can be in a choice better than the base and its best swap.

    Losses are compared with a margin for rounding, which can only keep too many options.
    """
    ops, group = problem.groups.ops, problem.groups.group
    size = problem.largest_value + dual.multiplier * (problem.largest_cost + abs(problem.limit))
    noise = 2.0**-50 * (problem.groups.count + 8) * size
    kept = ops.flatnonzero(dual.loss <= dual.bound - base_value + noise)
    owner = group[kept]
    extra = problem.costs[kept] - problem.costs[base][owner]
    gained = problem.values[kept] - problem.values[base][owner]
    room = float(problem.room(base)) - 2.0**-50 * (abs(problem.limit) + problem.largest_cost)
    best_swap = max(0.0, float(ops.where(extra <= room, gained, 0.0).max()))
    promising = dual.loss <= dual.bound - (base_value + best_swap) + noise
    promising[base] = True
    return ops.flatnonzero(promising)


def _positive(limit: float, name: str) -> float:
    if not limit >= 0:
        raise InputError(f"{name} is {limit}: pass a number of at least 0")
    return float(limit)
