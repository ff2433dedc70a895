"""Close a gap that the Lagrangian cannot: halve one group's counts, and solve both halves.

Two very different choices may have about the same cost and value: every second group whole and the others narrow, or
the other way round. No multiplier can prove a better bound than a mix of the two, and listing all choices of small
loss takes too long. Splitting one group's counts between the two leaves each half with one of them.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smcp_fx.allocation.problem import Array
from smcp_fx.allocation.result import gap_unit
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InfeasibleBudgetError

#: Most halvings of one solve, and the gap (of `gap_unit`) that is worth one. Chosen, not measured.
_HALVINGS, _GAP = 8, 1e-6


@dataclass(frozen=True)
class Node:
    """A solved restriction: the best counts found, their value, a bound, and the group and count to split at."""

    cost: NetworkCost
    counts: dict[str, int]
    value: float
    bound: float
    split: tuple[str, int] | None


def close_gap(
    root: Node,
    values: Mapping[str, Array],
    solve: Callable[[NetworkCost, dict[str, Array]], Node],
) -> tuple[dict[str, int], float]:
    """Return the best counts and the bound after up to `_HALVINGS` halvings, the widest bound first.

    ``values`` belong to ``root.cost.permitted``; ``solve`` solves a restriction of it.
    """
    permitted = root.cost.permitted
    best, closed = root, -math.inf
    queue: list[tuple[float, int, Node]] = [(-root.bound, 0, root)]
    made = 1
    while queue:
        node = queue[0][2]
        if node.bound - best.value <= _GAP * gap_unit(node.bound, values.values()) or made > 2 * _HALVINGS:
            break
        heapq.heappop(queue)
        if node.split is None:
            closed = max(closed, node.bound)
            continue
        group, last = node.split
        for keep_low in (True, False):
            allowed = tuple(c for c in node.cost.permitted[group] if (c <= last) is keep_low)
            counts = {**node.cost.permitted, group: allowed}
            part = {
                name: values[name][[permitted[name].index(c) for c in allowed]]
                for name, allowed in counts.items()
            }
            made += 1
            try:
                half = solve(dataclasses.replace(node.cost, permitted=counts), part)
            except InfeasibleBudgetError:
                continue
            # A bound of the whole also holds for its halves.
            half = dataclasses.replace(half, bound=min(half.bound, node.bound))
            if half.value > best.value:
                best = half
            heapq.heappush(queue, (-half.bound, made, half))
    return best.counts, max([best.value, closed, *(-bound for bound, _, _ in queue)])
