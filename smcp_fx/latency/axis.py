"""What a block's latency is like along one of its widths, as far as measured rows tell.

Runtimes round widths up to steps, have kernels of their own for widths that a vector divides and for the ends of a
range, and compute several steps at a time. `find_axis` looks for all of that.

The functions here are *searches*: generators that yield the points they lack and return what they find. Whoever
drives one measures those points and goes on, or starts again later: with the same rows a search takes the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from smcp_fx.blocks.sharing import Grids
from smcp_fx.latency.surface import TOOTH, Axis, Point, is_aligned

T = TypeVar("T")
#: Yields points that must be measured before it can go on; returns what was found.
Search = Generator[tuple[Point, ...], None, T]

#: A step shows where widths cost more by this share from one step to the next, and differ within a step by at most
#: this share of that rise. By ResNet-18's and MobileNetV2's steps of 16 at 64 x 64, which noise had hidden.
_RISE, _WITHIN = 0.08, 0.25
#: A tooth whose shares of the rise are all within the first of linear ones is no saw, and two teeth whose shares
#: differ by more than the second do not agree. By ResNet-18 at 224 x 224, whose sums fell 14 % short without saws.
_STRAIGHT, _ALIKE = 0.08, 0.25
#: A tooth that rises by a smaller share is too low to tell a saw; chosen as `_RISE`.
_LOW_TOOTH = 0.08
#: Between two multiples a width is of another kind where it costs this share more or less than both. The other path
#: costs 3.4 to 36 times as much in ONNX Runtime (pointwise, depthwise), so any figure between would do.
_OTHER_KIND = 0.1
#: The steps and alignments that are looked for where a grid's own spacing does not say which. Vectors of AVX-512 hold
#: 16 numbers, of AVX2 8, of SSE and NEON 4.
_STEPS, _ALIGNMENTS = (4, 8, 16, 32, 64), (4, 8, 16)


class Known:
    """What was measured of a block (ms by its widths), and which differences of that mean something.

    ``noise``: how far a latency may be off, ms. ``tolerance`` (relative) and ``floor_ms``: differences within these
    mean nothing either. ``used``: the points that a search asked for and got.
    """

    def __init__(
        self, values: Mapping[Point, float], noise: Mapping[Point, float], tolerance: float, floor_ms: float
    ) -> None:
        self.values, self.floor_ms = values, floor_ms
        self._noise, self._tolerance = noise, tolerance
        self.used = set[Point]()

    def noise(self, *points: Point) -> float:
        """Return the largest noise among ``points``, ms."""
        return max(self._noise.get(point, 0.0) for point in points)

    def tolerated(self, ms: float, *points: Point) -> float:
        """Return the largest difference (ms) from a latency of ``ms`` that means nothing, for rows at ``points``."""
        return max(self._tolerance * ms, self.floor_ms, 2 * self.noise(*points))

    def need(self, points: Iterable[Point]) -> Search[None]:
        """Yield those of ``points`` that are not known, until all are."""
        asked = tuple(dict.fromkeys(points))
        while missing := tuple(point for point in asked if point not in self.values):
            yield missing
        self.used.update(asked)

    def line(self, axis: int, others: Point) -> Callable[[int], float]:
        """Return the latency as a function of one width, the other fixed."""
        return lambda value: self.values[point_on(axis, value, others)]


def find_axis(grids: Grids, axis: int, known: Known) -> Search[Axis]:
    """Find the runtime's alignment or step along one axis, its saw, and which of its ends stand apart.

    The axis has no samples and no lines yet.
    """
    grid = grids[axis]
    top = tuple(g[-1] for g in grids)
    spacing = _spacing(grid)
    aligned = yield from _find_alignment(grid, axis, top, known)
    step = (yield from _find_step(grid, axis, top, known)) if aligned == 1 else 1
    found = Axis(grid[0], grid[-1], step, (), (), aligned, max(step, spacing), spacing=spacing)
    first_apart = yield from _is_first_apart(found, axis, top, known)
    before_last = yield from _before_last(grid, found, axis, top, known)
    found = replace(found, first_apart=first_apart, before_last=before_last)
    if aligned == 1:
        saw = yield from _find_saw(axis_values(grid, found), axis, top, found.unit, known)
        found = replace(found, saw=saw)
    return found


def axis_values(grid: Sequence[int], axis: Axis) -> list[int]:
    """Return the widths that stand for all of ``grid``."""
    return sorted({int(v) for v in axis.canonical(np.array(grid, dtype=np.int64))})


def point_on(axis: int, value: int, others: Point) -> Point:
    """Return ``others`` with ``value`` for the width of one axis."""
    return (*others[:axis], value, *others[axis + 1 :])


def _is_first_apart(axis: Axis, position: int, top: Point, known: Known) -> Search[bool]:
    """Find out whether the first width costs something else than the end of the step that it is in."""
    end = min(-(-axis.first // axis.step) * axis.step, axis.last)
    if end == axis.first:
        return True
    points = [point_on(position, value, top) for value in (axis.first, end)]
    yield from known.need(points)
    first, of_step = (known.values[point] for point in points)
    return abs(first - of_step) > known.tolerated(of_step, *points)


def _before_last(grid: Sequence[int], axis: Axis, position: int, top: Point, known: Known) -> Search[int]:
    """Find the width before the last where the last costs less; else 0.

    Vectors divide a concatenation's whole inputs, so nothing is converted; of slightly narrower ones everything is. A
    block of two free widths is no concatenation, and two rows more for each convolution are not worth it.
    """
    regular = max(axis.last - axis.last % axis.spacing, axis.first)
    before = max((width for width in grid if width < regular), default=0)
    if len(top) > 1 or axis.aligned > 1 or regular != axis.last or before == 0:
        return 0
    points = [point_on(position, value, top) for value in (before, axis.last)]
    yield from known.need(points)
    narrow, whole = (known.values[point] for point in points)
    return before if narrow - whole > known.tolerated(whole, *points) else 0


def _spacing(grid: Sequence[int]) -> int:
    """Return by how much most values exceed the one before; a layer's full size may be no multiple of it.

    It is 1 where differences vary: sums of groups of odd sizes, as of channels that were shuffled.
    """
    steps, counts = np.unique(np.diff(grid), return_counts=True)
    return int(steps[np.argmax(counts)]) if 4 * counts.max(initial=0) >= 3 * max(len(grid) - 1, 1) else 1


def _find_alignment(grid: Sequence[int], axis: int, top: Point, known: Known) -> Search[int]:
    """Find q where widths between two multiples of q cost more, or less, than both of them; 1 where none do.

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
        else:  # a surface has many rows: the first places also tell a step
            places = _places(grid, aligned)[:3]
        votes = 0
        for count, place in enumerate(places, start=1):
            points = [point_on(axis, value, top) for value in place]
            yield from known.need(points)
            low, between, high = (at(value) for value in place)
            apart = max(between - max(low, high), min(low, high) - between)
            votes += apart > max(_OTHER_KIND * min(max(low, high), between), 2 * known.noise(*points))
            if votes == 2:
                return aligned
            if count - votes == 2:
                break
    return 1


