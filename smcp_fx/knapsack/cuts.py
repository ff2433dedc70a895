"""Bounds for capacities that lie between clusters of reachable costs.

If costs cluster around multiples of some d and the capacity lies between two of them, the Lagrangian bound counts
capacity that no choice can use, and every option looks promising. Exactly one option per group is taken, so
for any shifts s_g and any d > 0 each fitting choice also satisfies

    sum over groups of floor((c_i + s_g) / d)  <=  floor((C + sum of s_g) / d)

(a Chvátal-Gomory rounding of the capacity). The shifts put the widest gap between a group's residues modulo d at the
wrap-around, so that no cluster is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smcp_fx.knapsack.arrays import Array
from smcp_fx.knapsack.core import Core
from smcp_fx.knapsack.dual import KnapsackDual, solve_dual

#: Spacings tried: this many quantiles of the differences between neighbouring costs of a group.
_SPACINGS = 16

#: How many of them get a multiplier of their own: those with the tightest bounds at the capacity's multiplier. Both
#: chosen, not measured.
_FINALISTS = 3


@dataclass(frozen=True)
class RoundingCut:
    """The rounded costs (int64), and the bound they give."""

    costs: Array
    dual: KnapsackDual


def best_rounding_cut(core: Core, multiplier: float) -> RoundingCut | None:
    """Return the cut of the tightest bound among those tried, or None if there is no spacing to try.

    ``multiplier``: the capacity's price of a unit of cost; a rounded unit starts at a spacing of these.
    """
    ops, groups = core.groups.ops, core.groups
    values = ops.floats(core.values)
    tried = []
    for spacing in _spacings(core):
        costs, room = _round_costs(core, spacing)
        price = multiplier * spacing
        top = ops.segment_max(values - price * ops.floats(costs), groups.starts, groups.group)
        tried.append((float(top.sum()) + price * room, costs, room))
    best: RoundingCut | None = None
    for _, costs, room in sorted(tried, key=lambda one: one[0])[:_FINALISTS]:
        dual = solve_dual(groups, values, ops.floats(costs), float(room))
        if best is None or dual.bound < best.dual.bound:
            best = RoundingCut(costs, dual)
    return best


def _spacings(core: Core) -> list[int]:
    """Return candidate distances between clusters, from the gaps between a group's neighbouring costs."""
    host = core.groups.ops.host
    costs, group = host(core.costs), host(core.groups.group)
    order = np.lexsort((costs, group))
    gaps = np.diff(costs[order])[np.diff(group[order]) == 0]
    gaps = np.sort(gaps[gaps > 1])
    if len(gaps) == 0:
        return []
    at = np.linspace(0, len(gaps) - 1, _SPACINGS).round().astype(np.int64)
    return sorted(set(gaps[at].tolist()) | {2, 3})


def _round_costs(core: Core, spacing: int) -> tuple[Array, int]:
    """Return the rounded costs and the rounded room, int64 and int."""
    ops, groups = core.groups.ops, core.groups
    residue = core.costs - ops.floor_div(core.costs, spacing) * spacing
    order = ops.argsort(groups.group + ops.floats(residue) * (0.999 / spacing))
    ranked = residue[order]
    # The gap before the first residue of a group wraps around to its last.
    ends = ops.concat([groups.starts[1:], ops.ints([len(order)])]) - 1
    before = ops.concat([ranked[:1], ranked[:-1]])
    before[groups.starts] = ranked[ends] - spacing
    _, widest = groups.best(ops.floats(ranked - before))
    shift = spacing - ranked[widest]
    rounded = ops.floor_div(core.costs + shift[groups.group], spacing)
    return rounded, (core.room + int(shift.sum())) // spacing
