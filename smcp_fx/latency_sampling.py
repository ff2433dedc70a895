"""Where to measure a block's latency, so that its `Surface` holds everywhere.

`plan_samples` decides adaptively which values of each axis the lines need (the runtime's steps, the teeth of its saw,
then halved intervals), and is a function of what is known alone: measuring what it wants and asking again ends at the
surface, whoever measured what, and when.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smcp_fx.errors import InputError
from smcp_fx.latency_surface import (
    TOOTH,
    Axis,
    Point,
    Surface,
    held_out_errors,
    is_aligned,
    surface_points,
)

Grids = tuple[tuple[int, ...], ...]
#: A step is clear where widths rise by more than this share from one to the next, and within one by no more than that
#: share of it.
_RISE, _WITHIN = 0.08, 0.25
#: A saw whose shares are all nearer than this to linear ones is none, nor is one of which two teeth differ by more.
_STRAIGHT, _ALIKE = 0.08, 0.25
#: Where a grid's own spacing does not say which: the steps, and the alignments, that are looked for.
_STEPS, _ALIGNMENTS = (4, 8, 16, 32, 64), (4, 8, 16)


@dataclass(frozen=True)
class SamplingConfig:
    """How finely to sample. Errors are relative.

    ``tolerance``: a midpoint that interpolation misses by more splits its interval; at a time the ``cliffs``
    intervals that are missed worst. ``probes`` held-out points a round, ``rounds`` at most: another follows, with
    more lines, while the probes' median error is above ``median_error`` or their largest above ``largest_error``.
    Misses within ``floor_ms``, or within the measurements' own noise, are none; nor are those within ``share`` of
    the block's largest latency.
    """

    tolerance: float = 0.03
    floor_ms: float = 0.002
    share: float = 0.005
    cliffs: int = 4
    probes: int = 6
    rounds: int = 3
    median_error: float = 0.03
    largest_error: float = 0.10

    def __post_init__(self) -> None:
        if self.tolerance <= 0 or min(self.cliffs, self.probes, self.rounds) < 1:
            raise InputError(f"{self}: tolerance, cliffs, probes and rounds must be positive")


@dataclass(frozen=True)
class Plan:
    """What to measure next; or, when ``wanted`` is empty, the surface and the held-out points.

    ``used``: all that these rest on, the rows that only told where a step or a saw is among them.
    """

    wanted: tuple[Point, ...]
    surface: Surface | None = None
    probes: tuple[Point, ...] = ()
    used: frozenset[Point] = frozenset()


class _Wanted(Exception):  # noqa: N818 - control flow, not an error
    def __init__(self, points: tuple[Point, ...]) -> None:
        super().__init__(points)
        self.points = points


class _Known:
    def __init__(self, values: Mapping[Point, float], noise: Mapping[Point, float]) -> None:
        self.values, self._noise = values, noise
        self.used = set[Point]()

    def noise(self, *points: Point) -> float:
        """Return the largest noise among ``points``, ms."""
        return max(self._noise.get(point, 0.0) for point in points)

    def need(self, points: Iterable[Point]) -> None:
        """Go on only when all ``points`` are known."""
        asked = tuple(dict.fromkeys(points))
        missing = tuple(point for point in asked if point not in self.values)
        if missing:
            raise _Wanted(missing)
        self.used.update(asked)

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
    rows = _Known(known, noise or {})
    try:
        surface, probes = _sample(grids, rows, config, np.random.default_rng(seed))
    except _Wanted as wanted:
        return Plan(wanted.points)
    return Plan((), surface, probes, frozenset(rows.used))


def _sample(
    grids: Grids, known: _Known, config: SamplingConfig, generator: np.random.Generator
) -> tuple[Surface, tuple[Point, ...]]:
    top = tuple(grid[-1] for grid in grids)
    known.need([top])
    shapes = [_shape(grids, axis, known, config) for axis in range(len(grids))]
    axes = [_sample_axis(grids, axis, shapes, known, config) for axis in range(len(grids))]
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


def _shape(grids: Grids, axis: int, known: _Known, config: SamplingConfig) -> Axis:
    """Find the runtime's alignment or step along one axis, its saw, and which of its ends stand apart."""
    grid = grids[axis]
    top = tuple(g[-1] for g in grids)
    spacing = _spacing(grid)
    aligned = _find_alignment(grid, axis, top, known)
    step = _find_step(grid, axis, top, known, config) if aligned == 1 else 1
    found = Axis(grid[0], grid[-1], step, (), (), aligned, max(step, spacing), spacing=spacing)
    found = replace(
        found,
        first_apart=_is_first_apart(found, axis, top, known, config),
        before_last=_before_last(grid, found, axis, top, known, config),
    )
    if aligned == 1:
        found = replace(found, saw=_find_saw(_values(grid, found), axis, top, found.unit, known))
    return found


