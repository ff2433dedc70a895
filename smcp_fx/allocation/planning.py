"""The order of elimination: the variable with the smallest product of domains goes next.

A sum is replaced by its two parts (a long sum by a chain of sums, so that nested concats share their running sums).
If the tables would outgrow the limit, a sum is loosened instead: it becomes a free variable, tied to its parts by a
`Link` whose multiplier the caller chooses, and the minimum becomes a lower bound. When no sum is left to loosen, one
variable gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation.elimination import (
    Definition,
    EliminationOrder,
    Form,
    Link,
    Minimisation,
    Scope,
    Substitution,
)
from smcp_fx.allocation.problem import Array, CoupledProblem, Ints, PriceTable, sum_grid

#: Most cells that one elimination touches: about ten milliseconds and 100 MB. Chosen.
MAX_CELLS = 1 << 24

#: About how many minimisations a dual takes, and the cells to touch in all: a second or two. Estimates.
_SOLVES, _SOLVES_PER_LINK, _ALL_CELLS = 13, 8, 2_200_000_000


class _Planner:
    """The bookkeeping of `plan`."""

    def __init__(self, problem: CoupledProblem, max_cells: int, dry: bool) -> None:
        self.max_cells, self.dry = max_cells, dry
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

    def _add_factor(self, scope: Scope, table: PriceTable | None = None) -> int:
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
        """Give every sum two parts; if possible, the larger is a sum that another concat needs as well."""
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
        """Replace a sum by its parts in every factor that it indexes."""
        definition = self.definitions[total]
        for factor in sorted(self.used[total]):
            scope = self.scopes[factor]
            new = self._substituted(total, factor)
            self._drop_factor(factor)
            out = self._add_factor(new)
            self.cells += self._size(new)
            if self.dry:
                continue
            cells = self._cells(scope, new, definition)
            if factor in self.constants:
                self.constants[out] = self.constants.pop(factor).ravel()[cells]
            else:
                self.steps.append(Substitution(factor, out, cells))
        self.steps.append(definition)

    def _cells(self, scope: Scope, new: Scope, definition: Definition) -> NDArray[np.intp]:
        """Return, for each cell over ``new``, its flat index in the factor over ``scope``."""
        index = dict(zip(new, np.ogrid[tuple(slice(len(self.grids[v])) for v in new)], strict=True))
        index[definition.total] = definition.positions[tuple(index[v] for v in definition.parts)]
        cells = np.zeros((1,) * len(new), np.intp)
        for variable in scope:
            cells = cells * len(self.grids[variable]) + index[variable]
        return np.broadcast_to(cells, [len(self.grids[v]) for v in new])

    def minimise(self, variable: int) -> None:
        """Minimise a variable out of the factors that it indexes."""
        factors = tuple(sorted(self.used[variable]))
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
        """Turn a sum into a free variable."""
        self.links.append(Link(total, self.members[total]))
        self.unaries[total] = self._add_factor((total,))

    def split(self, variable: int) -> bool:
        """Give some of a variable's factors a copy of it, to keep each bucket small if possible."""
        buckets: list[tuple[list[int], set[int]]] = []
        for factor in sorted(self.used[variable], key=lambda f: (-self._size(self.scopes[f]), f)):
            scope = set(self.scopes[factor])
            for members, union in buckets:
                # Unary costs, the multipliers among them, stay with the variable itself.
                if scope <= {variable} or self._size(tuple(union | scope)) <= self.max_cells:
                    members.append(factor)
                    union |= scope
                    break
            else:
                buckets.append(([factor], scope))
        if len(buckets) == 1:
            return False
        for members, _ in buckets[1:]:
            copy = self._add_variable((), self.grids[variable])
            self.links.append(Link(copy, ((variable, 1),)))
            for factor in members:
                renamed = tuple(copy if v == variable else v for v in self._drop_factor(factor))
                self.scopes[factor] = renamed
                for v in renamed:
                    self.used[v].add(factor)
            self.unaries[copy] = self._add_factor((copy,))
        return True


def plan(problem: CoupledProblem, max_cells: int = MAX_CELLS) -> EliminationOrder:
    """Order the eliminations, smallest product of domains first; none touches more than ``max_cells`` cells.

    Replacing a sum by its parts adds a dimension, so it is delayed, by an amount found by trial. If links remain,
    smaller limits are tried too: saving a link pays only while a minimisation stays quick.
    """
    if all(len(variable.members) == 1 for variable in problem.variables):
        only = _run(problem, max_cells, 1, dry=False)
        if not only.links:
            return only
    tried: list[tuple[bool, int, int, int, int]] = []
    for limit in (max_cells, max_cells >> 2, max_cells >> 4, max_cells >> 6):
        for patience in (1, 16, 256):
            dry = _run(problem, limit, patience, dry=True)
            slow = bool(dry.links) and dry.cells * (_SOLVES + _SOLVES_PER_LINK * len(dry.links)) > _ALL_CELLS
            tried.append((slow, len(dry.links), dry.cells, limit, patience))
        if not min(tried)[1]:
            break
    _, _, _, limit, patience = min(tried)
    return _run(problem, limit, patience, dry=False)


def _run(problem: CoupledProblem, max_cells: int, patience: int, dry: bool) -> EliminationOrder:
    work = _Planner(problem, max_cells, dry)
    pending = set(work.definitions)
    remaining = set(range(len(work.grids)))
    prices: dict[int, int] = {}
    while remaining:
        waiting = {v for total in pending for v in work.definitions[total].parts}
        for variable in remaining - prices.keys():
            prices[variable] = work.price(variable, pending)

        def rank(variable: int) -> tuple[int, int]:
            return prices[variable] * (patience if variable in pending else 1), variable

        able = {v for v in remaining - waiting if prices[v] <= max_cells}
        if not able and pending:
            largest = max(pending, key=lambda v: (prices[v], v))
            pending.discard(largest)
            work.loosen(largest)
            prices.clear()
            continue
        best = min(able or remaining, key=rank)
        before = len(work.grids)
        if not able and work.split(best):
            remaining |= set(range(before, len(work.grids)))
            prices.clear()
            continue
        stale = {best} | {v for f in work.used[best] for v in work.scopes[f]}
        if best in pending:
            stale |= set(work.definitions[best].parts)
            pending.discard(best)
            if work.used[best]:
                work.substitute(best)
        elif work.used[best]:
            work.minimise(best)
        remaining.discard(best)
        for variable in stale:
            prices.pop(variable, None)
    return EliminationOrder(
        tuple(work.grids),
        work.definitions,
        tuple(work.links),
        work.constants,
        work.unaries,
        tuple(work.steps),
        work.cells,
    )
