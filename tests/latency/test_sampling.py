"""Which rows of a block are asked for: few to begin with, and whole ranges."""

from __future__ import annotations

import itertools

import pytest
from fake_latencies import grid

from smcp_fx.errors import InputError
from smcp_fx.latency.sampling import rows_of_all, rows_to_begin
from smcp_fx.latency.surface import Surface

SQUARE = (grid(256), grid(256))


def test_few_rows_begin_with_the_full_widths_and_the_least() -> None:
    rows = rows_to_begin(SQUARE, ())
    assert rows[0] == (256, 256)
    assert len(rows) <= 6
    assert min(x for x, _ in rows) == 8
    assert rows_to_begin((grid(512),), ())[0] == (512,)
    assert len(rows_to_begin((grid(512),), ())) <= 4
    assert rows_to_begin((), ()) == [()]
    assert rows_to_begin(((64,),), ()) == [(64,)]


def test_rows_that_others_tell_are_not_asked_for() -> None:
    begun = rows_to_begin(SQUARE, ())
    assert rows_to_begin(SQUARE, begun) == []
    line = [(256, y) for y in grid(256)] + [(x, y) for x in grid(256) for y in (8, 64, 128, 256)]
    assert rows_to_begin(SQUARE, line) == []  # a table that was measured along lines begins with what it has
    assert set(rows_to_begin(SQUARE, begun[:-1])) == {begun[-1]}


def test_a_width_of_each_kind_is_among_those_to_begin_with() -> None:
    odd = ((*grid(56), 58), grid(64))
    assert any(x % 4 for x, _ in rows_to_begin(odd, ()))
    assert any(x % 4 == 0 for x, _ in rows_to_begin(odd, ()))


@pytest.mark.parametrize("grids", [(grid(512),), SQUARE, (grid(64), grid(512)), ((*grid(56), 58), grid(64))])
def test_a_whole_range_leaves_nothing_in_doubt_and_is_complete_then(grids) -> None:
    rows = rows_of_all(grids, ())
    assert set(rows_to_begin(grids, ())) <= set(rows)
    assert rows_of_all(grids, rows) == []
    assert len(set(rows)) == len(rows) < 0.1 * len(list(itertools.product(*grids))) + 12
    doubt = Surface(grids, dict.fromkeys(rows, 1.0)).doubt
    few = Surface(grids, dict.fromkeys(rows_to_begin(grids, ()), 1.0)).doubt
    at = [(grid[len(grid) // 3],) for grid in grids]
    assert float(doubt(*(a[0] for a in at))) <= 0.06 <= float(few(*(a[0] for a in at))) + 0.03


def test_a_whole_range_goes_on_from_what_is_there() -> None:
    rows = rows_of_all(SQUARE, ())
    rest = rows_of_all(SQUARE, rows[:10])
    assert not set(rest) & set(rows[:10])
    assert rows[:10] + rest == rows  # in the same order, whoever measured the first ones


def test_bad_grids_are_named() -> None:
    with pytest.raises(InputError, match="3 free widths"):
        rows_to_begin((grid(16),) * 3, ())
    with pytest.raises(InputError, match="ascending"):
        rows_of_all(((16, 8),), ())
