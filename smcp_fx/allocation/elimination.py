"""Minimise a sum of tables exactly by eliminating one variable after another.

An `EliminationOrder` (see `planning`) fixes the order for a problem. Its `minimise` takes any unary costs: a forward
sweep over the variables finds the least value, and a backward sweep finds its position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation.problem import Array, Ints

Scope = tuple[int, ...]
Form = tuple[tuple[int, int], ...]

#: Below this many cells one broadcast sum is taken to be cheaper than a running minimum over slices. Chosen, not
#: measured.
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
    """A minimiser, as grid positions of the plan's variables (-1: not needed), and the tables behind it.

    ``buckets[n]`` holds step n's aligned factors; a variable's cost, given the positions of its scope, is
    their sum.
    """

    value: float
    positions: Ints
    buckets: list[list[Array]] = field(repr=False)


@dataclass(frozen=True)
class EliminationOrder:
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
        sums = [sum(a * value[v] for v, a in link.parts) for link in self.links]
        excess = [value[link.copy] - total for link, total in zip(self.links, sums, strict=True)]
        return np.array(excess, np.float64)


def conditional(step: Minimisation, bucket: list[Array], positions: Ints) -> Array:
    """Return the costs of ``step.variable``'s options, all else at ``positions``."""
    total: Array = np.zeros(bucket[0].shape[0])
    for array in bucket:
        shape = array.shape[1:]
        at = [int(positions[v]) if n > 1 else 0 for v, n in zip(step.scope, shape, strict=True)]
        index: tuple[slice | int, ...] = (slice(None), *at)
        total += array[index]
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
