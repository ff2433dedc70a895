"""Minimise a sum of tables exactly by eliminating one variable after the other.

`plan` fixes the order once for a problem, always the variable with the smallest product of domains next;
`Plan.minimise` then runs it for any unary costs. A variable that is a sum is replaced by its two parts
(itself two at a time, so that nested concats share their running sums). Where the tables would outgrow
``max_cells``, a sum is let loose instead: it becomes a free variable, tied to its parts by a `Link` whose
multiplier the caller chooses; the minimum is then a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation.problem import Array, Ints, Problem, Table, sum_grid

Scope = tuple[int, ...]
Form = tuple[tuple[int, int], ...]

#: Below this many cells one broadcast sum is cheaper than a running minimum over slices.
_SMALL = 1 << 13


@dataclass(frozen=True)
class Link:
    """``copy == sum(coefficient * part)``, relaxed."""

    copy: int
    parts: Form


@dataclass(frozen=True)
class Definition:
    """Variable ``total`` is a weighted sum of two others; ``positions[i, j]`` is its grid position."""

    total: int
    parts: tuple[int, int]
    positions: Ints


@dataclass(frozen=True)
class Substitution:
    """Replace ``total`` by its parts in one factor: ``out = factor.ravel()[cells]``."""

    factor: int
    out: int
    cells: NDArray[np.intp]


@dataclass(frozen=True)
class Minimisation:
    """Minimise ``variable`` out of the sum of ``factors``; ``views`` align each to (variable, *scope)."""

    variable: int
    scope: Scope
    factors: tuple[int, ...]
    views: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    folds: tuple[tuple[int, int], ...]
    out: int


@dataclass(frozen=True)
class Minimum:
    """A minimiser, as grid positions of the plan's variables (-1: not needed), and what led to it.

    ``buckets[n]`` holds step n's aligned factors; a variable's cost, given the positions of its scope, is
    their sum.
    """

    value: float
    positions: Ints
    buckets: list[list[Array]] = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """An elimination order for one problem, with all index arithmetic done."""

    grids: tuple[Ints, ...]
    definitions: dict[int, Definition]
    links: tuple[Link, ...]
    constants: dict[int, Array]
    unaries: dict[int, int]
    steps: tuple[Substitution | Minimisation | Definition, ...]
    cells: int

    def minimise(self, unaries: dict[int, Array]) -> Minimum:
        """Minimise tables plus ``unaries`` (variable to costs at its grid positions)."""
        factors = dict(self.constants)
        for variable, factor in self.unaries.items():
            factors[factor] = unaries.get(variable, np.zeros(len(self.grids[variable])))
        buckets: list[list[Array]] = []
        value = 0.0
        for step in self.steps:
            bucket: list[Array] = []
            if isinstance(step, Substitution):
                factors[step.out] = factors[step.factor].ravel()[step.cells]
            elif isinstance(step, Minimisation):
                bucket = [
                    factors[f].transpose(order).reshape(shape)
                    for f, (order, shape) in zip(step.factors, step.views, strict=True)
                ]
                for small, large in step.folds:
                    bucket[large] = bucket[large] + bucket[small]
                bucket = [a for n, a in enumerate(bucket) if n not in {small for small, _ in step.folds}]
                least = _minimum(bucket)
                if step.scope:
                    factors[step.out] = least
                else:
                    value += float(least)
            buckets.append(bucket)
        positions = np.full(len(self.grids), -1, np.int64)
        for step, bucket in zip(reversed(self.steps), reversed(buckets), strict=True):
            if isinstance(step, Definition):
                first, second = step.parts
                positions[step.total] = step.positions[positions[first], positions[second]]
            elif isinstance(step, Minimisation):
                positions[step.variable] = int(np.argmin(conditional(step, bucket, positions)))
        return Minimum(value, positions, buckets)

    def excess(self, positions: Ints) -> Array:
        """Return ``copy - sum(parts)`` for each link, in channels."""
        value = [int(grid[p]) if p >= 0 else 0 for grid, p in zip(self.grids, positions, strict=True)]
        return np.array([value[link.copy] - sum(a * value[v] for v, a in link.parts) for link in self.links], float)


def conditional(step: Minimisation, bucket: list[Array], positions: Ints) -> Array:
    """Return the costs of ``step.variable``'s options, all else at ``positions``."""
    at = [int(positions[v]) for v in step.scope]
    total: Array = np.zeros(1)
    for array in bucket:
        total = total + array[(slice(None), *(p if n > 1 else 0 for p, n in zip(at, array.shape[1:], strict=True)))]
    return total


