"""`allocate`: the number of units that each group keeps, for the most value within a budget of the true cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from smcp_fx.allocation.branching import Node, close_gap
from smcp_fx.allocation.certificate import certify
from smcp_fx.allocation.dual import CoupledDual, Relaxation, bundle, secant
from smcp_fx.allocation.local_search import Moves, descend, fit_budget, improve
from smcp_fx.allocation.paper import paper_choice
from smcp_fx.allocation.planning import MAX_CELLS, plan
from smcp_fx.allocation.problem import Array, CoupledProblem, Ints, tabulate, value_arrays
from smcp_fx.allocation.result import Allocation, gap_unit
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InfeasibleBudgetError, InputError

#: A cost may exceed the budget by this share, to allow for rounding in a sum of prices.
BUDGET_TOLERANCE = 5e-10

#: A group and the last option of its lower half; None if there is nothing to halve.
Split = tuple[int, int] | None

#: How many of the dual's points are polished. Chosen, not measured.
_POLISHED = 4


def allocate(
    values: Mapping[str, ArrayLike],
    cost: NetworkCost,
    budget: float,
    method: Literal["coupled", "paper"] = "coupled",
    *,
    current: Mapping[str, int] | None = None,
    start: Mapping[str, int] | None = None,
) -> Allocation:
    """Choose the counts of greatest total value whose true cost T(p) is within the budget.

    The answer depends on the arguments alone; docs/explanations/allocation.md explains how it is found and proved.

    Args:
        values: for each group, the value of each of its ``cost.permitted`` counts.
        cost: T, with the permitted counts.
        budget: the most T may be, in ``cost.unit``.
        method: ``"coupled"`` prices in- and out-channels together. ``"paper"`` solves SMCP's linearised
            problem, each layer priced at its consumers' ``current`` counts: for comparison, since its true
            cost may be far below the budget.
        current: the neighbours' counts for ``"paper"``; the full sizes by default.
        start: permitted counts to improve on as well, such as the last allocation; kept on a tie.

    Raises:
        InputError: an argument does not fit ``cost``.
        InfeasibleBudgetError: no permitted counts were found within the budget.

    >>> from smcp_fx.cost_model import CostTerm, NetworkCost, Width
    >>> a, b = Width(groups=(("a", 1),)), Width(groups=(("b", 1),))
    >>> terms = (CostTerm("conv1", (Width(3), a), lambda i, o: 9.0 * i * o),
    ...          CostTerm("conv2", (a, b), lambda i, o: 9.0 * i * o))
    >>> cost = NetworkCost("MAC", {"a": (8, 16), "b": (8, 16, 24)}, terms)
    >>> found = allocate({"a": [1.0, 1.5], "b": [1.0, 1.2, 1.3]}, cost, budget=2000.0)
    >>> found.counts, found.cost, found.gap
    ({'a': 16, 'b': 8}, 1584.0, 0.0)
    """
    begin = time.perf_counter()
    if method not in ("coupled", "paper"):
        raise InputError(f"method must be 'coupled' or 'paper', got {method!r}")
    if not math.isfinite(budget):
        raise InputError(f"the budget must be finite, got {budget}")
    problem = tabulate(cost)
    arrays = value_arrays(problem, values)
    bound = math.inf
    if method == "paper":
        cap = budget + BUDGET_TOLERANCE * abs(budget)
        _require_reachable(problem, arrays, budget, cap, cost.unit)
        choice = paper_choice(cost, problem, arrays, cap, current or cost.full_counts)
    else:
        choice, bound, split = node_choice(problem, arrays, budget, cost.unit, _options(problem, start))
        named = dict(zip(problem.groups, arrays, strict=True))
        root = _node(cost, problem, arrays, (choice, bound, split))
        better, bound = close_gap(root, named, lambda part, own: _solved(part, own, budget))
        if better != root.counts:  # polish once more: a half ends at the split
            choice = node_choice(problem, arrays, budget, cost.unit, _options(problem, better))[0]
    counts = problem.counts(choice)
    value = float(sum(v[i] for v, i in zip(arrays, choice, strict=True)))
    bound = max(bound, value)
    gap = bound - value
    if 0.0 < gap < math.inf:
        gap /= gap_unit(bound, arrays)
    return Allocation(counts, value, cost.cost(counts), bound, gap, time.perf_counter() - begin, method)


def _solved(cost: NetworkCost, values: dict[str, Array], budget: float) -> Node:
    """Solve a restriction of the problem."""
    problem = tabulate(cost)
    arrays = [values[name] for name in problem.groups]
    return _node(cost, problem, arrays, node_choice(problem, arrays, budget, cost.unit))


def _node(
    cost: NetworkCost, problem: CoupledProblem, values: list[Array], node: tuple[Ints, float, Split]
) -> Node:
    choice, bound, split = node
    value = float(sum(v[i] for v, i in zip(values, choice, strict=True)))
    named = None
    if split is not None:
        named = problem.groups[split[0]], int(problem.variables[split[0]].grid[split[1]])
    return Node(cost, problem.counts(choice), value, max(bound, value), named)


def _options(problem: CoupledProblem, counts: Mapping[str, int] | None) -> Ints | None:
    """Return the option indices of counts.

    Raises:
        InputError: a group is missing or its count is not permitted.
    """
    if counts is None:
        return None
    choice = np.zeros(len(problem.groups), np.int64)
    for k, group in enumerate(problem.groups):
        places = np.flatnonzero(problem.variables[k].grid == counts.get(group))
        if not len(places):
            raise InputError(
                f"start gives group {group!r} the count {counts.get(group)}, which is not permitted"
            )
        choice[k] = places[0]
    return choice


def node_choice(
    problem: CoupledProblem,
    values: list[Array],
    budget: float,
    unit: str = "",
    start: Ints | None = None,
    max_cells: int = MAX_CELLS,
) -> tuple[Ints, float, Split]:
    """Return the best choice found within the budget, an upper bound on the value of any, and where to halve.

    Raises:
        InfeasibleBudgetError: no choice was found within the budget.
    """
    moves = Moves(problem, values)
    cap = budget + BUDGET_TOLERANCE * abs(budget)
    most = np.array([int(np.argmax(v)) for v in values], np.int64)
    if moves.cost(most) <= cap:
        return most, moves.value(most), None
    elimination = plan(problem, max_cells)
    relaxation = Relaxation(elimination, values, problem.constant, cap)
    cheapest = relaxation.minimise(0.0, np.zeros(len(elimination.links)))
    starts = [] if start is None else [start]
    smallest = min(
        (descend(moves, point) for point in (cheapest.positions[: len(values)], *starts)), key=moves.cost
    )
    if moves.cost(smallest) > cap:
        raise _infeasible(moves.cost(smallest), budget, unit)
    if moves.value(most) <= moves.value(smallest):
        return smallest, moves.value(smallest), None
    costs = moves.cost(smallest), moves.cost(most)
    if elimination.links:
        slope = (moves.value(most) - moves.value(smallest)) / (costs[1] - costs[0])
        dual = bundle(relaxation, slope)
    else:
        dual = secant(relaxation, smallest, most, costs)
    scale = float(sum(np.abs(v).max() for v in values))
    best = _polished(moves, dual, [*starts, *dual.visited[:_POLISHED], smallest], cap, scale)
    best, bound = certify(relaxation, dual, moves, best)
    # The secant's first two points lie on either side of the budget; with loosened sums there are none.
    split = None if elimination.links else _between(problem, *dual.visited[:2])
    return improve(moves, best, cap, dual.multiplier, scale), bound, split


def _require_reachable(
    problem: CoupledProblem, values: list[Array], budget: float, cap: float, unit: str
) -> None:
    """Raise `InfeasibleBudgetError` if the smallest counts and all steps from them cost too much."""
    moves = Moves(problem, values)
    smallest = moves.cost(descend(moves, np.zeros(len(values), np.int64)))
    if smallest > cap:
        raise _infeasible(smallest, budget, unit)


def _infeasible(smallest: float, budget: float, unit: str) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no permitted counts cost {budget:g} {unit} or less: the smallest reachable cost is {smallest:g} {unit}; "
        "raise the budget, or permit smaller counts",
        smallest=smallest,
        budget=budget,
    )


def _between(problem: CoupledProblem, high: Ints, low: Ints) -> Split:
    """Return the group in which two points differ most, relative to its options, and the lower half's last option."""
    apart = [
        abs(int(a) - int(b)) / len(variable.grid)
        for a, b, variable in zip(high, low, problem.variables, strict=False)
    ]
    group = int(np.argmax(apart))
    if not apart[group]:
        return None
    return group, (int(high[group]) + int(low[group])) // 2


def _polished(moves: Moves, dual: CoupledDual, points: list[Ints], cap: float, scale: float) -> Ints:
    """Return the best of the points made to fit the budget and improved; the last one is within the budget."""
    best = points[-1]
    for point in points:
        feasible = fit_budget(moves, point, cap)
        if feasible is None:
            continue
        polished = improve(moves, feasible, cap, dual.multiplier, scale)
        if moves.value(polished) > moves.value(best):
            best = polished
    return best
