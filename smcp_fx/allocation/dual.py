"""The Lagrangian bound: minimise ``multiplier * budget + max over p of V(p) - multiplier * T(p)``.

Every evaluation is one exact elimination. Without loosened sums, the function is convex and piecewise linear in one
variable: the secant between the best point within the budget and the best one beyond it finds the least bound in
finitely many steps. Loosened sums add multipliers, and a bundle method with a trust region minimises over all at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smcp_fx.allocation.elimination import EliminationOrder, Minimum
from smcp_fx.allocation.problem import Array, Ints


@dataclass(frozen=True)
class CoupledDual:
    """The least bound found, its multiplier, and the points met on the way."""

    bound: float
    multiplier: float
    minimum: Minimum
    links: Array
    visited: tuple[Ints, ...]


class Relaxation:
    """Evaluates ``min T - V / multiplier + links * excess`` for one plan, values and budget."""

    def __init__(self, plan: EliminationOrder, values: list[Array], constant: float, budget: float) -> None:
        self.plan, self.values, self.constant, self.budget = plan, values, constant, budget
        self.groups = len(values)
        self.most = float(sum(np.abs(v).max() for v in values))

    def unaries(self, gain: float, links: Array) -> dict[int, Array]:
        """Return ``-gain * V`` and the links' multipliers as unary costs."""
        unaries: dict[int, Array] = {k: -gain * v for k, v in enumerate(self.values)}
        grids = self.plan.grids

        def add(variable: int, slope: float) -> None:
            costs: Array = np.float64(slope) * grids[variable].astype(np.float64)
            unaries[variable] = unaries[variable] + costs if variable in unaries else costs

        for link, multiplier in zip(self.plan.links, links, strict=True):
            if multiplier:
                add(link.copy, multiplier)
                for variable, coefficient in link.parts:
                    add(variable, -multiplier * coefficient)
        return unaries

    def minimise(self, gain: float, links: Array) -> Minimum:
        """Minimise ``T - gain * V + links * excess``, the constant not counted."""
        return self.plan.minimise(self.unaries(gain, links))

    def value(self, positions: Ints) -> float:
        """Return V at these options."""
        return float(sum(v[p] for v, p in zip(self.values, positions[: self.groups], strict=True)))

    def rounding(self, minimum: Minimum, gain: float) -> float:
        """Return the greatest rounding error of the relaxed cost's sums."""
        return 2.0**-49 * (abs(self.budget) + abs(self.constant) + abs(minimum.value) + gain * self.most)

    def bound(self, minimum: Minimum, gain: float) -> float:
        """Return the bound on V that a minimum of ``T - gain * V`` proves."""
        over = self.budget - self.constant - minimum.value + self.rounding(minimum, gain)
        return float(over / gain)


def secant(relaxation: Relaxation, cheapest: Ints, most: Ints, costs: tuple[float, float]) -> CoupledDual:
    """Minimise the bound over the multiplier, without loosened sums.

    ``cheapest`` is a point of least cost (within the budget), ``most`` one of greatest value (beyond it);
    ``costs`` are theirs.
    """
    none = np.zeros(0)
    low, high = cheapest, most
    low_cost, high_cost = costs
    low_value, high_value = relaxation.value(low), relaxation.value(high)
    visited = [low, high]
    best: CoupledDual | None = None
    for _ in range(100):
        gain = (high_cost - low_cost) / (high_value - low_value)
        minimum = relaxation.minimise(gain, none)
        bound = relaxation.bound(minimum, gain)
        if best is None or bound < best.bound:
            best = CoupledDual(bound, 1.0 / gain, minimum, none, ())
        point = minimum.positions[: relaxation.groups]
        value = relaxation.value(point)
        cost = minimum.value + relaxation.constant + gain * value
        line = low_cost - gain * low_value
        improved = line - (cost - gain * value) > 1e-12 * (abs(line) + abs(cost) + abs(gain * value))
        if improved:
            visited.append(point)
        if not improved or (value, cost) in ((low_value, low_cost), (high_value, high_cost)):
            break
        if cost <= relaxation.budget:
            low, low_cost, low_value = point, cost, value
        else:
            high, high_cost, high_value = point, cost, value
        if high_value <= low_value or high_cost <= low_cost:
            break
    assert best is not None
    return CoupledDual(best.bound, best.multiplier, best.minimum, none, (high, low, *reversed(visited)))


