"""Exact true-cost deltas of changing one group, and the moves built from them.

One pass over flat arrays prices every option of every group: an option enters each table that its group's count
indexes, directly or through a sum.
"""

from __future__ import annotations

import numpy as np

from smcp_fx.allocation.problem import Array, CoupledProblem, Ints


class Moves:
    """Prices of all single changes around a choice (one option index per group)."""

    def __init__(self, problem: CoupledProblem, values: list[Array]) -> None:
        variables, groups = problem.variables, len(problem.groups)
        self.constant = problem.constant
        self.sizes = np.array([len(v) for v in values], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.group = np.repeat(np.arange(groups), self.sizes)
        self.option = np.arange(self.starts[-1]) - self.starts[self.group]
        self.values = np.concatenate([*values, np.zeros(0)])
        self.channels = np.concatenate([*(v.grid for v in variables[:groups]), np.zeros(0, np.int64)])
        # The grid position of every integer that a variable can be, all variables in one array. The last entry serves
        # as the second axis of one-dimensional tables.
        positions = [v.positions() for v in variables] + [np.zeros(1, np.int64)]
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in positions])])
        self.positions = np.concatenate(positions)
        least = np.array([v.grid[0] for v in variables] + [0])
        self.shift = offsets[:-1] - least
        self.form = np.zeros((len(variables) + 1, groups), np.int64)
        for v, variable in enumerate(variables):
            for group, coefficient in variable.members:
                self.form[v, group] = coefficient
        tables = problem.tables
        self.flat = np.concatenate([*(t.costs.ravel() for t in tables), np.zeros(0)])
        self.base = np.concatenate([[0], np.cumsum([t.costs.size for t in tables])])[:-1].astype(np.int64)
        self.axes = np.array([(*t.scope, len(variables))[:2] for t in tables], np.int64).reshape(-1, 2)
        self.stride = np.array([t.costs.shape[1] if t.costs.ndim == 2 else 1 for t in tables], np.int64)
        self._entries(groups)

    def _entries(self, groups: int) -> None:
        """List (option, table) pairs, ordered by option."""
        reach = (self.form[self.axes] != 0).any(axis=1)
        options, tables = [], []
        for group in range(groups):
            met = np.flatnonzero(reach[:, group])
            options.append(np.repeat(np.arange(self.starts[group], self.starts[group + 1]), len(met)))
            tables.append(np.tile(met, self.sizes[group]))
        self.entry_option = np.concatenate([*options, np.zeros(0, np.int64)])
        self.entry_table = np.concatenate([*tables, np.zeros(0, np.int64)])
        self.entry_axes = self.axes[self.entry_table].T
        self.entry_factor = self.form[self.entry_axes, self.group[self.entry_option]]
        self.entry_base = self.base[self.entry_table]
        self.entry_stride = self.stride[self.entry_table]
        self.entry_shift = self.shift[self.entry_axes]

    def cost(self, choice: Ints) -> float:
        """Return T at a choice, exactly as in the tables."""
        at = self.form @ self.channels[self.starts[:-1] + choice]
        first, second = self.positions[(self.shift[self.axes] + at[self.axes]).T]
        return self.constant + float(self.flat[self.base + first * self.stride + second].sum())

    def value(self, choice: Ints) -> float:
        """Return V at a choice."""
        return float(self.values[self.starts[:-1] + choice].sum())

    def deltas(self, choice: Ints) -> tuple[Array, Array]:
        """Return the changes of T and V for each option of each group, all other groups unchanged."""
        current = self.starts[:-1] + choice
        now = self.channels[current]
        step = (self.channels - now[self.group])[self.entry_option]
        at = (self.form @ now)[self.entry_axes] + self.entry_factor * step
        first, second = self.positions[self.entry_shift + at]
        costs = self.flat[self.entry_base + first * self.entry_stride + second]
        totals = np.bincount(self.entry_option, weights=costs, minlength=len(self.values))
        return totals - totals[current][self.group], self.values - self.values[current][self.group]


#: How many of the most promising options are paired, and how many pairs are tried at the true cost.
_PAIRED, _TRIED = 400, 24


def fit_budget(moves: Moves, choice: Ints, budget: float) -> Ints | None:
    """Return a choice within the budget that gives up little value for the cost saved; None when stuck."""
    choice = choice.copy()
    for _ in range(4 * len(moves.values) + 1):
        over = moves.cost(choice) - budget
        if over <= 0.0:
            return choice
        cost, value = moves.deltas(choice)
        saved = np.minimum(-cost, over)
        useful = np.flatnonzero(cost < -1e-12 * abs(budget))
        if not len(useful):
            return None
        enough = useful[-cost[useful] >= over]
        per_cost = -value[useful] / saved[useful]
        best = useful[np.argmin(per_cost)]
        if len(enough):
            cheapest = enough[np.argmax(value[enough])]
            if value[cheapest] >= value[best]:
                best = cheapest
        choice[moves.group[best]] = moves.option[best]
    return None


def descend(moves: Moves, choice: Ints) -> Ints:
    """Return a choice whose cost no single change reduces."""
    choice = choice.copy()
    while True:
        cost, _ = moves.deltas(choice)
        best = int(np.argmin(cost)) if len(cost) else 0
        if not len(cost) or cost[best] >= -1e-12 * abs(moves.cost(choice)):
            return choice
        choice[moves.group[best]] = moves.option[best]


def improve(moves: Moves, choice: Ints, budget: float, multiplier: float, scale: float) -> Ints:
    """Return a choice within the budget that no single change, and no tried pair of changes, improves.

    ``scale`` is the size of values, below whose rounding nothing counts as a gain.
    """
    choice, least = choice.copy(), 1e-13 * scale
    while True:
        slack = budget - moves.cost(choice)
        cost, value = moves.deltas(choice)
        gain = value - multiplier * cost
        single = np.flatnonzero((value > least) & (cost <= slack))
        if len(single):
            best = single[np.argmax(gain[single])]
            choice[moves.group[best]] = moves.option[best]
            continue
        pair = _best_pair(moves, choice, (cost, value, gain), budget, least)
        if pair is None:
            return choice
        for option in pair:
            choice[moves.group[option]] = moves.option[option]


def _best_pair(
    moves: Moves, choice: Ints, deltas: tuple[Array, Array, Array], budget: float, least: float
) -> tuple[int, int] | None:
    cost, value, gain = deltas
    changed = np.flatnonzero(moves.option != choice[moves.group])
    if len(changed) > _PAIRED:
        changed = changed[np.argpartition(-gain[changed], _PAIRED)[:_PAIRED]]
        changed.sort()
    slack = budget - moves.cost(choice)
    ups, downs = changed[value[changed] > 0.0], changed[cost[changed] < 0.0]
    gained = np.add.outer(value[ups], value[downs])
    # Groups that share a table make the sum an estimate: it is computed exactly before the pair is taken.
    fits = np.add.outer(cost[ups], cost[downs]) <= slack
    fits &= (gained > least) & (moves.group[ups][:, None] != moves.group[downs][None, :])
    rows, columns = np.nonzero(fits)
    for n in np.argsort(-gained[rows, columns], kind="stable")[:_TRIED]:
        pair = int(ups[rows[n]]), int(downs[columns[n]])
        trial = choice.copy()
        for option in pair:
            trial[moves.group[option]] = moves.option[option]
        if moves.cost(trial) <= budget:
            return pair
    return None
