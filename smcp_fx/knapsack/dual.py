"""The Lagrangian bound of the multiple-choice knapsack, and what each option loses against it.

For a multiplier a >= 0 on the capacity C,

    z(a) = sum over groups of max_i (v_i - a c_i) + a C

bounds every feasible choice, and a choice falls short of it by exactly

    sum over groups of r_i + a (C - cost),      r_i = max_j (v_j - a c_j) - (v_i - a c_i) >= 0,

its *loss*. An option whose own r exceeds the loss of a known choice is in no better one. The least z is the
value of the linear relaxation; z is convex and piecewise linear, and secant cuts find its minimum in a few
passes over the options, without convex hulls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smcp_fx.knapsack.arrays import Array, ArrayOps

#: Above this many options, and after this many cuts, options that no remaining multiplier can choose are dropped.
#: Chosen, not measured.
_NARROW_FROM, _NARROW_AFTER = 1 << 14, 3

#: Most secant cuts. They end by themselves (7 to 18 on networks); stopping early only loosens the bound a little.
_MAX_PASSES = 64


@dataclass(frozen=True)
class Groups:
    """Options of all groups end to end: group g's start at ``starts[g]``, and ``group`` labels options."""

    ops: ArrayOps
    starts: Array
    group: Array

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.starts)

    def best(self, score: Array) -> tuple[Array, Array]:
        """Return each group's greatest score and the index of the first option that has it."""
        top = self.ops.segment_max(score, self.starts, self.group)
        hits = self.ops.flatnonzero(score == top[self.group])
        if len(hits) > self.count:
            owner = self.group[hits]
            hits = self.ops.concat([hits[:1], hits[1:][owner[1:] != owner[:-1]]])
        return top, hits

    def cheapest(self, values: Array, costs: Array) -> tuple[Array, Array]:
        """Return each group's least cost, and the most valuable of the options that have it."""
        ops = self.ops
        negated = ops.where(values > -np.inf, -costs, -np.inf)
        least = ops.segment_max(negated, self.starts, self.group)
        _, picked = self.best(ops.where(negated == least[self.group], values, -np.inf))
        return -least, picked

    def restrict(self, kept: Array) -> Groups:
        """Return the groups left when only the options ``kept`` (ascending, of any groups) remain."""
        owner = self.group[kept]
        first = self.ops.concat([owner[:1] >= 0, owner[1:] != owner[:-1]])
        return Groups(self.ops, self.ops.flatnonzero(first), self.ops.cumsum(self.ops.ints(first)) - 1)


@dataclass(frozen=True)
class KnapsackDual:
    """A bound: every feasible choice has value <= ``bound`` - sum of its options' ``loss``.

    ``multiplier`` is the price of a unit of cost, and ``under`` one option per group: the dearest relaxed
    optimum found that fits the capacity.
    """

    bound: float
    loss: Array
    multiplier: float
    under: Array


def solve_dual(groups: Groups, values: Array, costs: Array, capacity: float) -> KnapsackDual:
    """Minimise z(a) by secant cuts.

    ``values`` and ``costs`` are float64; a value of -inf strikes an option out. The cheapest choice must fit.
    """
    top, over = groups.best(values)
    if float(costs[over].sum()) <= capacity:
        return KnapsackDual(float(top.sum()), top[groups.group] - values, 0.0, over)
    _, under = groups.cheapest(values, costs)
    over_value, over_cost = float(top.sum()), float(costs[over].sum())
    under_value, under_cost = float(values[under].sum()), float(costs[under].sum())
    # The options still in play, and their places among all.
    sought = _Sought(groups, values, costs, None)
    best, multiplier = float("inf"), 0.0
    for number in range(_MAX_PASSES):
        if over_cost <= under_cost:
            break
        cut = max(0.0, (over_value - under_value) / (over_cost - under_cost))
        top, picked = sought.groups.best(sought.values - cut * sought.costs)
        total = float(top.sum())
        if total + cut * capacity < best:
            best, multiplier = total + cut * capacity, cut
        value, cost = float(sought.values[picked].sum()), float(sought.costs[picked].sum())
        if sought.origin is not None:
            picked = sought.origin[picked]
        line = under_value - cut * under_cost
        settled = total - line <= 1e-14 * (abs(under_value) + cut * abs(under_cost))
        if cost > capacity:
            over, over_value, over_cost = picked, value, cost
        elif not settled or cost > under_cost:
            under, under_value, under_cost = picked, value, cost
        if settled:
            break
        if number == _NARROW_AFTER and len(values) > _NARROW_FROM:
            sought = _narrow(groups, values, costs, under, over)
    score = values - multiplier * costs
    top = groups.ops.segment_max(score, groups.starts, groups.group)
    return KnapsackDual(
        float(top.sum()) + multiplier * capacity, top[groups.group] - score, multiplier, under
    )


@dataclass(frozen=True)
class _Sought:
    groups: Groups
    values: Array
    costs: Array
    origin: Array | None


def _narrow(groups: Groups, values: Array, costs: Array, under: Array, over: Array) -> _Sought:
    """Keep the options that are best for some multiplier between those of ``under`` and ``over``.

    A group whose ends coincide keeps that option alone. In the others, a third option is best somewhere in
    between only if it is where the ends' lines cross, because the best is at least their maximum.
    """
    ops = groups.ops
    ends = ops.where(costs[over] > costs[under], costs[over] - costs[under], np.inf)
    crossing = (values[over] - values[under]) / ends
    level = values[under] - crossing * costs[under]
    # Rounding may drop an option here, which loosens the bound a little but never makes it wrong.
    mask = values - crossing[groups.group] * costs >= level[groups.group]
    mask[under] = True
    mask[over] = True
    same = ops.flatnonzero(under == over)
    if len(same):
        only = ops.where(under == over, under, -1)[groups.group]
        mask &= (only < 0) | (only == ops.arange(len(values)))
    kept = ops.flatnonzero(mask)
    return _Sought(groups.restrict(kept), values[kept], costs[kept], kept)
