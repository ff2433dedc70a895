"""All choices within a loss budget, by two halves joined with sort and search.

Every option has a non-negative loss against a bound (`smcp_fx.knapsack.dual`). Only choices whose losses sum to at
most the budget are formed:

1. The groups are split into two halves, and each half's partial choices are extended group by group.
2. Partial choices are dropped if they lose too much, or cost more than another and are worth no more.
3. Each partial choice of one half finds its best partner in the other by binary search.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smcp_fx.knapsack.arrays import Array, ArrayOps
from smcp_fx.knapsack.core import Core

#: Bytes per partial choice that an extension looks at, and that each group keeps for backtracking.
BYTES_PER_STATE, BYTES_PER_STEP = 160, 8

#: Seconds per partial choice of an extension, on a slow core: one that would end too late is not started.
#: Estimated.
_SECONDS_PER_STATE = 3e-7


#: An option that loses a share x of the budget counts exp(-_DECAY * x) when the halves are balanced. Chosen; with it
#: 1,000 random groups of 64 options took a quarter of the partial choices that they took before.
_DECAY = 4.0

#: A group's options: first, and one past the last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Half:
    """Partial choices of some groups, ascending in cost and in value; ``parents`` lead back, step by step.

    ``parents[s]`` holds, for each partial choice after step s, (index after step s - 1) * options + option.
    """

    costs: Array
    values: Array
    losses: Array
    parents: tuple[Array, ...]
    steps: tuple[tuple[int, int], ...]
    complete: bool


@dataclass(frozen=True)
class Found:
    """The best choice of one search: value (relative to the base), options, and whether nothing was cut."""

    value: int | None
    chosen: Array
    complete: bool


@dataclass(frozen=True)
class Effort:
    """Most partial choices a half may hold, and the instant (``time.perf_counter``) to stop at."""

    states: int
    deadline: float


def search(core: Core, loss: Array, budget: float, effort: Effort, seed: int) -> Found:
    """Return the best fitting choice of total loss at most ``budget``.

    ``loss`` has at least one zero per group. If a half outgrows ``effort.states``, it is thinned at random
    among its smallest losses; the choice found is then good, but no longer proved best (``complete``).
    """
    ops = core.groups.ops
    kept = ops.flatnonzero(loss <= budget)
    sub = core.restrict(kept)
    loss = loss[kept]
    starts = ops.host(sub.groups.starts).tolist()
    # With all groups settled, one choice is left: the empty one.
    spans = list(zip(starts, [*starts, len(kept)][1:], strict=True))
    fixed = [a for a, b in spans if b - a == 1]
    spans = [span for span in spans if span[1] - span[0] > 1]
    fixed_at = ops.ints(fixed)
    first = (int(sub.costs[fixed_at].sum()), int(sub.values[fixed_at].sum()))
    one, other = _halves(spans, ops.host(loss), budget)
    left = _enumerate(sub, loss, one, first, budget, effort, seed)
    right = _enumerate(sub, loss, other, (0, 0), budget, effort, seed + 1)
    nothing = Found(None, fixed_at, False)
    if left is None or right is None:
        return nothing
    if len(left.costs) > len(right.costs):
        left, right = right, left
    # Ascending cost is ascending value: the dearest partner that fits is the best.
    partner = ops.searchsorted(right.costs, core.room - left.costs) - 1
    fits = ops.flatnonzero(partner >= 0)
    complete = left.complete and right.complete
    if len(fits) == 0:
        return Found(None, fixed_at, complete)
    values = left.values[fits] + right.values[partner[fits]]
    at = values.argmax().reshape(1)
    chosen = ops.concat(
        [fixed_at, *_backtrack(ops, left, fits[at]), *_backtrack(ops, right, partner[fits][at])]
    )
    owner = ops.argsort(sub.groups.group[chosen])
    return Found(int(values[at][0]), kept[chosen[owner]], complete)


def _halves(spans: list[Span], loss: NDArray[np.float64], budget: float) -> tuple[list[Span], list[Span]]:
    """Split the groups so that both halves grow to about as many partial choices.

    A group's growth factor is estimated from its options' losses: small losses are affordable more often.
    """
    weight = np.exp(-_DECAY / max(budget, 1.0) * loss)
    upto = np.concatenate([[0.0], np.cumsum(weight)])
    growth = [float(np.log(upto[end] - upto[start])) for start, end in spans]
    ranked = sorted(zip(growth, spans, strict=True), reverse=True)
    halves: tuple[list[Span], list[Span]] = ([], [])
    total = [0.0, 0.0]
    for grown, span in ranked:
        smaller = int(total[0] > total[1])
        halves[smaller].append(span)
        total[smaller] += grown
    for half in halves:
        half.reverse()
    return halves


def _enumerate(
    core: Core,
    loss: Array,
    spans: list[tuple[int, int]],
    first: tuple[int, int],
    budget: float,
    effort: Effort,
    seed: int,
) -> Half | None:
    """Extend group by group; None if time ran out."""
    ops = core.groups.ops
    costs, values, losses = ops.ints([first[0]]), ops.ints([first[1]]), ops.floats([0.0])
    parents: list[Array] = []
    complete = True
    for step, (start, end) in enumerate(spans):
        size = end - start
        due = min(effort.states, len(costs) * size) * _SECONDS_PER_STATE
        if time.perf_counter() + due > effort.deadline:
            return None
        room = max(1, effort.states // size)
        thinned = None
        if len(costs) > room:
            ranked = losses[ops.argsort(losses)]
            if int(ops.searchsorted(ranked, budget - loss[start:end]).sum()) > effort.states:
                complete = False
                jitter = ops.random(len(losses), seed + 2 * step)
                thinned = ops.smallest(losses + jitter * (0.25 * budget), room)
                costs, values, losses = costs[thinned], values[thinned], losses[thinned]
        i, j = ops.outer_at_most(losses, loss[start:end], budget)
        c = costs[i] + core.costs[start:end][j]
        order = ops.argsort(c)
        v = (values[i] + core.values[start:end][j])[order]
        best = ops.cummax(v)
        on_front = ops.concat([order[:1] >= 0, v[1:] > best[:-1]])
        order = order[on_front]
        costs, values = c[order], v[on_front]
        i, j = i[order], j[order]
        losses = losses[i] + loss[start:end][j]
        parents.append((i if thinned is None else thinned[i]) * size + j)
    return Half(costs, values, losses, tuple(parents), tuple(spans), complete)


def _backtrack(ops: ArrayOps, half: Half, at: Array) -> list[Array]:
    """Return the option of each step, as one-element arrays (no copy to the host)."""
    chosen = []
    for (start, end), parents in zip(reversed(half.steps), reversed(half.parents), strict=True):
        code = parents[at]
        chosen.append(code % (end - start) + start)
        at = ops.floor_div(code, end - start)
    return chosen
