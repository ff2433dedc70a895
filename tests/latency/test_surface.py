"""A block's latency between measured widths, and how sure it is."""

from __future__ import annotations

import numpy as np
import pytest
from fake_latencies import FakeBlock, cliffs, conv, dense, grid, over, truth, whole

from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.sampling import rows_to_begin
from smcp_fx.latency.scale import Scale
from smcp_fx.latency.surface import Surface

SQUARE = (grid(256), grid(256))
STEPS = (Scale(16, apart=True), Scale(16))


def begun(grids, latency) -> dict[tuple[int, ...], float]:
    return {point: latency(*point) for point in rows_to_begin(grids, ())}


@pytest.mark.parametrize("scales", [(), STEPS])
def test_measured_widths_cost_what_was_measured(scales) -> None:
    rng = np.random.default_rng(0)
    rows = {point: ms * rng.lognormal(0, 0.3) for point, ms in whole(SQUARE, cliffs).items()}
    surface = Surface(SQUARE, rows, scales)
    x, y = np.array(list(rows)).T
    assert surface(x, y).tolist() == list(rows.values())
    assert [float(surface(*map(np.array, point))) for point in rows] == list(rows.values())
    assert surface.doubt(x, y).tolist() == [0.0] * len(rows)
    everywhere = over(surface)
    assert everywhere[31, 31] == rows[256, 256]
    for i, j in ((0, 0), (5, 20), (31, 3)):  # one at a time as all at once
        assert float(surface(np.array(8 * i + 8), np.array(8 * j + 8))) == pytest.approx(
            everywhere[i, j], rel=1e-12
        )


def test_a_bilinear_latency_is_nearly_exact_from_few_rows() -> None:
    def latency(x, y):
        return 0.1 + 0.01 * x + 0.02 * y + 1e-3 * x * y

    surface = Surface(SQUARE, begun(SQUARE, latency))
    x, y = np.ix_(*map(np.array, SQUARE))
    errors = np.abs(over(surface) / latency(x, y) - 1)
    assert np.percentile(errors, 95) < 0.08
    assert np.median(errors) < 0.03


def test_more_rows_make_prices_nearer_and_surer() -> None:
    block = conv()
    few, more = (Surface(block.grids, rows(block.grids, cliffs), STEPS) for rows in (begun, whole))
    at = np.ix_(*map(np.array, block.grids))
    assert few.doubt(*at).mean() > 1.5 * more.doubt(*at).mean()
    off = [np.abs(dense(surface, block) / truth(block) - 1).mean() for surface in (few, more)]
    assert off[1] < 0.6 * off[0]
    assert off[1] < 0.03


def test_prices_beside_rows_are_near_theirs() -> None:
    """Also where the two widths make a block slower together, and neither does by itself."""

    def latency(x, y):
        return (0.1 + 1e-3 * x * y) * np.exp(0.1 * np.sin(2 * np.log(x)) * np.sin(2 * np.log(y)))

    rows = whole(SQUARE, latency)
    x, y = np.maximum(np.array(list(rows)) - 1, 8).T
    assert np.abs(Surface(SQUARE, rows)(x, y) / latency(x, y) - 1).max() < 0.02


def test_doubt_is_as_large_as_errors_are() -> None:
    """Along the grids of random smooth latencies, from few rows."""
    rng, ratios = np.random.default_rng(1), []
    for _ in range(30):
        a, b, c, d = rng.uniform(0.01, 1, 4)
        wave = rng.uniform(1, 3, 2)

        def latency(x, y, a=a, b=b, c=c, d=d, wave=wave):
            smooth = 0.1 * np.sin(wave[0] * np.log(x)) + 0.1 * np.sin(wave[1] * np.log(y))
            return (a + b * x / 64 + c * y / 64 + 4 * d * x * y / 4096) * np.exp(smooth)

        surface = Surface(SQUARE, begun(SQUARE, latency))
        x, y = np.ix_(*map(np.array, SQUARE))
        doubt = surface.doubt(x, y)
        left = np.abs(np.log(over(surface) / latency(x, y)))[doubt > 0] / doubt[doubt > 0]
        ratios.append(np.sqrt((left**2).mean()))
    assert 0.3 < np.median(ratios) < 2.0


