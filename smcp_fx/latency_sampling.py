"""Where to measure a block's latency, and what it is in between.

A block's latency over its two widths (channels in, channels out) has cliffs along each axis (the runtime
works in steps of 16 channels, or 64), whose height changes smoothly along the other. So it is measured along
a few whole lines of each axis and *blended* (Gordon's transfinite interpolation, in its multiplicative form; error
of the order of the two axes' errors multiplied):

    T(x, y) = Px T * Py T / (Px Py T)

with Px the linear interpolation in x between lines of constant x, each sampled densely in y; Py the converse. It is
exact for f(x) g(y) and for a + b x + c y + d x y, and positive however noisy the lines are, which a sum is not.
`plan_samples` decides adaptively which values of each axis the lines need, and is a function of what is known
alone: measuring what it wants and asking again ends at the surface, whoever measured what, and when.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smcp_fx.errors import InputError, TableError

Point = tuple[int, ...]
Grids = tuple[tuple[int, ...], ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SamplingConfig:
    """How finely to sample. Errors are relative.

    ``tolerance``: a midpoint that interpolation misses by more splits its interval. ``probes`` held-out
    points a round, ``rounds`` at most: another follows, with more lines, while the probes' median error is
    above ``median_error`` or their largest above ``largest_error``. Misses within ``floor_ms``, or within the
    measurements' own noise, are none; nor are those within ``share`` of the block's largest latency.
    """

    tolerance: float = 0.03
    floor_ms: float = 0.004
    share: float = 0.005
    probes: int = 6
    rounds: int = 2
    median_error: float = 0.03
    largest_error: float = 0.10

    def __post_init__(self) -> None:
        if self.tolerance <= 0 or self.probes < 1 or self.rounds < 1:
            raise InputError(f"{self}: tolerance, probes and rounds must be positive")


@dataclass(frozen=True)
class Axis:
    """One free width: its range, the runtime's step, the sampled values, and the values where lines stand.

    Widths up to a multiple of ``step`` cost what that multiple costs; 1 when there are no such steps. Multiples
    of ``aligned`` and other widths are interpolated among their own kind; 1 when there are no two kinds.
    """

    first: int
    last: int
    step: int
    samples: tuple[int, ...]
    lines: tuple[int, ...]
    aligned: int = 1

    def canonical(self, widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the widths that stand for ``widths``: the ends of their steps (the first for itself)."""
        rounded = np.minimum(-(-widths // self.step) * self.step, self.last)
        return np.where(widths == self.first, widths, rounded)


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
        if len(self.axes) == 1:
            return self._interpolate(at[0])
        return self._blend(*at)

    def _interpolate(self, at: NDArray[np.int64]) -> Floats:
        (axis,) = self.axes
        result = np.zeros(at.shape)
        for kind in (True, False):
            samples = [v for v in axis.samples if _is_aligned(v, axis.aligned) == kind]
            if samples:
                found = np.interp(at, samples, [self._points[(v,)] for v in samples])
                result = np.where(_is_aligned(at, axis.aligned) == kind, found, result)
        return result

    def _blend(self, x: NDArray[np.int64], y: NDArray[np.int64]) -> Floats:
        ax, ay = self.axes
        along_y, along_x, crossings = self._lines
        px = _bilinear(x, y, ax.lines, ay.samples, along_y)
        py = _bilinear(y, x, ay.lines, ax.samples, along_x)
        blended: Floats = px * py / _bilinear(x, y, ax.lines, ay.lines, crossings)
        return blended

    @cached_property
    def _lines(self) -> tuple[Floats, Floats, Floats]:
        """What was measured along the lines of constant x, of constant y, and where they cross."""
        (ax, ay), get = self.axes, self._points
        along_y = np.array([[get[i, j] for j in ay.samples] for i in ax.lines])
        along_x = np.array([[get[i, j] for i in ax.samples] for j in ay.lines])
        crossings = np.array([[get[i, j] for j in ay.lines] for i in ax.lines])
        return along_y, along_x, crossings


@dataclass(frozen=True)
class Plan:
    """What to measure next; or, when ``wanted`` is empty, the surface and the held-out points."""

    wanted: tuple[Point, ...]
    surface: Surface | None = None
    probes: tuple[Point, ...] = ()


class _Wanted(Exception):  # noqa: N818 - control flow, not an error
    def __init__(self, points: tuple[Point, ...]) -> None:
        super().__init__(points)
        self.points = points


class _Known:
    def __init__(self, values: Mapping[Point, float], noise: Mapping[Point, float]) -> None:
        self.values, self._noise = values, noise

    def noise(self, *points: Point) -> float:
        """Return the largest noise among ``points``, ms."""
        return max(self._noise.get(point, 0.0) for point in points)

    def need(self, points: Iterable[Point]) -> None:
        """Go on only when all ``points`` are known."""
        missing = tuple(dict.fromkeys(p for p in points if p not in self.values))
        if missing:
            raise _Wanted(missing)

    def line(self, axis: int, others: Point) -> Callable[[int], float]:
        """Return the latency as a function of one width, the other fixed."""
        return lambda value: self.values[_point(axis, value, others)]


def plan_samples(
    grids: Grids,
    known: Mapping[Point, float],
    config: SamplingConfig | None = None,
    seed: int = 0,
    noise: Mapping[Point, float] | None = None,
) -> Plan:
    """Return what to measure next of a block with these ``grids``, given ``known`` (widths to ms).

    ``noise``: how far a known latency may be off, ms (half its interquartile range).
    """
    config = config or SamplingConfig()
    if len(grids) > 2:
        raise InputError(f"a block with {len(grids)} free widths cannot be sampled; 2 at most")
    for grid in grids:
        if not grid or list(grid) != sorted(set(grid)) or grid[0] < 1:
            raise InputError(f"a width's values must be positive and ascending, and are {grid}")
    try:
        surface, probes = _sample(grids, _Known(known, noise or {}), config, np.random.default_rng(seed))
    except _Wanted as wanted:
        return Plan(wanted.points)
    return Plan((), surface, probes)


def surface_points(axes: Sequence[Axis]) -> tuple[Point, ...]:
    """Return the widths that a `Surface` over ``axes`` needs."""
    if not axes:
        return ((),)
    if len(axes) == 1:
        return tuple((v,) for v in axes[0].samples)
    x, y = axes
    points = [(i, j) for i in x.lines for j in y.samples] + [(i, j) for j in y.lines for i in x.samples]
    return tuple(dict.fromkeys(points))


def _sample(
    grids: Grids, known: _Known, config: SamplingConfig, generator: np.random.Generator
) -> tuple[Surface, tuple[Point, ...]]:
    top = tuple(grid[-1] for grid in grids)
    known.need([top])
    axes = [_sample_axis(grids, axis, known, config) for axis in range(len(grids))]
    for round_ in range(config.rounds):
        known.need(surface_points(axes))
        surface = Surface(axes, known.values)
        probes = _draw_probes(grids, surface, config.probes, generator)
        known.need(probes)
        errors = held_out_errors(surface, probes, known.values)
        for position, probe in enumerate(probes):
            floor = max(config.floor_ms, config.share * known.values[top], 2 * known.noise(probe))
            if errors[position] * known.values[probe] <= floor:
                errors[position] = 0.0
        if len(errors) == 0 or round_ == config.rounds - 1:
            break
        if np.median(errors) <= config.median_error and errors.max() <= config.largest_error:
            break
        worst = probes[int(np.argmax(errors))]
        axes = [_with_line(axis, value) for axis, value in zip(axes, worst, strict=True)]
    return surface, probes


def held_out_errors(surface: Surface, probes: Sequence[Point], known: Mapping[Point, float]) -> Floats:
    """Return |interpolated - measured| / measured at ``probes``."""
    if not probes:
        return np.zeros(0)
    measured = np.array([known[p] for p in probes])
    predicted = surface(*np.array(probes, dtype=np.int64).T)
    errors: Floats = np.abs(predicted - measured) / measured
    return errors


def _sample_axis(grids: Grids, axis: int, known: _Known, config: SamplingConfig) -> Axis:
    """Find the runtime's step along one axis, then the values that linear interpolation needs."""
    grid = grids[axis]
    top = tuple(g[-1] for g in grids)
    spacing = int(np.diff(grid).min()) if len(grid) > 1 else 1
    step = _find_step(grid, axis, top, known)
    raw = Axis(grid[0], grid[-1], step, (), ())
    values = sorted({grid[0], *(int(v) for v in raw.canonical(np.array(grid, dtype=np.int64)))})
    aligned = 1
    if step == 1 and len(grids) == 1 and _alternates(grid, spacing, known):
        aligned = 2 * spacing
        classes = [[v for v in values if v % aligned], [v for v in values if not v % aligned]]
    else:
        classes = [values]
    samples = {v for members in classes for v in _refine(members, axis, top, known, config)}
    lines = {values[0], values[min(1, len(values) - 1)], values[-1]}
    return Axis(
        grid[0], grid[-1], step, tuple(sorted(samples | lines)), tuple(sorted(lines)), aligned=aligned
    )


def _refine(values: Sequence[int], axis: int, top: Point, known: _Known, config: SamplingConfig) -> list[int]:
    """Return those of ``values`` between which the latency is linear, found by halving intervals."""
    chosen = _initial(values)
    known.need(_point(axis, values[i], top) for i in chosen)
    at = known.line(axis, top)
    open_intervals = [(a, b) for a, b in itertools.pairwise(chosen) if b - a > 1]
    while open_intervals:
        middles = [(a + b) // 2 for a, b in open_intervals]
        known.need(_point(axis, values[m], top) for m in middles)
        split: list[tuple[int, int]] = []
        for (a, b), m in zip(open_intervals, middles, strict=True):
            guess = np.interp(values[m], [values[a], values[b]], [at(values[a]), at(values[b])])
            noise = known.noise(*(_point(axis, values[i], top) for i in (a, m, b)))
            floor = max(config.floor_ms, config.share * at(values[-1]), 2 * noise)
            if abs(guess - at(values[m])) > max(config.tolerance * at(values[m]), floor):
                chosen.append(m)
                split += [pair for pair in ((a, m), (m, b)) if pair[1] - pair[0] > 1]
        open_intervals = split
    return [values[i] for i in sorted(chosen)]


def _alternates(grid: Sequence[int], spacing: int, known: _Known) -> bool:
    """Whether widths between two multiples of twice the spacing cost more, or less, than both of them.

    Runtimes have a blocked path for aligned channels and another for the rest (pooling, depthwise).
    """
    wide, present, votes = 2 * spacing, set(grid), 0
    for k in (1, 2, 4):
        low, odd, high = wide * k, wide * k + spacing, wide * (k + 1)
        if present.issuperset((low, odd, high)):
            known.need([(low,), (odd,), (high,)])
            ends = (known.values[(low,)], known.values[(high,)])
            between = known.values[(odd,)]
            votes += between > 1.1 * max(ends) or between < min(ends) / 1.1
    return votes >= 2


def _initial(values: Sequence[int]) -> list[int]:
    """Return the indices of the first samples: each twice the one before, and the last."""
    indices = {0, len(values) - 1}
    index = 1
    while index < len(values) - 1:
        indices.add(index)
        index *= 2
    return sorted(indices)


def _find_step(grid: Sequence[int], axis: int, top: Point, known: _Known) -> int:
    """Return the step that the runtime rounds this width up to, as far as the latency shows one; else 1.

    With steps of q, widths q*k - (q - spacing) and q*k cost the same, while q*(k - 1) costs clearly less. Two
    places that agree decide; one disturbed measurement does not.
    """
    spacing = int(np.diff(grid).min()) if len(grid) > 1 else 1
    present, found = set(grid), 1
    at = known.line(axis, top)
    for factor in (2, 4, 8):
        step = factor * spacing
        votes = [0, 0]
        for k in (2, 3, 4, 5):
            below, low, high = step * (k - 1), step * (k - 1) + spacing, step * k
            if not present.issuperset((below, low, high)):
                continue
            known.need(_point(axis, value, top) for value in (below, low, high))
            rise = at(high) - at(below)
            if rise > 0.08 * at(high):
                votes[int(abs(at(high) - at(low)) <= 0.25 * rise)] += 1
            if max(votes) == 2:
                break
        if votes[1] < 2:
            return found
        found = step
    return found


def _draw_probes(
    grids: Grids, surface: Surface, count: int, generator: np.random.Generator
) -> tuple[Point, ...]:
    """Draw held-out points: grid points whose latency the surface does not hold."""
    held = set(surface.points)
    chosen: dict[Point, None] = {}
    for _ in range(4 * count if grids else 0):
        point = tuple(int(generator.choice(grid)) for grid in grids)
        stands_for = tuple(
            int(axis.canonical(np.array(value))) for axis, value in zip(surface.axes, point, strict=True)
        )
        if stands_for not in held and len(chosen) < count:
            chosen[point] = None
    return tuple(chosen)


def _is_aligned(width: Any, multiple: int) -> Any:
    """Whether widths (an int or an array) are multiples."""
    return width % multiple == 0


def _with_line(axis: Axis, value: int) -> Axis:
    """Return ``axis`` with a line and a sample at ``value``."""
    at = int(axis.canonical(np.array(value)))
    return Axis(
        axis.first,
        axis.last,
        axis.step,
        tuple(sorted({*axis.samples, at})),
        tuple(sorted({*axis.lines, at})),
        aligned=axis.aligned,
    )


def _point(axis: int, value: int, others: Point) -> Point:
    return (*others[:axis], value, *others[axis + 1 :])


def _bilinear(
    x: NDArray[np.int64], y: NDArray[np.int64], xs: Sequence[int], ys: Sequence[int], values: Floats
) -> Floats:
    """Return the values at (x, y), interpolated linearly in both between the nodes ``xs`` and ``ys``."""
    i, u = _locate(x, xs)
    j, v = _locate(y, ys)
    k, m = np.minimum(i + 1, len(xs) - 1), np.minimum(j + 1, len(ys) - 1)
    low = values[i, j] * (1 - v) + values[i, m] * v
    high = values[k, j] * (1 - v) + values[k, m] * v
    result: Floats = low * (1 - u) + high * u
    return result


def _locate(at: NDArray[np.int64], nodes: Sequence[int]) -> tuple[NDArray[np.intp], Floats]:
    """Return the node at or below each value, and the share of the way to the next."""
    array = np.asarray(nodes, dtype=np.float64)
    below = np.clip(np.searchsorted(array, at, side="right") - 1, 0, max(len(array) - 2, 0))
    if len(array) == 1:
        return below, np.zeros(np.shape(at))
    return below, (at - array[below]) / (array[below + 1] - array[below])
