"""A `NetworkCost` as tables: one per pair of widths instead of one callable per layer.

A *variable* indexes an axis of a table: it is a group's count, or the sum of several groups' channels if
these are concatenated. Widths that differ by a constant or a factor (a flatten in front of a linear layer)
share their variable, and layers with the same pair of variables share one table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.errors import InputError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Variable:
    """A linear form of the counts, and the values it can reach."""

    members: tuple[tuple[int, int], ...]
    """(group, coefficient) pairs."""
    grid: Ints
    """Reachable values, ascending; for a group its permitted counts."""

    def positions(self) -> Ints:
        """Return the grid position of every integer from the least to the greatest reachable value."""
        table = np.full(int(self.grid[-1] - self.grid[0]) + 1, -1, np.int64)
        table[self.grid - self.grid[0]] = np.arange(len(self.grid))
        return table


@dataclass(frozen=True)
class PriceTable:
    """Costs indexed by the grid positions of one or two variables."""

    scope: tuple[int, ...]
    costs: Array


@dataclass(frozen=True)
class CoupledProblem:
    """The groups, their costs' tables and the variables that index them; variable k is group k's count."""

    groups: tuple[str, ...]
    variables: tuple[Variable, ...]
    tables: tuple[PriceTable, ...]
    constant: float

    def counts(self, choice: Ints) -> dict[str, int]:
        """Return the counts at these options."""
        return {
            name: int(self.variables[k].grid[option])
            for k, (name, option) in enumerate(zip(self.groups, choice, strict=True))
        }


def sum_grid(parts: list[tuple[Ints, int]]) -> Ints:
    """Return every value that a weighted sum of grids can reach, ascending."""
    grid = np.zeros(1, np.int64)
    for part, coefficient in parts:
        grid = np.unique(np.add.outer(grid, coefficient * part))
    return grid


def tabulate(cost: NetworkCost) -> CoupledProblem:
    """Evaluate every term once on the grid of widths it can meet.

    Raises:
        InputError: a group's permitted counts are empty or not ascending, a term has more than two widths,
            or a price is not finite or not of the shape of its widths.
    """
    variables = _Variables(cost.permitted)
    merged: dict[tuple[int, ...], Array] = {}
    evaluated: dict[object, Array] = {}  # equal layers share their price and their widths' grids
    constant = cost.constant
    for term in cost.terms:
        if len(term.widths) > 2:
            raise InputError(
                f"cost term {term.name!r} has {len(term.widths)} widths; at most two are supported"
            )
        scope, axes = variables.axes(term)
        alike = (id(term.price), *((axis.shape, axis.tobytes()) for axis in axes))
        if alike not in evaluated:
            evaluated[alike] = _evaluate(term, axes)
        costs = evaluated[alike].reshape([len(variables.all[v].grid) for v in scope])
        if not scope:
            constant += float(costs)
            continue
        if len(scope) == 2 and scope[0] > scope[1]:
            scope, costs = scope[::-1], costs.T
        key = tuple(scope)
        merged[key] = merged[key] + costs if key in merged else np.ascontiguousarray(costs)
    tables = tuple(PriceTable(scope, costs) for scope, costs in merged.items())
    return CoupledProblem(tuple(cost.permitted), tuple(variables.all), tables, constant)


class _Variables:
    """The counts of the groups, and behind them the weighted sums of counts that widths are made of."""

    def __init__(self, permitted: Mapping[str, Sequence[int]]) -> None:
        self.all: list[Variable] = []
        for k, (name, counts) in enumerate(permitted.items()):
            grid = np.asarray(counts, np.int64)
            if grid.ndim != 1 or not len(grid) or (np.diff(grid) <= 0).any():
                raise InputError(
                    f"the permitted counts of group {name!r} must be ascending integers, not {counts!r}"
                )
            self.all.append(Variable(((k, 1),), grid))
        self._number = {name: k for k, name in enumerate(permitted)}
        self._ids = {variable.members: k for k, variable in enumerate(self.all)}

    def axes(self, term: CostTerm) -> tuple[list[int], list[Ints]]:
        """Return the term's variables, and the values of its widths, each along its variable's axis of two."""
        scope: list[int] = []
        axes: list[Ints] = []
        for width in term.widths:
            variable, factor, offset = self._of(width)
            shape = [1, 1]
            values = np.full(1, offset, np.int64)
            if variable is not None:
                values = offset + factor * self.all[variable].grid
                if variable not in scope:
                    scope.append(variable)
                shape[scope.index(variable)] = len(values)
            axes.append(values.reshape(shape))
        return scope, axes

    def _of(self, width: Width) -> tuple[int | None, int, int]:
        """Return (variable, factor, constant) of a width; groups without a choice are in the constant."""
        members: dict[int, int] = {}
        constant = width.constant
        for group, per_unit in width.groups:
            k = self._number[group]
            if len(self.all[k].grid) == 1:
                constant += per_unit * int(self.all[k].grid[0])
            else:
                members[k] = members.get(k, 0) + per_unit
        items = sorted((k, a) for k, a in members.items() if a != 0)
        if not items:
            return None, 0, constant
        factor = math.gcd(*(a for _, a in items))
        form = tuple((k, a // factor) for k, a in items)
        if len(form) == 1 and form[0][1] == -1:
            form, factor = ((form[0][0], 1),), -factor
        if form not in self._ids:
            self._ids[form] = len(self.all)
            self.all.append(Variable(form, sum_grid([(self.all[k].grid, a) for k, a in form])))
        return self._ids[form], factor, constant


def _evaluate(term: CostTerm, axes: list[Ints]) -> Array:
    shape = np.broadcast_shapes((1, 1), *(axis.shape for axis in axes))
    costs = np.asarray(term.price(*axes), np.float64)
    try:
        costs = np.broadcast_to(costs, shape)
    except ValueError:
        raise InputError(
            f"the price of cost term {term.name!r} returned shape {costs.shape} for widths that broadcast to "
            f"{shape}; prices must be vectorised"
        ) from None
    if not np.isfinite(costs).all():
        at = np.unravel_index(int(np.argmin(np.isfinite(costs))), shape)
        widths = [int(np.broadcast_to(axis, shape)[at]) for axis in axes]
        raise InputError(f"the price of cost term {term.name!r} is {costs[at]} at widths {widths}")
    return costs


def value_arrays(problem: CoupledProblem, values: Mapping[str, object]) -> list[Array]:
    """Return the values as one array per group.

    Raises:
        InputError: a group is missing or unknown, or its values are not a finite number per permitted count.
    """
    unknown, missing = set(values) - set(problem.groups), set(problem.groups) - set(values)
    if unknown or missing:
        raise InputError(
            f"values must name the groups of the cost: unknown {sorted(unknown)}, missing {sorted(missing)}"
        )
    arrays = []
    for k, name in enumerate(problem.groups):
        array = np.asarray(values[name], np.float64)
        if array.shape != problem.variables[k].grid.shape:
            raise InputError(
                f"values of group {name!r} have shape {array.shape}; its {len(problem.variables[k].grid)} "
                "permitted counts need one value each"
            )
        if not np.isfinite(array).all():
            raise InputError(f"values of group {name!r} are not all finite")
        arrays.append(array)
    return arrays
