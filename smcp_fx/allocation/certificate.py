"""Tighten the bound, and usually close the gap, by listing every choice of small Lagrangian loss.

At a multiplier, the elimination splits the relaxed cost of any choice exactly into its least value and one
nonnegative loss per variable, given those eliminated after it. A choice within the budget that beats the incumbent
loses at most ``budget - least - gain * incumbent`` in all. So choices are listed in the reverse order of elimination,
up to a loss. The unlisted ones prove a bound, and the listed ones hold the optimum if the loss was large enough. Of
partial choices that look the same to later variables, only the Pareto front of cost and value is kept; those in which
a loosened sum is not the sum of its parts are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation.dual import CoupledDual, Relaxation
from smcp_fx.allocation.elimination import Definition, EliminationOrder, Link, Minimisation
from smcp_fx.allocation.local_search import Moves
from smcp_fx.allocation.problem import Array, Ints
from smcp_fx.allocation.result import gap_unit

#: Limits of one listing: partial choices kept, and pairs (partial choice, option) looked at, where a partial choice
#: counts as `_ROW` pairs. Counts instead of seconds make equal inputs give equal answers; about half a second.
_MAX_ROWS, _MAX_WORK, _ROW = 150_000, 40_000_000, 50
#: Pairs looked at in one go, to limit memory.
_CHUNK = 1 << 20


class _TooManyError(Exception):
    """The listing reached a limit."""


@dataclass(frozen=True)
class _Step:
    """One variable to assign, the variables that later steps need, and the loosened sums it completes."""

    step: Minimisation | Definition
    bucket: list[Array]
    needed: frozenset[int]
    checks: list[Link]


def _ordered(plan: EliminationOrder, buckets: list[list[Array]]) -> list[_Step]:
    """Return the steps in an order that respects their dependencies and remembers few positions.

    Any such order splits the cost into the same losses. The next step is always the one that leaves the fewest
    combinations of remembered positions, so that more partial choices can be compared. Loosened sums and their parts
    come early, since completing one drops most partial choices.
    """
    steps = [
        (step, bucket, frozenset(step.scope if isinstance(step, Minimisation) else step.parts))
        for step, bucket in zip(plan.steps, buckets, strict=True)
        if isinstance(step, Minimisation | Definition)
    ]
    weight = [math.log(len(grid)) for grid in plan.grids]
    users: dict[int, set[int]] = {v: set() for v in range(len(plan.grids))}
    for n, (_, _, depends) in enumerate(steps):
        for variable in depends:
            users[variable].add(n)
    for n, link in enumerate(plan.links):
        for variable in _variables(link):
            users[variable].add(-1 - n)
    todo, assigned, order = list(reversed(range(len(steps)))), set[int](), list[_Step]()
    unchecked = dict(enumerate(plan.links))

    def growth(n: int) -> float:
        variable = _assigned(steps[n][0])
        freed = sum(weight[v] for v in steps[n][2] if users[v] == {n})
        if any(user < 0 for user in users[variable]):
            freed += 2.0 * weight[variable]
        return (weight[variable] if users[variable] else 0.0) - freed

    while todo:
        best = min((n for n in todo if steps[n][2] <= assigned), key=lambda n: (growth(n), -n))
        todo.remove(best)
        step, bucket, depends = steps[best]
        assigned.add(_assigned(step))
        for variable in depends:
            users[variable].discard(best)
        checks = {n: link for n, link in unchecked.items() if _variables(link) <= assigned}
        for n, link in checks.items():
            del unchecked[n]
            for variable in _variables(link):
                users[variable].discard(-1 - n)
        needed = frozenset(v for v in assigned if users[v])
        order.append(_Step(step, bucket, needed, list(checks.values())))
    return order


def _assigned(step: Minimisation | Definition) -> int:
    return step.variable if isinstance(step, Minimisation) else step.total


@dataclass(frozen=True)
class _Rows:
    """Partial choices: the positions of the variables still needed, the loss and the value so far."""

    positions: dict[int, Ints]
    loss: Array
    value: Array


def _variables(link: Link) -> set[int]:
    return {link.copy, *(variable for variable, _ in link.parts)}


class _Listing:
    """Lists the choices around a dual's minimum up to a loss."""

    def __init__(self, relaxation: Relaxation, dual: CoupledDual) -> None:
        self.relaxation, self.gain = relaxation, 1.0 / dual.multiplier
        self.grids = relaxation.plan.grids
        self.steps = _ordered(relaxation.plan, dual.minimum.buckets)
        self.work = 0

    def run(self, loss: float) -> tuple[list[Ints], _Rows]:
        """Return the groups' options and the rows of the undominated choices of at most this loss.

        Raises:
            _TooManyError: they, or the partial choices on the way, are too many.
        """
        rows = _Rows({}, np.zeros(1), np.zeros(1))
        history: list[tuple[int, Ints, Ints]] = []
        for here in self.steps:
            if isinstance(here.step, Definition):
                rows, variable = self._define(rows, here.step), here.step.total
                parent, option = np.arange(len(rows.loss)), rows.positions[variable]
            else:
                variable = here.step.variable
                parent, option, added = self._extend(rows, here.step, here.bucket, loss)
                value = rows.value[parent]
                if variable < self.relaxation.groups:
                    value = value + self.relaxation.values[variable][option]
                positions = {v: p[parent] for v, p in rows.positions.items()} | {variable: option}
                rows = _Rows(positions, rows.loss[parent] + added, value)
            kept = np.arange(len(rows.loss))
            if here.checks:
                kept = self._consistent(rows, here.checks)
            if isinstance(here.step, Minimisation):
                kept = kept[self._undominated(_take(rows, kept, here.needed))]
            rows = _take(rows, kept, here.needed)
            history.append((variable, parent[kept], option[kept]))
            if len(kept) > _MAX_ROWS:
                raise _TooManyError
        columns: list[Ints] = [np.zeros(0, np.int64)] * len(self.grids)
        at = np.arange(len(rows.loss))
        for variable, parent, option in reversed(history):
            columns[variable] = option[at]
            at = parent[at]
        return columns[: self.relaxation.groups], rows

    def _define(self, rows: _Rows, step: Definition) -> _Rows:
        first, second = (rows.positions[v] for v in step.parts)
        positions = rows.positions | {step.total: step.positions[first, second]}
        return _Rows(positions, rows.loss, rows.value)

    def _extend(
        self, rows: _Rows, step: Minimisation, bucket: list[Array], loss: float
    ) -> tuple[Ints, Ints, Array]:
        """Return (row, option, its loss) of every pair within the loss."""
        count, options = len(rows.loss), len(self.grids[step.variable])
        self.work += count * (options + _ROW)
        if self.work > _MAX_WORK:
            raise _TooManyError
        state = np.zeros(count, np.int64)
        for variable in step.scope:
            state = state * len(self.grids[variable]) + rows.positions[variable]
        _, first, state = np.unique(state, return_index=True, return_inverse=True)
        parts: list[tuple[Ints, Ints, Array]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
        by_state = np.argsort(state, kind="stable")
        chunk = max(1, _CHUNK // options)
        for begin in range(0, count, chunk):
            row = by_state[begin : begin + chunk]
            low, high = state[row[0]], state[row[-1]] + 1
            losses = self._losses(rows, step, bucket, first[low:high])[state[row] - low]
            at, option = np.nonzero(losses <= (loss - rows.loss[row])[:, None])
            parts.append((row[at], option, losses[at, option]))
            if sum(len(part[0]) for part in parts) > 8 * _MAX_ROWS:
                raise _TooManyError
        parents, chosen, added = (np.concatenate(column) for column in zip(*parts, strict=True))
        return parents, chosen, added

    def _losses(self, rows: _Rows, step: Minimisation, bucket: list[Array], at: Ints) -> Array:
        """Return the loss of each option (columns) at the positions of some rows."""
        costs = np.zeros((len(self.grids[step.variable]), len(at)))
        for array in bucket:
            shape = array.shape[1:]
            index = [rows.positions[v][at] if n > 1 else 0 for v, n in zip(step.scope, shape, strict=True)]
            part = array[(slice(None), *index)]
            costs += part if part.ndim == 2 else part[:, None]
        return np.ascontiguousarray((costs - costs.min(axis=0)).T)

    def _consistent(self, rows: _Rows, links: list[Link]) -> NDArray[np.intp]:
        excess = np.zeros(len(rows.loss), np.int64)
        for link in links:
            total = self.grids[link.copy][rows.positions[link.copy]]
            for variable, coefficient in link.parts:
                total = total - coefficient * self.grids[variable][rows.positions[variable]]
            excess |= total
        return np.flatnonzero(excess == 0)

    def _undominated(self, rows: _Rows) -> NDArray[np.intp]:
        """Return the rows that no row of the same positions beats in both cost and value."""
        key, span = np.zeros(len(rows.loss), np.int64), 1
        for variable, position in rows.positions.items():
            size = len(self.grids[variable])
            if span * size >= 1 << 42:
                key = np.unique(key, return_inverse=True)[1]
                span = len(key)
            key, span = key * size + position, span * size
        levels, level = np.unique(rows.value, return_inverse=True)
        order = np.lexsort((-level, rows.loss + self.gain * rows.value, key))
        ranked = key[order] * len(levels) + level[order]
        beaten = np.zeros(len(order), bool)
        beaten[1:] = ranked[1:] <= np.maximum.accumulate(ranked)[:-1]
        return np.sort(order[~beaten])


def _take(rows: _Rows, kept: NDArray[np.intp], needed: frozenset[int]) -> _Rows:
    if len(kept) == len(rows.loss):
        return _Rows({v: p for v, p in rows.positions.items() if v in needed}, rows.loss, rows.value)
    positions = {v: p[kept] for v, p in rows.positions.items() if v in needed}
    return _Rows(positions, rows.loss[kept], rows.value[kept])


def certify(relaxation: Relaxation, dual: CoupledDual, moves: Moves, incumbent: Ints) -> tuple[Ints, float]:
    """Return the best choice found and the tightest bound proven, from a choice within the budget."""
    gain = 1.0 / dual.multiplier
    bound, best = dual.bound, moves.value(incumbent)
    listing = _Listing(relaxation, dual)
    rounding = relaxation.rounding(dual.minimum, gain)
    loss = (bound - best) * gain / 8.0
    while bound - best > 1e-9 * gap_unit(bound, relaxation.values):
        loss = min(loss, (dual.bound - best) * gain)
        try:
            columns, rows = listing.run(loss + rounding)
        except _TooManyError:
            break
        cost = dual.minimum.value + relaxation.constant + rows.loss + gain * rows.value
        fits = np.flatnonzero((cost <= relaxation.budget + rounding) & (rows.value > best))
        for n in fits[np.argsort(-rows.value[fits], kind="stable")]:
            choice = np.array([column[n] for column in columns], np.int64)
            if moves.cost(choice) <= relaxation.budget and moves.value(choice) > best:
                incumbent, best = choice, moves.value(choice)
                break
        bound = min(bound, max(best, dual.bound - loss / gain))
        loss *= 3.0
    return incumbent, bound