def _find_step(grid: Sequence[int], axis: int, top: Point, known: Known) -> Search[int]:
    """Find the step that the runtime rounds this width up to, as far as the latency shows one; else 1.

    With steps of q, the widths just above q*(k - 1) and q*k cost the same, while q*(k - 1) costs less. What two to
    five places say of that is added up. A step that they speak against ends the search. Where they say nothing about
    the smallest step, because steps are too low to be seen, it is taken: it can be no further off than what is seen.
    """
    spacing, found = _spacing(grid), 1
    candidates = _STEPS if spacing == 1 else (2 * spacing, 4 * spacing, 8 * spacing)
    at = known.line(axis, top)
    for step in candidates:
        height = rise = within = noise = 0.0
        clear, places = False, _places(grid, step)
        for count, place in enumerate(places, start=1):
            points = [point_on(axis, value, top) for value in place]
            yield from known.need(points)
            below, low, high = (at(value) for value in place)
            height, rise, within = height + high, rise + high - below, within + high - low
            noise += max(known.noise(*points), known.floor_ms / 2)
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


def _find_saw(
    grid: Sequence[int], axis: int, top: Point, unit: int, known: Known
) -> Search[tuple[float, ...]]:
    """Find which shares of a tooth's rise its first three units bring: the mean of two teeth that agree.

    Empty where they rise alike, and where no tooth is in the range.
    """
    present = set(grid)
    teeth: list[list[float]] = []
    at = known.line(axis, top)
    for first in range(TOOTH * unit, grid[-1], TOOTH * unit):
        widths = [first + unit * i for i in range(TOOTH + 1)]
        if len(teeth) == 2 or not present.issuperset(widths):
            break
        yield from known.need(point_on(axis, width, top) for width in widths)
        rise = at(widths[-1]) - at(first)
        if rise <= _LOW_TOOTH * at(widths[-1]):
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
