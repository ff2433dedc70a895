"""The core: an instance without its hopeless options, in exact integers; and greedy fillings of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from smcp_fx.knapsack.arrays import Array
from smcp_fx.knapsack.dual import Groups
from smcp_fx.knapsack.problem import KnapsackProblem, quantise

#: Greedy moves per filling; each is one pass over the core. Chosen, not measured.
_MAX_MOVES = 256


@dataclass(frozen=True)
class Core:
    """An integer knapsack relative to one choice of the instance, the *base*.

    ``values`` and ``costs`` (int64, grid steps) are an option's minus those of its group's base option, and
    ``room`` is the capacity that the base leaves. Both sides are divided by their greatest common divisor:
    ``room`` is as tight as the grid allows, and different values differ by at least one. ``options`` are flat
    indices into the instance. Groups with a single option left are not listed but ``settled``: their flat
    indices, and their value, count towards every choice of the core.

    Costs that fit no grid are rounded. ``room`` is then larger by the greatest rounding error, so that it admits
    every fitting choice, and ``safe_room`` smaller, so that every choice within it fits.
    """

    groups: Groups
    values: Array
    costs: Array
    options: Array
    room: int
    safe_room: int
    settled: Array
    settled_value: int
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

    def shrink(self, kept: Array) -> tuple[Core, Array]:
        """Like `restrict`, with groups of one option settled; returns the listed options' old indices too."""
        ops = self.groups.ops
        owner = self.groups.group[kept]
        alone = ops.bincount(owner, self.groups.count)[owner] == 1
        single, several = kept[alone], kept[~alone]
        core = replace(
            self.restrict(several),
            room=self.room - int(self.costs[single].sum()),
            settled=ops.concat([self.settled, self.options[single]]),
            settled_value=self.settled_value + int(self.values[single].sum()),
        )
        return core, several


def build_core(problem: KnapsackProblem, base: Array, kept: Array) -> Core:
    """Quantise the options ``kept`` (flat, ascending, the base's among them) relative to ``base``."""
    ops = problem.groups.ops
    owner = problem.groups.group[kept]
    size = ops.bincount(owner, problem.groups.count)
    settled = base[ops.flatnonzero(size == 1)]
    base_of = base[ops.flatnonzero(size > 1)]
    kept = kept[size[owner] > 1]
    groups = problem.groups.restrict(kept)
    n, m = len(base_of), len(kept)
    values = quantise(ops, ops.concat([problem.values[kept], problem.values[base_of]]), n)
    costs = quantise(ops, ops.concat([problem.costs[kept], problem.costs[base_of]]), n)
    dv = values.steps[:m] - values.steps[m:][groups.group]
    dc = costs.steps[:m] - costs.steps[m:][groups.group]
    value_gcd, cost_gcd = max(1, ops.gcd(dv)), max(1, ops.gcd(dc))
    room = math.floor(problem.room(base) / Fraction(costs.size))
    margin = 0 if costs.exact else n + 1
    return Core(
        groups=groups,
        values=ops.floor_div(dv, value_gcd),
        costs=ops.floor_div(dc, cost_gcd),
        options=kept,
        room=(room + margin) // cost_gcd,
        safe_room=max(0, (room - margin) // cost_gcd),
        settled=settled,
        settled_value=0,
        value_step=values.size * value_gcd,
    )


def fill_ties(core: Core, tied: Array) -> Array:
    """Choose among the options ``tied`` (a mask, at least one per group), which the bound cannot tell apart.

    Starts from the cheapest and takes the dearest of as many groups, in order, as fit.
    """
    ops, groups = core.groups.ops, core.groups
    costs = ops.floats(core.costs)
    _, cheapest = groups.best(ops.where(tied, -costs, -np.inf))
    _, dearest = groups.best(ops.where(tied, costs, -np.inf))
    rise = ops.cumsum(core.costs[dearest] - core.costs[cheapest])
    return ops.where(rise <= core.room - int(core.costs[cheapest].sum()), dearest, cheapest)


def fill_greedily(core: Core, chosen: Array, by_ratio: bool) -> Array:
    """Take moves to a better option of one group while one fits; ``chosen``: one option per group, fitting.

    The next move is the one of most value, or, ``by_ratio``, of most value per cost.
    """
    ops, group = core.groups.ops, core.groups.group
    chosen = ops.ints(chosen)
    room = core.room - int(core.costs[chosen].sum())
    for _ in range(_MAX_MOVES):
        costs = core.costs - core.costs[chosen][group]
        values = core.values - core.values[chosen][group]
        fitting = ops.flatnonzero((values > 0) & (costs <= room))
        if len(fitting) == 0:
            break
        score = values[fitting]
        if by_ratio:
            # Free moves come first: any positive cost is at least one step.
            price = costs[fitting]
            score = score / ops.where(price > 0, price, 1e-30)
        best = fitting[score.argmax()]
        room -= int(costs[best])
        chosen[group[best]] = best
    return chosen
