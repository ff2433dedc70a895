"""The latency of a block between measured widths.

A block's latency over its two widths (channels in, channels out) has cliffs along each axis, since the runtime works
in steps of 16 channels, or 64. Their height changes smoothly along the other axis. So it is measured along a few
whole lines of each axis and *blended* (Gordon's transfinite interpolation, in its multiplicative form; its error is
of the order of the product of the two axes' errors):

    T(x, y) = Px T * Py T / (Px Py T)

with Px the linear interpolation in x between lines of constant x, each sampled densely in y; Py the converse. It is
exact for f(x) g(y) and for a + b x + c y + d x y, and positive however noisy the lines are, which a sum is not.
Kernels that compute four steps at a time make a saw of the latency: the first step above a multiple of four costs
more than the next three. Widths are interpolated along a scale that follows the saw (`Axis.coordinate`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smcp_fx.errors import InputError, TableError

Point = tuple[int, ...]
Floats = NDArray[np.float64]

#: Steps that kernels compute at a time.
TOOTH = 4


@dataclass(frozen=True)
class Axis:
    """One free width: its range, the runtime's step, the sampled values, and the values where lines stand.

    Widths up to a multiple of ``step`` cost what that multiple costs; 1 where there are no such steps. Multiples
    of ``aligned`` and other widths are interpolated among their own kind; 1 where there are no two kinds.
    ``spacing``: what the grid's widths are multiples of, except perhaps the last (a layer's full size), which then
    stands for itself alone. ``unit``: the step, or else the spacing. ``saw``: which shares of the cost of four units
    more the first one, two and three bring; empty where that is linear. ``first_apart``: the first width costs
    something else than the end of its step. ``before_last``: the width before the last where it costs more, else 0;
    the last then stands for itself alone.
    """

    first: int
    last: int
    step: int
    samples: tuple[int, ...]
    lines: tuple[int, ...]
    aligned: int = 1
    unit: int = 1
    saw: tuple[float, ...] = ()
    spacing: int = 1
    first_apart: bool = True
    before_last: int = 0

    def canonical(self, widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the widths that stand for ``widths``: ends of their steps, or themselves where they stand apart."""
        regular = self.before_last or max(self.last - self.last % self.spacing, self.first)
        rounded = np.minimum(-(-widths // self.step) * self.step, regular)
        apart = (widths > regular) | (self.first_apart & (widths == self.first))
        return np.where(apart, widths, rounded)

    def kinds(self) -> list[Axis]:
        """Return the axis, or one for the multiples of ``aligned`` and one for the rest."""
        if self.aligned == 1:
            return [self]
        found = []
        for kind in (True, False):
            samples, lines = (
                tuple(v for v in values if is_aligned(v, self.aligned) == kind)
                for values in (self.samples, self.lines)
            )
            if samples:
                found.append(replace(self, first=samples[0], last=samples[-1], samples=samples, lines=lines))
        return found

    def coordinate(self, widths: NDArray[np.int64] | Sequence[int]) -> Floats:
        """Return where ``widths`` are on a scale along which the latency is linear within a saw's tooth, too."""
        given = np.asarray(widths, dtype=np.float64)
        if not self.saw:
            return given
        whole, part = np.divmod(given, TOOTH * self.unit)
        shares: Floats = np.interp(part / self.unit, range(TOOTH + 1), (0.0, *self.saw, 1.0))
        return TOOTH * self.unit * (whole + shares)


class Surface:
    """The latency of one block over its widths, interpolated; call it with one int array per free width."""

    def __init__(self, axes: Sequence[Axis], known: Mapping[Point, float]) -> None:
        self.axes = tuple(axes)
        self._points = {point: known[point] for point in surface_points(self.axes)}

    @property
    def points(self) -> tuple[Point, ...]:
        """The measured widths that the surface rests on."""
        return tuple(self._points)

    def __call__(self, *widths: NDArray[np.int64]) -> Floats:
        """Return the latencies in ms, of the broadcast shape; `TableError` outside the measured range."""
        if len(widths) != len(self.axes):
            raise InputError(f"{len(widths)} widths were given, the block has {len(self.axes)}")
        if not self.axes:
            return np.asarray(self._points[()], dtype=np.float64)
        arrays = [np.asarray(w) for w in widths]  # an open grid stays open: its nodes are sought once an axis
        for axis, array in zip(self.axes, arrays, strict=True):
            if array.size and (array.min() < axis.first or array.max() > axis.last):
                outside = array[(array < axis.first) | (array > axis.last)].flat[0]
                raise TableError(
                    f"{outside} channels were asked for, {axis.first} to {axis.last} were measured; "
                    "measure the block on a wider grid"
                )
        at = [axis.canonical(array.astype(np.int64)) for axis, array in zip(self.axes, arrays, strict=True)]
        parts = self._parts
        if len(parts) == 1:
            return parts[0](*at)
        result = np.full(np.broadcast_shapes(*(array.shape for array in at)), np.nan)
        for part in parts:
            inside = [
                np.clip(array, axis.first, axis.last) for axis, array in zip(part.axes, at, strict=True)
            ]
            own = [
                is_aligned(array, axis.aligned) == is_aligned(axis.first, axis.aligned)
                for axis, array in zip(part.axes, at, strict=True)
            ]
            result = np.where(np.logical_and.reduce(np.broadcast_arrays(*own)), part(*inside), result)
        return result

    @cached_property
    def _parts(self) -> list[_Part]:
        """A part for each choice of the axes' kinds."""
        return [
            _Part(axes, self._points) for axes in itertools.product(*(axis.kinds() for axis in self.axes))
        ]


class _Part:
    """The surface of one kind of widths on each axis, of values that are within them."""

    def __init__(self, axes: Sequence[Axis], points: Mapping[Point, float]) -> None:
        self.axes = tuple(axes)
        self._points = points

    def __call__(self, *at: NDArray[np.int64]) -> Floats:
        if len(self.axes) == 2:
            return self._blend(*at)
        (axis,) = self.axes
        known = [self._points[(value,)] for value in axis.samples]
        found: Floats = np.interp(axis.coordinate(at[0]), axis.coordinate(axis.samples), known)
        return found

    def _blend(self, x: NDArray[np.int64], y: NDArray[np.int64]) -> Floats:
        (ax, ay), (along_y, along_x, crossings) = self.axes, self._lines
        u, v = ax.coordinate(x), ay.coordinate(y)
        x_lines, y_lines = ax.coordinate(ax.lines), ay.coordinate(ay.lines)
        px = _bilinear(u, v, x_lines, ay.coordinate(ay.samples), along_y)
        py = _bilinear(v, u, y_lines, ax.coordinate(ax.samples), along_x)
        blended: Floats = px * py / _bilinear(u, v, x_lines, y_lines, crossings)
        return blended

    @cached_property
    def _lines(self) -> tuple[Floats, Floats, Floats]:
        """What was measured along the lines of constant x, of constant y, and where they cross."""
        (ax, ay), get = self.axes, self._points
        along_y = np.array([[get[i, j] for j in ay.samples] for i in ax.lines])
        along_x = np.array([[get[i, j] for i in ax.samples] for j in ay.lines])
        crossings = np.array([[get[i, j] for j in ay.lines] for i in ax.lines])
        return along_y, along_x, crossings


def surface_points(axes: Sequence[Axis]) -> tuple[Point, ...]:
    """Return the widths that a `Surface` over ``axes`` needs."""
    if not axes:
        return ((),)
    if len(axes) == 1:
        return tuple((v,) for v in axes[0].samples)
    x, y = axes
    points = [(i, j) for i in x.lines for j in y.samples] + [(i, j) for j in y.lines for i in x.samples]
    return tuple(dict.fromkeys(points))


def held_out_errors(surface: Surface, probes: Sequence[Point], known: Mapping[Point, float]) -> Floats:
    """Return |interpolated - measured| / measured at ``probes``."""
    if not probes:
        return np.zeros(0)
    measured = np.array([known[p] for p in probes])
    predicted = surface(*np.array(probes, dtype=np.int64).T)
    errors: Floats = np.abs(predicted - measured) / measured
    return errors


def is_aligned(width: Any, multiple: int) -> Any:
    """Whether widths (an int or an array) are multiples."""
    return width % multiple == 0


def _bilinear(x: Floats, y: Floats, xs: Floats, ys: Floats, values: Floats) -> Floats:
    """Return the values at (x, y), interpolated linearly in both between the nodes ``xs`` and ``ys``."""
    i, u = _locate(x, xs)
    j, v = _locate(y, ys)
    k, m = np.minimum(i + 1, len(xs) - 1), np.minimum(j + 1, len(ys) - 1)
    low = values[i, j] * (1 - v) + values[i, m] * v
    high = values[k, j] * (1 - v) + values[k, m] * v
    result: Floats = low * (1 - u) + high * u
    return result


def _locate(at: Floats, nodes: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return the node at or below each value, and the share of the way to the next."""
    below = np.clip(np.searchsorted(nodes, at, side="right") - 1, 0, max(len(nodes) - 2, 0))
    if len(nodes) == 1:
        return below, np.zeros(np.shape(at))
    return below, (at - nodes[below]) / (nodes[below + 1] - nodes[below])
