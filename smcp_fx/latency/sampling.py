"""Which rows of a block to measure: a few to begin with, or as many as tell the whole range.

Both follow from where rows lie, not from what they say: noise asks for no more of them, and whoever fills a table,
in whatever order, asks for the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from smcp_fx.blocks.sharing import Grids
from smcp_fx.errors import InputError
from smcp_fx.latency.scale import Scale
from smcp_fx.latency.surface import Point, Surface

#: Where a block is measured to begin with, as shares of its full widths; 0 is the least. By simulation on recorded
#: tables of five networks (docs: Experiments).
_BEGINNING = {
    0: ((),),
    1: ((1.0,), (0.5,), (0.25,), (0.0,)),
    2: ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.25), (0.0, 0.25)),
}
#: A row to begin with is left out where others tell it as surely as this, and a whole range is known where nothing is
#: less sure (standard deviations, relative). Chosen: three rows of a doubled width, and about what a row is sure to.
_BEGUN, _KNOWN = 0.06, 0.05
#: Of a whole range so many widths an axis are looked at, denser where they are narrow.
_LOOKED_AT = 24


def check_grids(grids: Grids) -> None:
    """Refuse grids that no rows can be chosen on."""
    if len(grids) > 2:
        raise InputError(f"a block with {len(grids)} free widths cannot be sampled; 2 at most")
    for grid in grids:
        if not grid or list(grid) != sorted(set(grid)) or grid[0] < 1:
            raise InputError(f"a width's values must be positive and ascending, and are {grid}")


def rows_to_begin(grids: Grids, known: Iterable[Point]) -> list[Point]:
    """Return the rows that any price needs and ``known`` ones do not tell: the ends, and some between."""
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
    known, wanted = list(known), list[Point]()
    for point in dict.fromkeys((*shares, *others)):
        if point not in known and (not known or _doubts(grids, known, [point])[0] > _BEGUN):
            known.append(point)
            wanted.append(point)
    return wanted


def rows_of_all(grids: Grids, known: Iterable[Point]) -> list[Point]:
    """Return the rows that leave no width of the whole range in doubt: always the most doubtful next."""
    wanted = rows_to_begin(grids, known)
    if not grids:
        return wanted
    known = [*known, *wanted]
    candidates = list(itertools.product(*map(_thinned, grids)))
    while True:
        doubts = _doubts(grids, known, candidates)
        if doubts.max() <= _KNOWN:
            return wanted
        known.append(candidates[int(doubts.argmax())])
        wanted.append(known[-1])


def _doubts(grids: Grids, known: Sequence[Point], points: Sequence[Point]) -> np.ndarray:
    surface = Surface(grids, dict.fromkeys(known, 1.0), [_divided(grid) for grid in grids])
    return surface.doubt(*np.array(points, np.int64).reshape(len(points), len(grids)).T)


def _divided(grid: Sequence[int]) -> Scale:
    """Widths that no vector divides may take another path; of others that is seen soon enough."""
    return Scale(aligned=4) if any(width % 4 for width in grid) else Scale()


def _thinned(grid: Sequence[int]) -> list[int]:
    if len(grid) <= _LOOKED_AT:
        return list(grid)
    at = np.geomspace(1, len(grid), _LOOKED_AT).astype(int) - 1
    chosen = {grid[i] for i in at} | {width for width in grid[-2:] if width % 4}
    return sorted(chosen)
