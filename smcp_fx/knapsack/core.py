"""What is left of an instance once hopeless options are gone, in exact integers, and its greedy filling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from smcp_fx.knapsack.arrays import Array
from smcp_fx.knapsack.dual import Groups
from smcp_fx.knapsack.problem import Problem, quantise

#: Greedy moves per filling; each is one pass over the core.
_MAX_MOVES = 256


@dataclass(frozen=True)
class Core:
    """An integer knapsack relative to one choice of the instance, the *base*.

    ``values`` and ``costs`` (int64, grid steps) are an option's minus those of its group's base option, and
    ``room`` is what the base leaves of the capacity. Both sides are divided by their greatest common divisor:
    ``room`` is as tight as the grid allows, and different values differ by at least one. ``options`` are flat
    indices into the instance; groups left with a single option are not listed.
    """

    groups: Groups
    values: Array
    costs: Array
    options: Array
    room: int
    value_step: float

    def restrict(self, kept: Array) -> Core:
        """Return the core with only the options ``kept``: ascending, at least one of every group."""
        return replace(
            self,
            groups=self.groups.restrict(kept),
            values=self.values[kept],
            costs=self.costs[kept],
            options=self.options[kept],
        )


def build_core(problem: Problem, base: Array, kept: Array) -> Core:
    """Quantise the options ``kept`` (flat, ascending, the base's among them) relative to ``base``."""
    ops, n = problem.groups.ops, problem.groups.count
    owner = problem.groups.group[kept]
    size = ops.bincount(owner, n)
    kept = kept[size[owner] > 1]
    free = ops.flatnonzero(size > 1)
    groups = problem.groups.restrict(kept) if len(kept) else Groups(ops, free, free)
    base_of = base[free]
    values = quantise(ops, ops.concat([problem.values[kept], problem.values[base_of]]), max(1, len(free)))
    costs = quantise(ops, ops.concat([problem.costs[kept], problem.costs[base_of]]), max(1, len(free)))
    dv = values.steps[: len(kept)] - values.steps[len(kept) :][groups.group]
    dc = costs.steps[: len(kept)] - costs.steps[len(kept) :][groups.group]
    _, base_cost = problem.evaluate(base)
    room = math.floor((problem.limit - base_cost) / costs.size)
    value_gcd, cost_gcd = max(1, ops.gcd(dv)), max(1, ops.gcd(dc))
    return Core(
        groups,
        ops.floor_div(dv, value_gcd),
        ops.floor_div(dc, cost_gcd),
        kept,
        room // cost_gcd,
        values.size * value_gcd,
    )


def fill_greedily(core: Core, chosen: Array, room: int, by_ratio: bool) -> tuple[Array, int]:
    """Take moves to a better option of one group while one fits.

    ``chosen`` (indices into the core, one a group) leaves ``room``. The next move is the one of most value,
    or, ``by_ratio``, of most value per cost. Returns the choice and the value gained.
    """
    ops, group = core.groups.ops, core.groups.group
    chosen = ops.ints(chosen)
    gained = 0
    for _ in range(_MAX_MOVES):
        costs = core.costs - core.costs[chosen][group]
        values = core.values - core.values[chosen][group]
        fitting = ops.flatnonzero((values > 0) & (costs <= room))
        if len(fitting) == 0:
            break
        score = values[fitting]
        if by_ratio:
            # A move that costs nothing comes first: any positive cost is at least one step.
            price = costs[fitting]
            score = score / ops.where(price > 0, price, 1e-30)
        best = fitting[score.argmax()]
        room -= int(costs[best])
        gained += int(values[best])
        chosen[group[best]] = best
    return chosen, gained
