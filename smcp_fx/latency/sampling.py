"""Which rows of a block to measure: a few to begin with, or enough to know the whole range.

Both depend on where rows lie, not on what was measured there. So noise leads to no further rows, and everyone who
fills a table, in whatever order, measures the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from smcp_fx.blocks.sharing import Grids
from smcp_fx.errors import InputError
from smcp_fx.latency.scale import Scale
from smcp_fx.latency.surface import Point, Surface

#: Where a block is measured first, as shares of its full widths; 0 is the smallest width. Found by simulation on
#: recorded tables of five networks (docs: experiments.md).
_BEGINNING = {
    0: ((),),
    1: ((1.0,), (0.5,), (0.25,), (0.0,)),
    2: ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.25), (0.0, 0.25)),
}
#: A first row is left out if other rows predict it to within the first of these, and a whole range is known when no
#: width is less certain than the second (relative standard deviations). Chosen, not measured.
_BEGUN, _KNOWN = 0.06, 0.05
#: How many widths per axis of a whole range are considered, denser where they are narrow. Chosen, not measured.
_LOOKED_AT = 24


def check_grids(grids: Grids) -> None:
    """Raise `InputError` for grids on which no rows can be chosen."""
    if len(grids) > 2:
        raise InputError(f"a block with {len(grids)} free widths cannot be sampled; 2 at most")
    for grid in grids:
        if not grid or list(grid) != sorted(set(grid)) or grid[0] < 1:
            raise InputError(f"a width's values must be positive and ascending, and are {grid}")


def rows_to_begin(grids: Grids, measured: Iterable[Point]) -> list[Point]:
    """Return the rows that every price needs and ``measured`` ones do not predict: the ends, and some between."""
    check_grids(grids)
    shares = [
        tuple(
            min(grid, key=lambda width: abs(width - share * grid[-1]))
            for share, grid in zip(point, grids, strict=True)
        )
        for point in _BEGINNING[len(grids)]
    ]
    top = shares[0]
    others = [
        (*top[:axis], max(width for width in grid if width % 4), *top[axis + 1 :])
        for axis, grid in enumerate(grids)
        if _divided(grid).aligned > 1
    ]
    measured, wanted = list(measured), list[Point]()
    for point in dict.fromkeys((*shares, *others)):
        if point not in measured and (not measured or _doubts(grids, measured, [point])[0] > _BEGUN):
            measured.append(point)
            wanted.append(point)
    return wanted


def rows_of_all(grids: Grids, measured: Iterable[Point]) -> list[Point]:
    """Return the rows after which every width of the range is known; each is the least certain one so far."""
    wanted = rows_to_begin(grids, measured)
    if not grids:
        return wanted
    measured = [*measured, *wanted]
    candidates = list(itertools.product(*map(_thinned, grids)))
    while True:
        doubts = _doubts(grids, measured, candidates)
        if doubts.max() <= _KNOWN:
            return wanted
        measured.append(candidates[int(doubts.argmax())])
        wanted.append(measured[-1])


def _doubts(grids: Grids, measured: Sequence[Point], points: Sequence[Point]) -> np.ndarray:
    surface = Surface(grids, dict.fromkeys(measured, 1.0), [_divided(grid) for grid in grids])
    return surface.doubt(*np.array(points, np.int64).reshape(len(points), len(grids)).T)


def _divided(grid: Sequence[int]) -> Scale:
    """Return a scale on which widths that are not multiples of a vector need a row of their own."""
    return Scale(aligned=4) if any(width % 4 for width in grid) else Scale()


def _thinned(grid: Sequence[int]) -> list[int]:
    if len(grid) <= _LOOKED_AT:
        return list(grid)
    at = np.geomspace(1, len(grid), _LOOKED_AT).astype(int) - 1
    chosen = {grid[i] for i in at} | {width for width in grid[-2:] if width % 4}
    return sorted(chosen)
