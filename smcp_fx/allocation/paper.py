"""The paper's linearised problem, for comparison: every layer priced at its consumers' last counts.

(SMCP, eq. "pruning knapsack problem" and "Skip connections".) The costs of a group's counts add up over the
layers that read it, so the choice is a multiple-choice knapsack. Its capacity is right only while the neighbours keep
the counts that the layers were priced at.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from smcp_fx.allocation.problem import Array, CoupledProblem, Ints
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InputError

#: The number of capacities to try.
_TRIALS = 13


def linearised(
    cost: NetworkCost, problem: CoupledProblem, current: Mapping[str, int]
) -> tuple[list[Array], float]:
    """Return each group's costs at its permitted counts and the constant rest.

    A layer that reads one group costs ``T_l(p, current output width)``. The cost of one that reads several (a concat)
    is split by their current shares of its input, plus the change that each group's own count makes. At the current
    counts the parts add up to the layer's cost.

    Raises:
        InputError: a group has no current count.
    """
    missing = [group for group in problem.groups if group not in current]
    if missing:
        raise InputError(f"current counts are missing for groups {missing}")
    number = {group: k for k, group in enumerate(problem.groups)}
    costs = [np.zeros(len(problem.variables[k].grid)) for k in range(len(problem.groups))]
    constant = cost.constant
    for term in cost.terms:
        widths = [width.channels(current) for width in term.widths]
        now = term.cost(current)
        rest = now
        per_unit: dict[str, int] = {}
        for group, coefficient in term.widths[0].groups if term.widths else ():
            per_unit[group] = per_unit.get(group, 0) + coefficient
        for group, coefficient in per_unit.items():
            k = number[group]
            c_in = widths[0] + coefficient * (problem.variables[k].grid - current[group])
            priced = term.price(c_in, *(np.full(c_in.shape, width) for width in widths[1:]))
            share = now * coefficient * current[group] / widths[0] if widths[0] else 0.0
            costs[k] += np.broadcast_to(priced, c_in.shape) - now + share
            rest -= share
        constant += rest
    return costs, constant


def paper_choice(
    cost: NetworkCost, problem: CoupledProblem, values: list[Array], budget: float, current: Mapping[str, int]
) -> Ints:
    """Return the optimal choice of the linearised problem.

    If neighbours move far, its capacity is wrong: no choice fits, or the choice costs more than the budget.
    Then the largest capacity found whose choice is within the budget counts; else the cheapest choice.
    """
    # imported here: only this method needs the knapsack solver and torch
    from smcp_fx.knapsack import solve_knapsack

    costs, constant = linearised(cost, problem, current)
    if not costs:
        return np.zeros(0, np.int64)
    best = np.array([int(np.argmin(c)) for c in costs], np.int64)
    low, high = (sum(float(end(c)) for c in costs) for end in (np.min, np.max))
    capacity = budget - constant
    for trial in range(_TRIALS):
        if low <= capacity:
            choice = np.array(solve_knapsack(values, costs, capacity).choices, np.int64)
            fits = cost.cost(problem.counts(choice)) <= budget
            if fits and not trial:
                return choice
            low, high, best = (capacity, high, choice) if fits else (low, capacity, best)
        capacity = (low + high) / 2
    return best