#: Cells touched in one bundle: about two seconds on one thread. A count instead of seconds makes equal inputs give
#: equal answers. Each iteration costs about as much again as this many cells.
_CELLS, _OVERHEAD = 2_000_000_000, 10_000_000
#: A bundle ends once the bound can fall by no more than this share of it. Chosen, not measured.
_TOLERANCE = 1e-5
#: Most cuts in a bundle's model, the last ones. Chosen, not measured.
_MOST_CUTS = 300


def bundle(relaxation: Relaxation, multiplier: float) -> CoupledDual:
    """Minimise the bound over the multiplier and the loosened sums' multipliers, from a first multiplier.

    The bound is convex in ``x = (1, links) * multiplier``. Each evaluation is a cut below it, and a linear
    program minimises the cuts within a box around the best point, until they prove that point good enough.
    """
    plan = relaxation.plan
    size = 1 + len(plan.links)
    spans = np.array([max(1, np.ptp(plan.grids[link.copy])) for link in plan.links], float)
    budget = abs(relaxation.budget - relaxation.constant) or 1.0
    # A unit step moves the relaxed cost of a typical point by the whole budget.
    scale = multiplier * np.concatenate([[1.0], budget / spans])
    point, radius, predicted = np.concatenate([[1.0], np.zeros(size - 1)]), 0.5, np.inf
    model = _Cuts(size)
    visited: list[Ints] = []
    best: CoupledDual | None = None
    centre = point
    for _ in range(max(20, _CELLS // (plan.cells + _OVERHEAD))):
        x = point * scale
        minimum = relaxation.minimise(1.0 / x[0], x[1:] / x[0])
        bound = relaxation.bound(minimum, 1.0 / x[0])
        choice = minimum.positions[: relaxation.groups]
        visited.append(choice)
        # At one choice, x0 * budget + V - x0 * T - links * excess is linear in x, and a bound's lower cut.
        excess = plan.excess(minimum.positions)
        slope = (bound - relaxation.value(choice) + float(x[1:] @ excess)) / x[0]
        model.add(np.concatenate([[slope], -excess]) * scale, point, bound)
        if best is None or bound < best.bound:
            best, centre = CoupledDual(bound, float(x[0]), minimum, x[1:] / x[0], ()), point
        elif bound - best.bound > predicted:
            radius *= 0.5
        enough = _TOLERANCE * abs(best.bound)
        while True:
            lower = centre - radius
            lower[0] = max(lower[0], 0.1 * centre[0])
            solved = model.minimise(lower, centre + radius)
            if solved is None:
                return _with_visited(best, visited)
            point, least = solved
            predicted = best.bound - least
            if predicted > enough:
                break
            if radius > 1e3 or (np.abs(point - centre) < 0.99 * radius).all():
                return _with_visited(best, visited)
            radius *= 4.0
    assert best is not None
    return _with_visited(best, visited)


def _with_visited(dual: CoupledDual, visited: list[Ints]) -> CoupledDual:
    return CoupledDual(dual.bound, dual.multiplier, dual.minimum, dual.links, tuple(reversed(visited)))


class _Cuts:
    """A model of a convex function: the greatest of linear functions below it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slopes: list[Array] = []
        self.rights: list[float] = []

    def add(self, slope: Array, point: Array, value: float) -> None:
        self.slopes = [*self.slopes, slope][-_MOST_CUTS:]
        self.rights = [*self.rights, float(slope @ point) - value][-_MOST_CUTS:]

    def minimise(self, lower: Array, upper: Array) -> tuple[Array, float] | None:
        """Return where in a box the model is least, and its value there; None on failure."""
        # It takes a third of a second to import, and only loosened sums need it.
        from scipy.optimize import linprog

        solved = linprog(
            np.concatenate([np.zeros(self.size), [1.0]]),
            A_ub=np.column_stack([np.array(self.slopes), -np.ones(len(self.slopes))]),
            b_ub=np.array(self.rights),
            bounds=[*zip(lower, upper, strict=True), (None, None)],
            method="highs",
        )
        return (solved.x[: self.size], float(solved.fun)) if solved.success else None
