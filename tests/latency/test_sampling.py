"""Where a block is measured, and how well its surface holds between those widths."""

from __future__ import annotations

import numpy as np
import pytest
from fake_latencies import FakeBlock, cliffs, conv, dense, grid, sample, steps, truth

from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.sampling import SamplingConfig, plan_samples
from smcp_fx.latency.surface import Surface, held_out_errors


def test_without_steps_a_bilinear_latency_is_exact():
    plan, known = sample((grid(512), grid(256)), lambda x, y: 0.1 + 0.01 * x + 0.02 * y + 1e-4 * x * y)
    x, y = np.arange(8, 513)[:, None], np.arange(8, 257)[None, :]
    assert np.allclose(plan.surface(x, y), 0.1 + 0.01 * x + 0.02 * y + 1e-4 * x * y, rtol=1e-9)
    assert [axis.step for axis in plan.surface.axes] == [1, 1]
    assert len(known) < 100


def test_what_is_linear_in_one_width_may_be_anything_in_the_other():
    """The blended interpolation is exact for f(y) + x g(y) once every cliff of y is sampled."""

    def latency(x: int, y: int) -> float:
        return 1.0 + (y // 24) ** 1.5 + x * 0.01 * (1 + (y % 40 == 0))

    block = FakeBlock("b", "{}", (grid(64), grid(128)))
    plan, _ = sample(block.grids, latency, SamplingConfig(tolerance=1e-9, floor_ms=0, share=0))
    sampled = plan.surface.axes[1].samples
    x = np.array(block.grids[0])
    for y in sampled:
        assert np.allclose(plan.surface(x, np.array(y)), [latency(i, y) for i in x], rtol=1e-9)


def test_held_out_points_are_not_what_the_surface_rests_on():
    plan, known = sample(conv().grids, cliffs)
    assert plan.probes
    assert not set(plan.probes) & set(plan.surface.points)
    by_hand = [abs(float(plan.surface(*map(np.array, p))) - known[p]) / known[p] for p in plan.probes]
    assert np.allclose(held_out_errors(plan.surface, plan.probes, known), by_hand)


def test_a_surface_that_lines_miss_gets_more_lines():
    def ridge(x: int, y: int) -> float:
        return 1.0 + 4.0 * float(np.exp(-((x - 128) ** 2 + (y - 128) ** 2) / 4000))

    few, _ = sample((grid(256), grid(256)), ridge, SamplingConfig(rounds=1, probes=12))
    more, _ = sample((grid(256), grid(256)), ridge, SamplingConfig(rounds=4, probes=12))
    assert all(len(a.lines) < len(b.lines) for a, b in zip(few.surface.axes, more.surface.axes, strict=True))
    block = FakeBlock("b", "{}", (grid(256), grid(256)))
    off = [np.abs(dense(p.surface, block) - truth(block, ridge)).mean() for p in (few, more)]
    assert off[1] < 0.5 * off[0]


def test_a_surface_of_noisy_rows_stays_positive():
    noise = np.random.default_rng(0)
    for seed in range(20):
        plan, _ = sample(
            (grid(256), grid(256)), lambda x, y: x * y * float(noise.choice([0.3, 1.0])), seed=seed
        )
        assert plan.surface is not None and dense(plan.surface, conv()).min() > 0


def test_a_latency_that_is_a_product_is_exact():
    """Whatever its cliffs are along either width, once they are sampled."""

    def latency(x: int, y: int) -> float:
        return (1.0 + 0.5 * (x % 24 == 0)) * (2.0 + (y // 40) ** 1.5)

    block = FakeBlock("b", "{}", (grid(64), grid(128)))
    plan, _ = sample(block.grids, latency, SamplingConfig(tolerance=1e-9, floor_ms=0, share=0))
    x, y = (np.array(axis.samples) for axis in plan.surface.axes)
    assert np.allclose(plan.surface(x[:, None], y[None]), [[latency(i, j) for j in y] for i in x], rtol=1e-9)


def test_one_width_and_none():
    plan, known = sample((grid(512),), lambda c: 0.2 + 0.01 * steps(c))
    c = np.array(grid(512))
    assert np.allclose(plan.surface(c), 0.2 + 0.01 * np.array([steps(i) for i in c]), rtol=0.04)
    assert len(known) < 40
    plan, known = sample((), lambda: 3.0)
    assert known == {(): 3.0}
    assert plan.surface() == 3.0


@pytest.mark.parametrize("widths", [(4, 64), (64, 264)])
def test_outside_of_the_grid_is_refused(widths):
    plan, _ = sample(conv().grids, cliffs)
    with pytest.raises(TableError, match=r"8 to 256 were measured"):
        plan.surface(*(np.array(w) for w in widths))


def test_bad_grids_are_named():
    with pytest.raises(InputError, match="3 free widths"):
        plan_samples((grid(16),) * 3, {})
    with pytest.raises(InputError, match="ascending"):
        plan_samples(((16, 8),), {})


def test_surface_takes_arrays_that_broadcast():
    plan, _ = sample(conv().grids, cliffs)
    surface: Surface = plan.surface
    assert surface(np.array([8, 16, 24])[:, None], np.array([[8, 256]])).shape == (3, 2)
    assert surface(np.array(64), np.array(64)).shape == ()