def test_prices_of_a_rising_latency_rise() -> None:
    """From few rows and whole ranges, with a percent of noise: nowhere down by more than that noise explains."""
    rng = np.random.default_rng(2)
    for rows_of in (begun, whole):
        rows = {
            p: ms * rng.lognormal(0, 0.01)
            for p, ms in rows_of(SQUARE, lambda x, y: 0.05 + 1e-4 * x * y).items()
        }
        smooth = over(Surface(SQUARE, rows))
        # sixteen channels further, as rows themselves stand where they were measured
        assert (smooth[2:] > 0.97 * smooth[:-2]).all() and (smooth[:, 2:] > 0.97 * smooth[:, :-2]).all()


def test_a_row_that_the_others_do_not_expect_is_found() -> None:
    rows = whole(SQUARE, lambda x, y: 0.1 + 1e-4 * x * y)
    assert Surface(SQUARE, rows).surprises() == []
    middle = sorted(rows)[len(rows) // 2]
    for factor in (0.001, 0.5, 1.6):
        assert middle in Surface(SQUARE, rows | {middle: factor * rows[middle]}).surprises()


def test_what_the_others_say_of_a_row_is_what_they_say_without_it() -> None:
    rows = whole(SQUARE, lambda x, y: 0.1 + 1e-4 * x * y)
    told = Surface(SQUARE, rows).left_out()
    for point in sorted(rows)[3:-1:4]:
        others = {p: ms for p, ms in rows.items() if p != point}
        assert told[point] == pytest.approx(float(Surface(SQUARE, others)(*map(np.array, point))), rel=0.02)
    assert Surface((), {(): 3.0}).left_out() == {}


def test_a_surface_of_noise_stays_positive() -> None:
    noise = np.random.default_rng(0)
    for _ in range(20):
        rows = whole(SQUARE, lambda x, y: x * y * float(noise.choice([0.3, 1.0])))
        assert over(Surface(SQUARE, rows)).min() > 0


def test_one_width_and_none() -> None:
    surface = Surface((grid(512),), whole((grid(512),), lambda c: 0.2 + 0.01 * steps_of(c)), (Scale(16),))
    c = np.array(grid(512))
    assert np.allclose(surface(c), [0.2 + 0.01 * steps_of(i) for i in c], rtol=0.03)
    alone = Surface((), {(): 3.0})
    assert (float(alone()), float(alone.doubt())) == (3.0, 0.0)
    single = Surface((grid(64),), {(64,): 2.0})
    assert float(single(np.array(64))) == 2.0 and 0 < float(single(np.array(8))) < 2.0
    assert float(single.doubt(np.array(8))) > 0.1


def steps_of(c: int) -> int:
    return -(-c // 16) * 16


@pytest.mark.parametrize("widths", [(4, 64), (64, 264)])
def test_outside_of_the_grid_is_refused(widths) -> None:
    surface = Surface(SQUARE, {(256, 256): 1.0})
    for ask in (surface, surface.doubt):
        with pytest.raises(TableError, match=r"8 to 256 were measured"):
            ask(*(np.array(w) for w in widths))
    with pytest.raises(InputError, match="1 widths were given"):
        surface(np.array(8))


def test_surface_takes_arrays_that_broadcast() -> None:
    surface = Surface(SQUARE, whole(SQUARE, cliffs))
    assert surface(np.array([8, 16, 24])[:, None], np.array([[8, 256]])).shape == (3, 2)
    assert surface.doubt(np.array([8, 16, 24])[:, None], np.array([[8, 256]])).shape == (3, 2)
    assert surface(np.array([8, 16, 24]), np.array([8, 64, 128])).shape == (3,)
    assert surface(np.array(64), np.array(64)).shape == ()


def test_widths_between_those_of_the_grid_have_a_price() -> None:
    """Masks that are set by hand keep any number."""
    block = FakeBlock("b", "{}", (grid(64),))
    surface = Surface(block.grids, whole(block.grids, lambda c: 0.1 + 0.01 * c))
    assert float(surface(np.array(43))) == pytest.approx(0.1 + 0.43, rel=0.05)
