"""Solve the core: greedy fillings, then searches whose loss budget and size grow until the optimum is proved."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from smcp_fx.knapsack.arrays import Array
from smcp_fx.knapsack.core import Core, fill_greedily, fill_ties
from smcp_fx.knapsack.cuts import best_rounding_cut
from smcp_fx.knapsack.dual import KnapsackDual, solve_dual
from smcp_fx.knapsack.search import BYTES_PER_STATE, BYTES_PER_STEP, Effort, search

#: Most partial choices a half may hold, level by level; the next level is tried when one yields nothing more.
_LEVELS = tuple(1 << bits for bits in (12, 15, 17, 19, 21, 23))

#: The first budget admits this many options beyond one per group; later ones grow by a factor. Chosen.
_FIRST_OPTIONS, _GROWTH = 24, 3.0

#: A budget that falls short of the open loss by less than this factor is raised to it. Chosen, not measured.
_NEARLY = 1.5

#: If this many partial choices per half prove no optimum, a relative gap this small stays. Chosen, not
#: measured.
_PATIENT_LEVEL, _SMALL_GAP = 1 << 17, 1e-9


@dataclass(frozen=True)
class RoundsOutcome:
    """The best choice of a core (flat indices), its value relative to the base, and a bound on any choice."""

    options: Array
    value: int
    bound: int


def solve_core(core: Core, scale: float, deadline: float, memory_limit: float) -> RoundsOutcome:
    """Maximise the core's value; ``scale`` is the size of the whole value, in core steps.

    The bound equals the value unless time or memory ran out, or the gap is a `_SMALL_GAP` of ``scale``.
    """
    if len(core.options) == 0:
        return RoundsOutcome(core.settled, 0, 0)
    ops, groups = core.groups.ops, core.groups
    dual = solve_dual(groups, ops.floats(core.values), ops.floats(core.costs), float(core.room))
    solver = _Solver(core, dual)
    solver.fill()
    solver.prove(scale, deadline, memory_limit)
    return RoundsOutcome(solver.options, solver.value, max(solver.value, int(np.floor(solver.bound))))


class _Solver:
    """Incumbent (``options``, ``value``) and ``bound`` of a core; every step tightens one of them."""

    def __init__(self, core: Core, dual: KnapsackDual) -> None:
        ops = core.groups.ops
        distance = ops.floats(abs(core.values)) + ops.floats(abs(core.costs))
        _, self.base = core.groups.best(-distance)
        self.core, self.options, self.value = core, ops.concat([core.settled, core.options[self.base]]), 0
        self.bound = np.inf
        self.seed = 0
        self.adopt(dual, core.costs)

    def adopt(self, dual: KnapsackDual, costs: Array) -> None:
        """From now on, search by the losses of this bound, which was computed from ``costs``."""
        self.dual = dual
        largest = float(abs(self.core.values).max()) + dual.multiplier * float(abs(costs).max())
        self.noise = 2.0**-50 * (self.core.groups.count + 8) * largest
        self.proven = 0.0
        self.bound = min(self.bound, dual.bound + self.noise)
        losses = np.sort(self.core.groups.ops.host(dual.loss))
        losses = losses[losses > self.noise]
        self.budget = float(losses[min(len(losses) - 1, _FIRST_OPTIONS)]) if len(losses) else self.noise

    @property
    def still_open(self) -> float:
        """The most that a choice better than the incumbent can lose; values are integers, so it gains one."""
        return self.dual.bound + self.noise - (self.value + 1)

    @property
    def settled(self) -> bool:
        """Whether the incumbent is proved best."""
        return self.still_open < 0 or self.proven > self.still_open

    def fill(self) -> None:
        """Take the best of the greedy fillings of the base and of the relaxation's optimal face."""
        core = self.core
        starts = [self.base, fill_ties(core, self.dual.loss <= self.noise)]
        for start in starts:
            if int(core.costs[start].sum()) <= core.room:
                for by_ratio in (False, True):
                    chosen = fill_greedily(core, start, by_ratio)
                    self.offer(chosen, int(core.values[chosen].sum()))

    def offer(self, chosen: Array, value: int) -> bool:
        """Make a choice of the core the incumbent if it is better."""
        value += self.core.settled_value
        if value <= self.value:
            return False
        self.value = value
        self.options = self.core.groups.ops.concat([self.core.settled, self.core.options[chosen]])
        return True

    def look(self, budget: float, effort: Effort) -> tuple[bool, bool]:
        """Search once; return whether the incumbent improved and whether the budget was exhausted."""
        self.seed += 1
        result = search(self.core, self.dual.loss, budget + self.noise, effort, self.seed)
        improved = result.value is not None and self.offer(result.chosen, result.value)
        if result.complete:
            self.proven = max(self.proven, float(np.nextafter(budget, np.inf)))
            self.bound = min(self.bound, self.dual.bound + self.noise - self.proven)
        return improved, result.complete

    def shrink(self) -> None:
        """Drop the options that alone lose more than a better choice can."""
        kept = self.core.groups.ops.flatnonzero(self.dual.loss <= self.still_open + self.noise)
        if len(kept) < len(self.core.options):
            self.core, listed = self.core.shrink(kept)
            self.dual = replace(self.dual, loss=self.dual.loss[listed])

    def prove(self, scale: float, deadline: float, memory_limit: float) -> None:
        """Search level by level, until the incumbent is proved best or time or memory run out."""
        most = int(memory_limit // (BYTES_PER_STATE + BYTES_PER_STEP * self.core.groups.count))
        for level in _LEVELS:
            self.climb(min(level, most), deadline)
            if self.settled or level >= most or time.perf_counter() > deadline:
                break
            if level == _LEVELS[0]:
                self.cut()
            if level >= _PATIENT_LEVEL and self.bound - self.value <= _SMALL_GAP * scale:
                break
        if self.settled:
            self.bound = self.value

    def climb(self, states: int, deadline: float) -> None:
        """Raise the budget as far as searches of this size go."""
        while states and not self.settled and time.perf_counter() <= deadline:
            before = self.still_open
            self.shrink()
            if self.budget * _NEARLY >= before:
                self.budget = before
            improved, complete = self.look(self.budget, Effort(states, deadline))
            if complete:
                self.budget *= _GROWTH
            elif not improved or self.still_open > 0.5 * before:
                break

    def cut(self) -> None:
        """Switch to a rounding cut if its bound is better than the one proved so far."""
        cut = best_rounding_cut(self.core, self.dual.multiplier)
        if cut is None:
            return
        dual = replace(cut.dual, bound=cut.dual.bound + self.core.settled_value)
        if dual.bound < self.dual.bound - self.proven:
            self.adopt(dual, cut.costs)
