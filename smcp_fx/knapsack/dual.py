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

#: Secant cuts end by themselves (7 to 18 on networks); past this many the bound is merely a little looser.
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

    def restrict(self, kept: Array) -> Groups:
        """Return the groups left when only the options ``kept`` (ascending, of any groups) remain."""
        owner = self.group[kept]
        first = self.ops.concat([owner[:1] >= 0, owner[1:] != owner[:-1]])
        return Groups(self.ops, self.ops.flatnonzero(first), self.ops.cumsum(self.ops.ints(first)) - 1)


@dataclass(frozen=True)
class Dual:
    """A bound: every feasible choice has value <= ``bound`` - sum of its options' ``loss``.

    ``slack_price`` is the multiplier; ``under`` and ``over`` hold one option a group, the relaxed optimum on
    either side of the capacity (``under`` fits it; ``over`` is None when nothing needs to be given up).
    """

    bound: float
    loss: Array
    multiplier: float
    under: Array


def solve_dual(groups: Groups, values: Array, costs: Array, capacity: float) -> Dual:
    """Minimise z(a) by secant cuts. ``values`` and ``costs`` are float64; the cheapest choice must fit."""
    top, under = groups.best(values)
    if float(costs[under].sum()) <= capacity:
        return Dual(float(top.sum()), top[groups.group] - values, 0.0, under)
    over_value, over_cost = float(top.sum()), float(costs[under].sum())
    cheapest, _ = groups.best(-costs)
    affordable = groups.ops.where(-costs == cheapest[groups.group], values, -np.inf)
    top, under = groups.best(affordable)
    under_value, under_cost = float(top.sum()), -float(cheapest.sum())
    multiplier = 0.0
    bound, loss = float("inf"), values
    for _ in range(_MAX_PASSES):
        if over_cost <= under_cost:
            break
        cut = max(0.0, (over_value - under_value) / (over_cost - under_cost))
        score = values - cut * costs
        top, picked = groups.best(score)
        total = float(top.sum())
        if total + cut * capacity < bound:
            bound, multiplier = total + cut * capacity, cut
            loss = top[groups.group] - score
        value, cost = float(values[picked].sum()), float(costs[picked].sum())
        line = under_value - cut * under_cost
        if total - line <= 1e-14 * (abs(under_value) + cut * abs(under_cost)):
            if under_cost < cost <= capacity:
                under = picked
            break
        if cost <= capacity:
            under, under_value, under_cost = picked, value, cost
        else:
            over_value, over_cost = value, cost
    return Dual(bound, loss, multiplier, under)