def _values(grid: Sequence[int], axis: Axis) -> list[int]:
    """Return the widths that stand for all of ``grid``."""
    return sorted({int(v) for v in axis.canonical(np.array(grid, dtype=np.int64))})


def _sample_axis(
    grids: Grids, position: int, shapes: Sequence[Axis], known: _Known, config: SamplingConfig
) -> Axis:
    """Find the values along one axis that linear interpolation needs."""
    raw = shapes[position]
    # Where the other axis has two kinds of widths, cliffs of this one may show beside one of them alone.
    tops = [
        top
        for top in itertools.product(*map(_largest_of_kinds, grids, shapes))
        if top[position] == grids[position][-1]
    ]
    values = _values(grids[position], raw)
    samples, lines = set[int](), set[int]()
    for kind in (True, False):
        members = [value for value in values if is_aligned(value, raw.aligned) == kind]
        if members:
            # The first two differ in more than their size: a kernel of its own runs the smallest, or one that is not
            # aligned. Where a step holds the first, the runtime pads it.
            second = members[min(1, len(members) - 1)] if raw.first_apart else members[0]
            smooth = members[:-1] if raw.before_last else members
            ends = {members[0], second, smooth[-1], members[-1]}
            refined = (_refine(smooth, raw, position, top, known, config) for top in tops)
            samples |= ends.union(*refined)
            lines |= ends
    return replace(raw, samples=tuple(sorted(samples)), lines=tuple(sorted(lines)))


def _largest_of_kinds(grid: Sequence[int], axis: Axis) -> list[int]:
    """Return the last width, and the last of the other kind where there are two."""
    others = [v for v in grid if is_aligned(v, axis.aligned) != is_aligned(grid[-1], axis.aligned)]
    return [grid[-1], *others[-1:]]