def _minimum(bucket: list[Array]) -> Array:
    """Return the minimum over axis 0 of the broadcast sum."""
    if len(bucket) == 1:
        least: Array = bucket[0].min(axis=0)
        return least
    shape = np.broadcast_shapes(*(a.shape for a in bucket))
    if np.prod(shape) <= _SMALL:
        total = bucket[0]
        for array in bucket[1:]:
            total = total + array
        least = total.min(axis=0)
        return least
    bucket = [np.ascontiguousarray(array) for array in bucket]
    least = np.empty(shape[1:])
    scratch = np.empty(shape[1:])
    for option in range(shape[0]):
        target = scratch if option else least
        np.add(bucket[0][option], bucket[1][option], out=target)
        for array in bucket[2:]:
            target += array[option]
        if option:
            np.minimum(least, scratch, out=least)
    return least


class _Planner:
    """The bookkeeping of `plan`."""

    def __init__(self, problem: Problem, max_cells: int) -> None:
        self.max_cells = max_cells
        self.members: list[Form] = [v.members for v in problem.variables]
        self.grids: list[Ints] = [v.grid for v in problem.variables]
        self.groups = len(problem.groups)
        self.definitions: dict[int, Definition] = {}
        self.links: list[Link] = []
        self.scopes: dict[int, Scope] = {}
        self.constants: dict[int, Array] = {}
        self.unaries: dict[int, int] = {}
        self.used: list[set[int]] = [set() for _ in self.members]
        self.steps: list[Substitution | Minimisation | Definition] = []
        self.cells = 0
        self.next_factor = 0
        self._define_sums()
        for table in problem.tables:
            self._add_factor(table.scope, table)
        for group in range(self.groups):
            self.unaries[group] = self._add_factor((group,))

    def _add_factor(self, scope: Scope, table: Table | None = None) -> int:
        factor, self.next_factor = self.next_factor, self.next_factor + 1
        self.scopes[factor] = scope
        for variable in scope:
            self.used[variable].add(factor)
        if table is not None:
            self.constants[factor] = table.costs
        return factor

    def _drop_factor(self, factor: int) -> Scope:
        scope = self.scopes.pop(factor)
        for variable in scope:
            self.used[variable].discard(factor)
        return scope

    def _add_variable(self, form: Form, grid: Ints) -> int:
        self.members.append(form)
        self.grids.append(grid)
        self.used.append(set())
        return len(self.members) - 1

    def _define_sums(self) -> None:
        """Give every sum two parts, the larger a sum that another concat needs as well where there is one."""
        ids = {form: v for v, form in enumerate(self.members)}

        def part(form: Form) -> tuple[int, int]:
            if len(form) == 1:
                return form[0]
            if form not in ids:
                grid = sum_grid([(self.grids[k], a) for k, a in form])
                ids[form] = self._add_variable(form, grid)
                define(ids[form])
            return ids[form], 1

        def define(total: int) -> None:
            form = self.members[total]
            nested = [f for f in ids if 1 < len(f) < len(form) and set(f) < set(form)]
            base = max(nested, key=len) if nested else form[:-1]
            (first, a), (second, b) = part(base), part(tuple(m for m in form if m not in base))
            values = np.add.outer(a * self.grids[first], b * self.grids[second])
            self.definitions[total] = Definition(
                total, (first, second), np.searchsorted(self.grids[total], values)
            )

        for total in sorted(range(self.groups, len(self.members)), key=lambda v: len(self.members[v])):
            define(total)

    def _size(self, scope: Sequence[int]) -> int:
        size = 1
        for variable in scope:
            size *= len(self.grids[variable])
        return size

    def _substituted(self, total: int, factor: int) -> Scope:
        rest = [v for v in self.scopes[factor] if v != total]
        return tuple(dict.fromkeys((*rest, *self.definitions[total].parts)))

    def price(self, variable: int, pending: set[int]) -> int:
        """Return the cells that eliminating a variable touches."""
        union = {v for f in self.used[variable] for v in self.scopes[f]}
        if union and variable in pending:
            union = (union - {variable}) | set(self.definitions[variable].parts)
        return self._size(tuple(union)) if union else 0

    def substitute(self, total: int) -> None:
        """Replace a sum by its parts in every factor that has it."""
        definition = self.definitions[total]
        for factor in sorted(self.used[total]):
            scope = self.scopes[factor]
            new = self._substituted(total, factor)
            index = {v: axis for axis, v in zip(np.ogrid[tuple(slice(len(self.grids[v])) for v in new)], new)}
            first, second = definition.parts
            at = [definition.positions[index[first], index[second]] if v == total else index[v] for v in scope]
            cells = np.zeros((1,) * len(new), np.intp)
            for variable, position in zip(scope, at, strict=True):
                cells = cells * len(self.grids[variable]) + position
            cells = np.broadcast_to(cells, [len(self.grids[v]) for v in new])
            self._drop_factor(factor)
            out = self._add_factor(new)
            self.cells += cells.size
            if factor in self.constants:
                self.constants[out] = self.constants.pop(factor).ravel()[cells]
            else:
                self.steps.append(Substitution(factor, out, cells))
        self.steps.append(definition)

    def minimise(self, variable: int, chosen: Sequence[int] | None = None) -> None:
        """Minimise a variable out of the factors that have it."""
        factors = tuple(sorted(self.used[variable] if chosen is None else chosen))
        scopes = [self.scopes[f] for f in factors]
        order = (variable, *sorted({v for scope in scopes for v in scope} - {variable}))
        views = []
        for scope in scopes:
            permutation = tuple(scope.index(v) for v in order if v in scope)
            views.append((permutation, tuple(len(self.grids[v]) if v in scope else 1 for v in order)))
        folds: list[tuple[int, int]] = []
        by_size = sorted(range(len(factors)), key=lambda n: self._size(scopes[n]))
        for position, small in enumerate(by_size):
            for large in by_size[position + 1 :]:
                if set(scopes[small]) <= set(scopes[large]):
                    folds.append((small, large))
                    break
        for factor in factors:
            self._drop_factor(factor)
        self.cells += self._size(order)
        out = self._add_factor(order[1:]) if len(order) > 1 else -1
        self.steps.append(Minimisation(variable, order[1:], factors, tuple(views), tuple(folds), out))

    def loosen(self, total: int) -> None:
        """Make a sum a free variable."""
        self.links.append(Link(total, self.members[total]))
        self.unaries[total] = self._add_factor((total,))

    def split(self, variable: int) -> None:
        """Give some of a variable's factors a copy of it, so that each bucket stays small."""
        buckets: list[tuple[list[int], set[int]]] = []
        for factor in sorted(self.used[variable], key=lambda f: (-self._size(self.scopes[f]), f)):
            scope = set(self.scopes[factor])
            for members, union in buckets:
                if self._size(tuple(union | scope)) <= self.max_cells:
                    members.append(factor)
                    union |= scope
                    break
            else:
                buckets.append(([factor], scope))
        if len(buckets) == 1:
            self.minimise(variable)
            return
        for members, _ in buckets[1:]:
            copy = self._add_variable((), self.grids[variable])
            self.links.append(Link(copy, ((variable, 1),)))
            for factor in members:
                scope = self._drop_factor(factor)
                renamed = tuple(copy if v == variable else v for v in scope)
                self.scopes[factor] = renamed
                for v in renamed:
                    self.used[v].add(factor)
            self.unaries[copy] = self._add_factor((copy,))


