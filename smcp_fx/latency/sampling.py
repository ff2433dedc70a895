"""Where to measure a block's latency, so that its `Surface` holds everywhere.

`plan_samples` decides which values of each axis the lines need: the runtime's steps, the teeth of its saw, then
halved intervals. It is a function of what is known alone: measuring what it wants and asking again ends at the
surface, whoever measured what, and when.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smcp_fx.blocks.sharing import Grids
from smcp_fx.errors import InputError
from smcp_fx.latency.axis import Known, Search, axis_values, find_axis, point_on
from smcp_fx.latency.surface import Axis, Point, Surface, held_out_errors, is_aligned, surface_points


@dataclass(frozen=True)
class SamplingConfig:
    """How finely to sample. Errors are relative.

    ``tolerance``: an interval whose midpoint interpolation misses by more is split; at most the ``cliffs`` worst ones
    at a time. ``probes``: held-out points a round. ``rounds``: at most so many; another follows, with more lines,
    while the probes' median error is above ``median_error`` or their largest above ``largest_error``. Misses within
    ``floor_ms``, within the measurements' own noise, or within ``share`` of the block's largest latency do not count.

    Where the defaults come from is in the docs (Experiments): with a floor of 4 µs 95 % of held-out rows were within
    9.2 %, with 2 µs within 8.0 to 6.5 %; without a limit on cliffs one VGG-16 took 2,160 rows.
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
class SamplingPlan:
    """What to measure next; or, when ``wanted`` is empty, the surface and the held-out points.

    ``used``: all that these rest on, the rows that only told where a step or a saw is among them.
    """

    wanted: tuple[Point, ...]
    surface: Surface | None = None
    probes: tuple[Point, ...] = ()
    used: frozenset[Point] = frozenset()


def plan_samples(
    grids: Grids,
    known: Mapping[Point, float],
    config: SamplingConfig | None = None,
    seed: int = 0,
    noise: Mapping[Point, float] | None = None,
) -> SamplingPlan:
    """Return what to measure next of a block with these ``grids``, given ``known`` (widths to ms).

    ``noise``: how far a known latency may be off, ms (half its interquartile range).
    """
    config = config or SamplingConfig()
    if len(grids) > 2:
        raise InputError(f"a block with {len(grids)} free widths cannot be sampled; 2 at most")
    for grid in grids:
        if not grid or list(grid) != sorted(set(grid)) or grid[0] < 1:
            raise InputError(f"a width's values must be positive and ascending, and are {grid}")
    rows = Known(known, noise or {}, config.tolerance, config.floor_ms)
    search = _sample(grids, rows, config, np.random.default_rng(seed))
    try:
        return SamplingPlan(next(search))
    except StopIteration as end:
        surface, probes = end.value
        return SamplingPlan((), surface, probes, frozenset(rows.used))


def _sample(
    grids: Grids, known: Known, config: SamplingConfig, generator: np.random.Generator
) -> Search[tuple[Surface, tuple[Point, ...]]]:
    top = tuple(grid[-1] for grid in grids)
    yield from known.need([top])
    bare, axes = list[Axis](), list[Axis]()
    for position in range(len(grids)):
        bare.append((yield from find_axis(grids, position, known)))
    for position in range(len(grids)):
        axes.append((yield from _sample_axis(grids, position, bare, known, config)))
    for round_ in range(config.rounds):
        yield from known.need(surface_points(axes))
        surface = Surface(axes, known.values)
        probes = _draw_probes(grids, surface, config.probes, generator)
        yield from known.need(probes)
        errors = held_out_errors(surface, probes, known.values)
        for position, probe in enumerate(probes):
            floor = max(known.tolerated(0.0, probe), config.share * known.values[top])
            if errors[position] * known.values[probe] <= floor:
                errors[position] = 0.0
        if len(errors) == 0 or round_ == config.rounds - 1:
            break
        if np.median(errors) <= config.median_error and errors.max() <= config.largest_error:
            break
        worst = probes[int(np.argmax(errors))]
        axes = [_with_line(axis, value) for axis, value in zip(axes, worst, strict=True)]
    return surface, probes


def _sample_axis(
    grids: Grids, position: int, bare: Sequence[Axis], known: Known, config: SamplingConfig
) -> Search[Axis]:
    """Find the values along one axis that linear interpolation needs."""
    raw = bare[position]
    # Where the other axis has two kinds of widths, cliffs of this one may show beside only one of them.
    tops = [
        top
        for top in itertools.product(*map(_largest_of_kinds, grids, bare))
        if top[position] == grids[position][-1]
    ]
    values = axis_values(grids[position], raw)
    samples, lines = set[int](), set[int]()
    for kind in (True, False):
        members = [value for value in values if is_aligned(value, raw.aligned) == kind]
        if members:
            # The first two may differ in more than their size: the smallest, or one that is not aligned, can have a
            # kernel of its own. Where the first is inside a step, the runtime pads it.
            second = members[min(1, len(members) - 1)] if raw.first_apart else members[0]
            smooth = members[:-1] if raw.before_last else members
            ends = {members[0], second, smooth[-1], members[-1]}
            for top in tops:
                samples |= set((yield from _refine(smooth, raw, position, top, known, config)))
            samples |= ends
            lines |= ends
    return replace(raw, samples=tuple(sorted(samples)), lines=tuple(sorted(lines)))


def _largest_of_kinds(grid: Sequence[int], axis: Axis) -> list[int]:
    """Return the last width, and the last of the other kind where there are two."""
    others = [v for v in grid if is_aligned(v, axis.aligned) != is_aligned(grid[-1], axis.aligned)]
    return [grid[-1], *others[-1:]]


def _refine(
    values: Sequence[int], raw: Axis, axis: int, top: Point, known: Known, config: SamplingConfig
) -> Search[list[int]]:
    """Find those of ``values`` between which the latency is linear, by halving intervals.

    A cliff is in one half of an interval; noise is in both halves, however small they are, and would be followed to
    every value. So at most ``config.cliffs`` intervals are halved at a time.
    """
    chosen = _initial(values)
    place = raw.coordinate(values)
    yield from known.need(point_on(axis, values[i], top) for i in chosen)
    at = known.line(axis, top)
    open_intervals = [(a, b) for a, b in itertools.pairwise(chosen) if b - a > 1]
    while open_intervals:
        middles = [(a + b) // 2 for a, b in open_intervals]
        yield from known.need(point_on(axis, values[m], top) for m in middles)
        missed: list[tuple[float, int, int, int]] = []
        for (a, b), m in zip(open_intervals, middles, strict=True):
            guess = np.interp(place[m], place[[a, b]], [at(values[a]), at(values[b])])
            points = (point_on(axis, values[i], top) for i in (a, m, b))
            limit = max(known.tolerated(at(values[m]), *points), config.share * at(values[-1]))
            miss = abs(guess - at(values[m])) / limit
            if miss > 1:
                missed.append((miss, a, m, b))
        worst = sorted(missed, reverse=True)[: config.cliffs]
        chosen += [m for _, _, m, _ in worst]
        halves = (half for _, a, m, b in worst for half in ((a, m), (m, b)))
        open_intervals = sorted((a, b) for a, b in halves if b - a > 1)
    return [values[i] for i in sorted(chosen)]


def _initial(values: Sequence[int]) -> list[int]:
    """Return the indices of the first samples: each twice the one before, and the last."""
    indices = {0, len(values) - 1}
    index = 1
    while index < len(values) - 1:
        indices.add(index)
        index *= 2
    return sorted(indices)


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