def _is_first_apart(axis: Axis, position: int, top: Point, known: _Known, config: SamplingConfig) -> bool:
    """Whether the first width costs otherwise than the end of the step that it is in."""
    end = min(-(-axis.first // axis.step) * axis.step, axis.last)
    if end == axis.first:
        return True
    points = [_point(position, value, top) for value in (axis.first, end)]
    known.need(points)
    first, of_step = (known.values[point] for point in points)
    return abs(first - of_step) > max(config.tolerance * of_step, config.floor_ms, 2 * known.noise(*points))


def _before_last(
    grid: Sequence[int], axis: Axis, position: int, top: Point, known: _Known, config: SamplingConfig
) -> int:
    """Return the width before the last where the last costs less; else 0, as where there are two axes.

    Of a concatenation's whole inputs vectors divide all, and nothing is converted; of a little narrower ones all is.
    """
    regular = max(axis.last - axis.last % axis.spacing, axis.first)
    before = max((width for width in grid if width < regular), default=0)
    if len(top) > 1 or axis.aligned > 1 or regular != axis.last or before == 0:
        return 0
    points = [_point(position, value, top) for value in (before, axis.last)]
    known.need(points)
    narrow, whole = (known.values[point] for point in points)
    apart = narrow - whole > max(config.tolerance * whole, config.floor_ms, 2 * known.noise(*points))
    return before if apart else 0


def _spacing(grid: Sequence[int]) -> int:
    """Return by how much most values exceed the one before, as a layer's full size may be no multiple of it.

    1 where differences vary: sums of groups of odd sizes, as of channels that were shuffled.
    """
    steps, counts = np.unique(np.diff(grid), return_counts=True)
    return int(steps[np.argmax(counts)]) if 4 * counts.max(initial=0) >= 3 * max(len(grid) - 1, 1) else 1


def _refine(
    values: Sequence[int], raw: Axis, axis: int, top: Point, known: _Known, config: SamplingConfig
) -> list[int]:
    """Return those of ``values`` between which the latency is linear, found by halving intervals.

    A cliff is in one half of an interval, noise in both halves however small they are: it would be followed to every
    value. So at most ``config.cliffs`` intervals are halved at a time.
    """
    chosen = _initial(values)
    place = raw.coordinate(values)
    known.need(_point(axis, values[i], top) for i in chosen)
    at = known.line(axis, top)
    open_intervals = [(a, b) for a, b in itertools.pairwise(chosen) if b - a > 1]
    while open_intervals:
        middles = [(a + b) // 2 for a, b in open_intervals]
        known.need(_point(axis, values[m], top) for m in middles)
        missed: list[tuple[float, int, int, int]] = []
        for (a, b), m in zip(open_intervals, middles, strict=True):
            guess = np.interp(place[m], place[[a, b]], [at(values[a]), at(values[b])])
            noise = known.noise(*(_point(axis, values[i], top) for i in (a, m, b)))
            floor = max(config.floor_ms, config.share * at(values[-1]), 2 * noise)
            miss = abs(guess - at(values[m])) / max(config.tolerance * at(values[m]), floor)
            if miss > 1:
                missed.append((miss, a, m, b))
        worst = sorted(missed, reverse=True)[: config.cliffs]
        chosen += [m for _, _, m, _ in worst]
        halves = (half for _, a, m, b in worst for half in ((a, m), (m, b)))
        open_intervals = sorted((a, b) for a, b in halves if b - a > 1)
    return [values[i] for i in sorted(chosen)]


def _find_alignment(grid: Sequence[int], axis: int, top: Point, known: _Known) -> int:
    """Return q where widths between two multiples of q cost more, or less, than both of them; 1 where none do.

    Runtimes have a blocked path for aligned channels and another for the rest (pooling, depthwise). Two places of
    three must say so.
    """
    spacing, at = _spacing(grid), known.line(axis, top)
    for aligned in _ALIGNMENTS if spacing == 1 else (2 * spacing,):
        if spacing == 1 or len(top) == 1:
            multiples = [i for i, value in enumerate(grid) if is_aligned(value, aligned)]
            gaps = [(a, b) for a, b in itertools.pairwise(multiples) if b - a > 1]
            spread = sorted({len(gaps) // 4, len(gaps) // 2, len(gaps) - 1}) if gaps else []
            places = [(grid[a], grid[(a + b) // 2], grid[b]) for a, b in (gaps[i] for i in spread)]
        else:  # a surface has many rows: the first are those that tell a step, too
            places = _places(grid, aligned)[:3]
        votes = 0
        for count, place in enumerate(places, start=1):
            points = [_point(axis, value, top) for value in place]
            known.need(points)
            low, between, high = (at(value) for value in place)
            apart = max(between - max(low, high), min(low, high) - between)
            votes += apart > max(0.1 * min(max(low, high), between), 2 * known.noise(*points))
            if votes == 2:
                return aligned
            if count - votes == 2:
                break
    return 1


def _initial(values: Sequence[int]) -> list[int]:
    """Return the indices of the first samples: each twice the one before, and the last."""
    indices = {0, len(values) - 1}
    index = 1
    while index < len(values) - 1:
        indices.add(index)
        index *= 2
    return sorted(indices)


def _find_step(grid: Sequence[int], axis: int, top: Point, known: _Known, config: SamplingConfig) -> int:
    """Return the step that the runtime rounds this width up to, as far as the latency shows one; else 1.

    With steps of q, the widths just above q*(k - 1) and q*k cost the same, while q*(k - 1) costs less. What two to
    five places say of that is added up. A step that they speak against ends the search; where they say nothing of the
    smallest, as steps are too low to be seen, that one is taken: it can be no further off than what is seen.
    """
    spacing, found = _spacing(grid), 1
    candidates = _STEPS if spacing == 1 else (2 * spacing, 4 * spacing, 8 * spacing)
    at = known.line(axis, top)
    for step in candidates:
        height = rise = within = noise = 0.0
        clear, places = False, _places(grid, step)
        for count, place in enumerate(places, start=1):
            points = [_point(axis, value, top) for value in place]
            known.need(points)
            below, low, high = (at(value) for value in place)
            height, rise, within = height + high, rise + high - below, within + high - low
            noise += max(known.noise(*points), config.floor_ms / 2)
            clear = count > 1 and rise > max(_RISE * height, 4 * noise)
            if clear and not _WITHIN < abs(within) / rise <= 2 * _WITHIN:
                break
        if clear and abs(within) > _WITHIN * rise:
            return found
        if clear or (places and step == candidates[0] and abs(within) <= noise):
            found = step
    return found


def _places(grid: Sequence[int], step: int) -> list[tuple[int, int, int]]:
    """Return where a step shows: its multiple, the width above that, and the next multiple, where these are three."""
    index = {value: i for i, value in enumerate(grid)}
    ends = [(step * (k - 1), step * k) for k in range(2, 7)]
    found = [(a, grid[index[a] + 1], b) for a, b in ends if a in index and b in index]
    return [place for place in found if place[1] < place[2]]


def _find_saw(grid: Sequence[int], axis: int, top: Point, unit: int, known: _Known) -> tuple[float, ...]:
    """Return the shares of a tooth's rise that its first three units bring, the mean of two teeth that agree.

    Empty where they rise alike, and where no tooth is in the range.
    """
    present = set(grid)
    teeth: list[list[float]] = []
    at = known.line(axis, top)
    for first in range(TOOTH * unit, grid[-1], TOOTH * unit):
        widths = [first + unit * i for i in range(TOOTH + 1)]
        if len(teeth) == 2 or not present.issuperset(widths):
            break
        known.need(_point(axis, width, top) for width in widths)
        rise = at(widths[-1]) - at(first)
        if rise <= 0.08 * at(widths[-1]):
            return ()
        teeth.append([(at(width) - at(first)) / rise for width in widths[1:-1]])
        if np.abs(np.mean(teeth, axis=0) - np.arange(1, TOOTH) / TOOTH).max() <= _STRAIGHT:
            return ()
    if not teeth or np.ptp(teeth, axis=0).max() > _ALIKE:
        return ()
    saw = np.mean(teeth, axis=0)
    least = 0.02 * np.arange(1, TOOTH)  # the scale must rise
    rising = np.minimum(np.maximum.accumulate(np.maximum(saw - least, 0.0)) + least, 1.0 - least[::-1])
    return tuple(float(share) for share in rising)


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


def _with_line(axis: Axis, value: int) -> Axis:
    """Return ``axis`` with a line and a sample at ``value``."""
    at = int(axis.canonical(np.array(value)))
    return replace(axis, samples=tuple(sorted({*axis.samples, at})), lines=tuple(sorted({*axis.lines, at})))


def _point(axis: int, value: int, others: Point) -> Point:
    return (*others[:axis], value, *others[axis + 1 :])