def plan(problem: Problem, max_cells: int = 1 << 22) -> Plan:
    """Order the eliminations, smallest product of domains first; none touches more than ``max_cells`` cells."""
    work = _Planner(problem, max_cells)
    pending = set(work.definitions)
    remaining = set(range(len(work.grids)))
    prices: dict[int, int] = {}
    while remaining:
        waiting = {v for total in pending for v in work.definitions[total].parts}
        for variable in remaining - prices.keys():
            prices[variable] = work.price(variable, pending)
        best = min(remaining - waiting, key=lambda v: (prices[v], v))
        if prices[best] > max_cells:
            if pending:
                largest = max(pending, key=lambda v: (prices[v], v))
                pending.discard(largest)
                work.loosen(largest)
                prices.clear()
                continue
            if best not in pending:
                before = len(work.grids)
                work.split(best)
                remaining |= set(range(before, len(work.grids)))
                if not work.used[best]:
                    remaining.discard(best)
                prices.clear()
                continue
        stale = {best} | {v for f in work.used[best] for v in work.scopes[f]}
        if best in pending:
            if work.used[best]:
                work.substitute(best)
                stale |= set(work.definitions[best].parts)
            pending.discard(best)
        elif work.used[best]:
            work.minimise(best)
        remaining.discard(best)
        for variable in stale | {v for f in work.scopes for v in ()}:
            prices.pop(variable, None)
    return Plan(
        tuple(work.grids),
        work.definitions,
        tuple(work.links),
        work.constants,
        work.unaries,
        tuple(work.steps),
        work.cells,
    )
