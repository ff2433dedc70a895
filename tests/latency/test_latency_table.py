"""The latency table on a runtime whose latencies are known: sampling, interpolation, and the file's promises."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_latencies import FakeBackend, cliffs, steps
from torch import Tensor, nn

from smcp_fx.backends.base import BlockLatency, Measurement
from smcp_fx.blocks.sharing import priced_as, unique_blocks
from smcp_fx.errors import InputError, MachineBusyError, TableError
from smcp_fx.latency.filling import MeasuringProgress
from smcp_fx.latency.sampling import SamplingConfig, plan_samples
from smcp_fx.latency.store import LatencyStore
from smcp_fx.latency.surface import Surface, held_out_errors
from smcp_fx.latency.table import LatencyTable, sum_of_prices


@dataclass(frozen=True)
class FakeBlock:
    name: str
    signature: str
    grids: tuple[tuple[int, ...], ...]
    read_before: tuple[int, ...] = ()
    fed_by: tuple[str, ...] = ()
    weight_bytes: float = 0.0

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return nn.Identity(), (torch.zeros(1),)


def grid(full: int, multiple: int = 8) -> tuple[int, ...]:
    return tuple(range(multiple, full + 1, multiple))


def conv(name: str = "conv", c_in: int = 256, c_out: int = 256) -> FakeBlock:
    return FakeBlock(name, json.dumps({"op": "conv", "k": 3}), (grid(c_in), grid(c_out)))


def dense(price: Callable[..., np.ndarray], block: FakeBlock) -> np.ndarray:
    x, y = (np.array(g) for g in block.grids)
    return price(x[:, None], y[None, :])


def truth(block: FakeBlock, latency: Callable[..., float] = cliffs) -> np.ndarray:
    return np.array([[latency(i, j) for j in block.grids[1]] for i in block.grids[0]])


# ---- sampling -----------------------------------------------------------------------------------------------


def sample(grids, latency, config=None, seed=0):
    known: dict[tuple[int, ...], float] = {}
    while (plan := plan_samples(grids, known, config, seed)).wanted:
        assert not set(plan.wanted) & set(known), "asked for what is known"
        known.update({p: latency(*p) for p in plan.wanted})
    assert plan.surface is not None
    return plan, known


def test_cliffs_are_found_with_few_samples():
    block = conv()
    plan, known = sample(block.grids, cliffs)
    errors = np.abs(dense(plan.surface, block) / truth(block) - 1)
    assert len(known) < 0.12 * truth(block).size
    assert np.median(errors) < 0.01
    assert np.percentile(errors, 95) < 0.05
    assert plan.surface.axes[0].step == plan.surface.axes[1].step == 16


@pytest.mark.parametrize(
    ("latency", "step"),
    [
        (lambda c: 1e-3 + 3e-5 * steps(c), 16),  # a step of half a microsecond, as low as the noise
        (lambda c: 1e-2 + 3e-4 * steps(c), 16),
        (lambda c: 1e-2 + 3e-4 * steps(c, 32), 32),
        (lambda c: 1e-2 + 3e-4 * c, 1),
        (lambda c: 1e-2 + 1e-5 * c + 4e-3 * (c % 16 > 0), 1),  # another path for what vectors do not divide
    ],
)
def test_steps_are_found_in_noise(latency: Callable[[int], float], step: int) -> None:
    """Half a microsecond of noise in every row."""
    found, grids = [], (grid(512),)
    for seed in range(40):
        noise = dict(zip(grids[0], np.random.default_rng(seed).normal(0, 5e-4, len(grids[0])), strict=True))
        known: dict[tuple[int, ...], float] = {}
        iqr = dict.fromkeys(((c,) for c in grids[0]), 3.4e-4)
        while (plan := plan_samples(grids, known, noise=iqr)).wanted:
            known.update({(c,): latency(c) + noise[c] for (c,) in plan.wanted})
        found.append(plan.surface.axes[0].step)
    assert np.mean(np.array(found) == step) >= 0.9


def test_a_full_size_that_is_no_multiple_hides_no_step() -> None:
    """As ShuffleNet's 58 and 116 channels: multiples of 8 are permitted, and the layer as it is."""
    plan, _ = sample(((*grid(112), 116),), lambda c: 1e-2 + 3e-4 * steps(c))
    assert plan.surface.axes[0].step == 16
    both, _ = sample(
        ((*grid(112), 116),), lambda c: 1e-2 + 1e-4 * c + 4e-3 * (c % 16 > 0)
    )  # vectors do not divide
    assert both.surface.axes[0].aligned == 16
    assert float(both.surface(np.array(116))) == pytest.approx(1e-2 + 1.16e-2 + 4e-3)


def test_a_first_width_is_sampled_only_where_its_step_does_not_pad_it() -> None:
    """As a convolution's: 8 filters cost what 16 do, while 8 channels are read by a kernel of their own."""

    def latency(x: int, y: int) -> float:
        own = 0.6 if x == 8 else 1.0
        return 0.01 + 1e-4 * own * steps(x) * steps(y)

    plan, known = sample((grid(256), grid(256)), latency)
    x, y = plan.surface.axes
    assert (x.first_apart, y.first_apart) == (True, False)
    assert x.lines[0] == 8 and y.lines[0] == 16
    assert sum(y == 8 for _, y in known) <= 3  # a step's places, and probes
    widths = np.arange(8, 257, 8)
    true = np.array([[latency(i, j) for j in widths] for i in widths])
    assert np.allclose(plan.surface(widths[:, None], widths[None, :]), true, rtol=0.03)


def sums_of_groups(full: int) -> tuple[int, ...]:
    """As ShuffleNet's streams: groups of odd sizes, each kept whole or at a multiple of 8."""
    sums = {0}
    for size in (7, 7, 15, 29, full - 58):
        sums = {a + b for a in sums for b in (*grid(size), size)}
    return tuple(sorted({*grid(full), *sums}))


def test_widths_that_vectors_do_not_divide_are_a_kind_of_their_own() -> None:
    """Depthwise convolutions whose channels four does not divide take 36 times as long."""
    widths = sums_of_groups(232)
    plan, known = sample((widths,), lambda c: 1e-3 + 5e-6 * c if c % 4 == 0 else 1e-2 + 1.5e-4 * c)
    assert plan.surface.axes[0].aligned == 4
    assert len(known) < 0.5 * len(widths)
    at = np.array(widths)
    expected = np.where(at % 4 == 0, 1e-3 + 5e-6 * at, 1e-2 + 1.5e-4 * at)
    assert plan.surface(at) == pytest.approx(expected, rel=0.02)


def test_kinds_of_one_axis_leave_the_other_its_steps() -> None:
    """Pointwise convolutions on few pixels: slower where four does not divide the channels read; filters in 16s."""
    reads, writes = sums_of_groups(232), sums_of_groups(116)

    def latency(x: int, y: int) -> float:
        return (1e-3 * x + 2e-4 * x * steps(y)) * (1.0 if x % 4 == 0 else 3.4) + 5e-4 * steps(y)

    plan, known = sample((reads, writes), latency)
    ax, ay = plan.surface.axes
    assert (ax.aligned, ax.step, ay.aligned, ay.step) == (4, 1, 1, 16)
    assert len(known) < 0.05 * len(reads) * len(writes)
    x, y = np.array(reads), np.array(writes)
    true = np.array([[latency(i, j) for j in writes] for i in reads])
    assert plan.surface(x[:, None], y[None, :]) == pytest.approx(true, rel=0.03)
    pairs = plan.surface(x[: len(y)], y)
    assert pairs == pytest.approx(np.diag(true[: len(y)]), rel=0.03)


def test_a_cliff_beside_one_kind_of_the_other_axis_is_found() -> None:
    """Where four does not divide the channels read, filters beyond a hundred take another kernel: there alone."""
    reads = sums_of_groups(232)

    def latency(x: int, y: int) -> float:
        slow = 1.0 if x % 4 == 0 else 2.0 + (y > 100)
        return (0.02 + 1e-5 * x * y) * slow

    plan, _ = sample((reads, grid(256)), latency)
    x, y = np.array(reads), np.array(grid(256))
    true = np.array([[latency(i, j) for j in y] for i in x])
    errors = np.abs(plan.surface(x[:, None], y[None, :]) / true - 1)
    assert np.percentile(errors, 95) < 0.03


@pytest.mark.parametrize("whole", [0.7, 1.0])
def test_a_whole_concatenation_stands_for_itself_alone(whole: float) -> None:
    """Vectors divide all that it joins; one channel less, and all is converted."""

    def latency(c: int) -> float:
        return (0.005 + 2e-5 * c) * (whole if c == 512 else 1.0)

    plan, known = sample((grid(512),), latency)
    c = np.array(grid(512))
    # 4 %, as steps too low to see are assumed
    assert np.allclose(plan.surface(c), [latency(int(i)) for i in c], rtol=0.04)
    assert (plan.surface.axes[0].before_last == 504) == (whole < 1)
    assert len(known) < 40


@pytest.mark.parametrize(("fast", "slow", "noise"), [(1e-4, 6e-4, 0.0), (2e-6, 3e-5, 5e-4)])
def test_an_assumed_step_hides_no_other_path(fast: float, slow: float, noise: float) -> None:
    """A pooling of a microsecond: too low to tell a step, and far slower beside multiples of 16 where it is wide."""

    def clean(c: int) -> float:
        return (fast if c % 16 == 0 else slow) * (16 + c)

    found = []
    for seed in range(20):
        off = dict(zip(grid(512), np.random.default_rng(seed).normal(0, noise, 64), strict=True))
        known: dict[tuple[int, ...], float] = {}
        iqr = dict.fromkeys(((c,) for c in grid(512)), 0.7 * noise)
        while (plan := plan_samples((grid(512),), known, noise=iqr)).wanted:
            known.update({(c,): clean(c) + off[c] for (c,) in plan.wanted})
        found.append((plan.surface.axes[0].aligned, plan.surface.axes[0].step))
        assert float(plan.surface(np.array(408))) == pytest.approx(clean(408), rel=0.02, abs=4 * noise)
    assert found.count((16, 1)) >= 18


def lottery(c_in: int, c_out: int) -> float:
    """A linear layer's latency in ms on a busy machine: from 16 MB of weights on luck says what is in cache."""
    size = 4e-6 * c_in * c_out
    in_cache, from_memory = 0.015 * size, 0.055 * size
    share = np.random.default_rng((c_in, c_out)).uniform() if 16 < size < 64 else size >= 64
    return float(in_cache + share * (from_memory - in_cache))


def test_luck_is_not_sampled_at_every_width() -> None:
    """As VGG's classifier, of one of whose layers 1,066 rows were measured: what midpoints miss is noise."""
    grids = (grid(4096), grid(4096))
    plan, known = sample(grids, lottery)
    everywhere, more = sample(grids, lottery, SamplingConfig(cliffs=4096))
    assert len(known) < 0.5 * len(more)
    x = np.array(grids[0])
    mean = np.array([[lottery(i, j) for j in grids[1][::8]] for i in grids[0][::8]])
    errors = [np.median(np.abs(p.surface(x[::8, None], x[None, ::8]) / mean - 1)) for p in (plan, everywhere)]
    assert errors[0] < errors[1] + 0.05


def test_cliffs_are_found_among_noise_that_samples_do_not_tell() -> None:
    """Sessions that differ by 5 %: halving intervals between them goes on for ever, and must leave cliffs alone."""
    widths = np.array(grid(4096))
    clean = (1 + 1e-2 * widths) * np.where(widths <= 3000, 1.0, np.where(widths <= 3720, 1.6, 2.4))
    rows, beside = {4: 0, 4096: 0}, {4: 0, 4096: 0}
    for seed in range(10):
        noisy = dict(
            zip(grid(4096), clean * np.random.default_rng(seed).lognormal(0, 0.05, 512), strict=True)
        )
        for share in rows:
            plan, known = sample((grid(4096),), noisy.__getitem__, SamplingConfig(cliffs=share))
            rows[share] += len(known)
            beside[share] += np.sum(np.abs(plan.surface(widths) / clean - 1) > 0.2)
    assert rows[4] < 0.75 * rows[4096]
    assert beside[4] <= beside[4096] + 5


def saw(c: int, unit: int = 16) -> float:
    """Units that come four at a time: the first of them brings 56 % of what four do, as convolutions measured."""
    whole, part = divmod(-(-c // unit), 4)
    return 4 * unit * (whole + (0.0, 0.56, 0.74, 0.87)[part])


@pytest.mark.parametrize("unit", [16, 8])
def test_a_saw_is_found_with_few_samples(unit: int) -> None:
    """A convolution whose kernel computes four vectors of filters at a time; 1 % of disturbance in every row."""

    def latency(x: int, y: int) -> float:
        clean = 0.02 + 1e-4 * steps(x) + 3e-4 * saw(y, unit) + 1e-4 * steps(x, unit) * saw(y, unit)
        return clean * (1 + 0.01 * np.sin(1000 * x + 13 * y))

    grids = (grid(256), grid(512))
    plan, known = sample(grids, latency)
    x, y = (np.array(g) for g in grids)
    true = np.array([[latency(i, j) for j in y] for i in x])
    errors = np.abs(plan.surface(x[:, None], y[None, :]) / true - 1)
    assert len(known) < 0.06 * true.size
    assert np.median(errors) < 0.015
    assert np.percentile(errors, 95) < 0.04
    assert plan.surface.axes[0].saw == ()
    assert plan.surface.axes[1].saw == pytest.approx((0.56, 0.74, 0.87), abs=0.08)


def test_a_saw_of_noise_keeps_its_order() -> None:
    """Whatever the rows say, widths stay in order along the axis."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        plan, _ = sample((grid(256),), lambda c: c + rng.uniform(0, 60))
        (axis,) = plan.surface.axes
        assert (np.diff(axis.coordinate(np.arange(8, 257))) > 0).all()


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


def test_aligned_and_other_widths_may_cost_differently():
    """Runtimes pool and convolve depthwise on a blocked path, where the channels allow it."""

    def latency(c: int) -> float:
        return 1.0 + 0.01 * c if c % 16 == 0 else 2.0 + 0.03 * c

    plan, known = sample((grid(512),), latency)
    c = np.array(grid(512))
    assert np.allclose(plan.surface(c), [latency(int(i)) for i in c], rtol=1e-9)
    assert len(known) < 40


def test_a_full_size_that_is_no_multiple_is_met_exactly():
    widths = (*grid(96), 100)
    plan, _ = sample((widths, widths), lambda x, y: 1.0 + steps(x) * steps(y) / 1000)
    assert float(plan.surface(np.array(100), np.array(100))) == pytest.approx(1.0 + 112 * 112 / 1000)


def test_a_full_size_of_another_path_stands_for_itself_alone() -> None:
    """A depthwise convolution of 58 channels may take a slow path, where 56 take one that is too fast for steps."""

    def latency(width: int) -> float:
        return 0.028 if width % 8 else 0.0015 + 1e-6 * width

    widths = (8, 16, 24, 32, 40, 48, 56, 58)
    plan, _ = sample((widths,), latency)
    for width in widths:
        assert float(plan.surface(np.array(width))) == pytest.approx(latency(width), rel=0.1)


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


# ---- the table ----------------------------------------------------------------------------------------------


def test_measure_then_price(tmp_path):
    block, backend = conv(), FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        price = table.price(block, backend.fingerprint())
        assert report.measured == len(backend.log) == len(set(backend.log))
        assert report.failed == report.unstable == ()
        errors = np.abs(dense(price, block) / truth(block) - 1)
        assert np.percentile(errors, 95) < 0.05
        held_out = table.held_out_error([block], backend.fingerprint())
        assert 0 < held_out.points < 20
        assert held_out.largest < 0.1
        assert float(price(np.array(256), np.array(256))) == pytest.approx(cliffs(256, 256))
        assert sum_of_prices([price, price], [(8, 256), (256, 8)]) == pytest.approx(
            cliffs(8, 256) + cliffs(256, 8)
        )


def test_a_second_run_measures_nothing_and_equal_blocks_share_rows(tmp_path):
    backend = FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        first = table.measure([conv("a"), conv("b")], backend)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        again = table.measure([conv("c")], backend)
        assert again.measured == 0
        assert again.reused == first.measured
        narrower = table.measure([conv("d", c_in=128)], backend)
        assert narrower.reused == first.measured
        assert narrower.measured < first.measured  # rows of the wider block serve the narrower one


def test_rows_tell_where_a_number_comes_from(tmp_path):
    block, backend = conv(c_in=16, c_out=16), FakeBackend()
    before = time.time()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure([block], backend)
        rows = table.rows()
        assert table.fingerprints() == [backend.fingerprint()]
        assert table.rows(replace(backend.fingerprint(), version="2")) == []
    assert {row.widths for row in rows} == {(8, 8), (8, 16), (16, 8), (16, 16)}
    for row in rows:
        assert row.fingerprint == backend.fingerprint()
        assert row.name == "conv"
        assert row.latency.hot.median_ms == cliffs(*row.widths)
        assert before - 1 <= row.measured_at <= time.time() + 1


def test_states_are_weighed(tmp_path):
    block, backend = conv(c_in=16, c_out=16), FakeBackend(cold=2.0)
    for share, factor in ((0.0, 1.0), (0.5, 1.5), (1.0, 2.0)):
        with LatencyTable(tmp_path / "t.sqlite", cold_share=share) as table:
            table.measure([block], backend)
            price = table.price(block, backend.fingerprint())
            assert float(price(np.array(16), np.array(8))) == pytest.approx(factor * cliffs(16, 8))
    assert len(backend.log) == 4
    with pytest.raises(InputError, match="cold_share"):
        LatencyTable(tmp_path / "t.sqlite", cold_share=1.5)


def test_progress_rises_and_ends_at_one_block_after_the_other(tmp_path):
    seen: list[MeasuringProgress] = []
    other = FakeBlock("other", "{}", (grid(64),))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([conv(), other], FakeBackend(), seen.append)
    assert [p.measured for p in seen] == list(range(1, report.measured + 1))
    assert all(0 < p.fraction <= 1 and p.remaining_seconds >= 0 for p in seen)
    assert seen[0].fraction < 0.5 <= seen[-1].fraction


def test_missing_rows_and_other_devices_are_errors(tmp_path):
    block, backend = conv(), FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(TableError, match=r"'conv' is not measured"):
            table.price(block, backend.fingerprint())
        table.measure([block], backend)
        other = FakeBackend(device="another").fingerprint()
        with pytest.raises(TableError, match=r"rows of: none 1, float32, 1 thread, fake"):
            table.price(block, other)
        with pytest.raises(TableError, match="not measured"):
            table.held_out_error([block], other)


def test_held_out_errors_are_of_the_state_that_is_asked_for(tmp_path):
    class Memory(FakeBackend):
        """From memory every row takes a millisecond more; a third of them are unsteady in cache."""

        def block_latency(self, block, widths, config=None):
            hot = super().block_latency(block, widths).hot
            in_cache = replace(hot, stable=sum(widths) % 3 != 0)
            return BlockLatency(in_cache, replace(hot, median_ms=hot.median_ms + 1.0))

    block, backend = conv(), Memory()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure([block], backend)
        in_cache, half, from_memory = (
            table.held_out_error([block], backend.fingerprint(), share) for share in (0.0, 0.5, 1.0)
        )
        assert in_cache.rows == from_memory.rows
        assert np.allclose(from_memory.measured_ms, in_cache.measured_ms + 1.0)
        assert np.allclose(half.measured_ms, in_cache.measured_ms + 0.5)
        surface = table.surface(block, backend.fingerprint(), 1.0)
        for (_, point), error, ms in zip(
            from_memory.rows, from_memory.errors, from_memory.measured_ms, strict=True
        ):
            assert error == pytest.approx(abs(float(surface(*map(np.asarray, point))) / ms - 1))
        middle = float(np.median(in_cache.measured_ms))
        long = in_cache.telling(middle)
        errors = dict(zip(in_cache.rows, in_cache.errors, strict=True))
        expected = [
            row
            for row, ms in zip(in_cache.rows, in_cache.measured_ms, strict=True)
            if ms >= middle and sum(row[1]) % 3 != 0
        ]
        assert list(long.rows) == expected
        assert 0 < long.points == len(expected) < sum(in_cache.measured_ms >= middle)
        expected = [errors[row] for row in expected]
        assert long.errors.tolist() == expected
        assert from_memory.telling(0.0).points == from_memory.points
        assert half.telling(0.0).rows == in_cache.telling(0.0).rows
        assert [long.median, long.p95, long.largest] == list(np.percentile(expected, [50, 95, 100]))
        assert in_cache.telling(1e9).points == 0


def test_the_luck_of_sessions_of_many_weights_is_not_followed(tmp_path):
    """Of 24 MiB of weights rows are a twentieth from themselves; of few such rows would be cliffs."""

    def lucky(*widths):
        return math.prod(widths) * (1 + 0.05 * math.sin(sum(widths) * 12.9898)) / 1000

    rows = {}
    for size, cold in itertools.product((0.0, float(24 << 20)), (None, 3.0)):
        block = FakeBlock("linear", "{}", (grid(512), grid(512)), weight_bytes=size)
        with LatencyTable(tmp_path / f"{size}{cold}.sqlite") as table:
            rows[size, cold] = table.measure([block], FakeBackend(latency=lucky, cold=cold)).measured
    assert rows[0.0, None] == rows[0.0, 3.0] == rows[24 << 20, None]  # no weights, or no cache that is told
    assert rows[24 << 20, 3.0] < 0.6 * rows[0.0, 3.0]


def test_a_crashing_row_is_marked_and_the_rest_goes_on(tmp_path):
    block, other = conv(), FakeBlock("other", "{}", (grid(64),))
    backend = FakeBackend(fails_at=(256, 256))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block, other], backend, None)
        assert report.failed == (("conv", (256, 256), "RuntimeError: the kernel crashed"),)
        with pytest.raises(TableError, match=r"'conv' could not be measured at widths \(256, 256\)"):
            table.price(block, backend.fingerprint())
        table.price(other, backend.fingerprint())
        assert [row.error for row in table.rows() if row.latency is None] == [
            "RuntimeError: the kernel crashed"
        ]
        backend.fails_at = None
        backend.log.clear()
        table.measure([block], backend)
        assert backend.log == []  # a marked row is not tried again unasked
        table.measure([block], backend, retry_failed=True)
        table.price(block, backend.fingerprint())


def test_unstable_rows_are_reported(tmp_path):
    class Noisy(FakeBackend):
        def block_latency(self, block, widths, config=None):
            hot = Measurement(1.0, 0.8, 1.4, 3, stable=widths != (16,))
            return BlockLatency(hot)

    with LatencyTable(tmp_path / "t.sqlite") as table:
        block = FakeBlock("b", "{}", (grid(16),))
        report = table.measure([block], Noisy())
        assert report.unstable == (("b", (16,), pytest.approx(0.6)),)
        again = table.measure([block], Noisy())
        assert again.measured == 0
        assert again.unstable == report.unstable  # they are used, whoever measured them
        again = table.measure([block], Noisy(), retry_unstable=True)
        assert (again.measured, again.repeated, again.unstable) == (0, 1, report.unstable)


@pytest.mark.parametrize("ms", [0.0, -0.001, math.nan, math.inf])
def test_what_no_block_can_take_is_no_row(tmp_path, ms):
    block = FakeBlock("b", "{}", (grid(16),))
    backend = FakeBackend(latency=lambda width: ms if width == 16 else 1.0)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        assert [(name, widths) for name, widths, _ in report.failed] == [("b", (16,))]
        assert "which no block can take" in report.failed[0][2]
        with pytest.raises(TableError, match="could not be measured at widths"):
            table.price(block, backend.fingerprint())


class BusyTimes(FakeBackend):
    """A machine that others work on: ``busy(n)`` says so before the ``n``-th measurement (from 0) and in it."""

    def __init__(self, busy: Callable[[int], bool], steady: bool = True, quiet_again: bool = False) -> None:
        super().__init__()
        self.busy, self.steady, self.quiet_again, self.asked = busy, steady, quiet_again, 0

    def run_overhead_ms(self):
        self.log.append(("run", ()))
        return 0.01

    def require_quiet(self):
        self.asked += 1
        if self.busy(len(self.log)) and not (self.quiet_again and self.asked > 1):
            raise MachineBusyError("others have the cores")

    def block_latency(self, block, widths, config=None):
        if self.steady and self.busy(len(self.log)) and not (self.quiet_again and self.asked > 2):
            raise MachineBusyError("no run was left alone")
        row = super().block_latency(block, widths)
        return replace(row, hot=replace(row.hot, stable=self.steady))


def test_a_busy_machine_is_told_before_anything_is_measured(tmp_path):
    backend = BusyTimes(lambda n: True)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(MachineBusyError, match="others have the cores"):
            table.measure([conv()], backend)
        assert (backend.log, table.rows()) == ([], [])
        backend.busy = lambda n: False
        table.measure([conv()], backend)
        backend.busy = lambda n: True
        assert table.measure([conv()], backend).measured == 0  # a complete table needs no quiet
        with pytest.raises(MachineBusyError):
            table.measure([conv()], backend, retry_unstable=True)


def test_a_machine_that_becomes_busy_ends_measuring_and_the_rows_so_far_are_kept(tmp_path):
    backend, block = BusyTimes(lambda n: n == 20), conv()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(MachineBusyError):
            table.measure([block], backend)
        assert len(backend.log) == 20
        assert len(table.rows()) == 20
        assert all(row.latency is not None for row in table.rows())  # none is marked as failed
        backend.busy = lambda n: False
        table.measure([block], backend)
        assert (
            len(set(backend.log)) == len(backend.log) - 1
        )  # none was lost, and a run's own cost asked for twice
        table.price(block, backend.fingerprint())


def test_a_busy_moment_is_waited_for(tmp_path):
    backend, block = BusyTimes(lambda n: n == 20, quiet_again=True), conv()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        assert table.measure([block], backend).failed == ()
        assert backend.asked == 3  # at first, and behind two tries that nothing was left of
        table.price(block, backend.fingerprint())


def test_behind_unsteady_rows_it_is_asked_whether_the_machine_is_quiet(tmp_path, monkeypatch):
    """Every ten seconds at most; each row takes four here."""
    backend, block = BusyTimes(lambda n: n > 30, steady=False), conv()
    clock = SimpleNamespace(monotonic=lambda: 4.0 * len(backend.log), sleep=time.sleep)
    monkeypatch.setattr("smcp_fx.latency.filling.time", clock)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(MachineBusyError):
            table.measure([block], backend)
        assert 30 < len(backend.log) <= 33
        assert backend.asked == 1 + len(backend.log) // 3


class Moments(FakeBackend):
    """A device whose ``n``-th measurement (from 0) is as ``moments(n)`` says: (factor, spread, steady, pace)."""

    def __init__(self, moments: Callable[[int], tuple[float, float, bool, float]]) -> None:
        super().__init__()
        self.moments = moments

    def block_latency(self, block, widths, config=None):
        factor, spread, steady, pace = self.moments(len(self.log))
        ms = factor * super().block_latency(block, widths).hot.median_ms
        return BlockLatency(Measurement(ms, ms * (1 - spread), ms, 3, stable=steady), pace_ms=pace)


def test_rows_of_bad_moments_are_measured_again(tmp_path):
    """Every fifth measurement of the first fifty says half as much again; the rows end as if none had."""
    good, bad = (1.0, 0.0, True, 1.0), (1.5, 0.3, False, 1.0)
    calm, block = FakeBackend(), conv()
    busy = Moments(lambda n: bad if n < 50 and n % 5 == 0 else good)
    with LatencyTable(tmp_path / "a.sqlite") as a, LatencyTable(tmp_path / "b.sqlite") as b:
        a.measure([block], calm)
        report = b.measure([block], busy)
        assert report.unstable == ()
        assert report.repeated == 10
        assert report.measured + report.repeated == len(busy.log)
        expected = a.store.measured(block.signature, calm.fingerprint())
        found = b.store.measured(block.signature, calm.fingerprint())
        assert {p: found[p].hot.median_ms for p in expected} == {
            p: row.hot.median_ms for p, row in expected.items()
        }


def test_rows_of_a_slow_pace_that_nothing_faster_was_known_of_are_measured_again(tmp_path):
    """All are steady; the first twenty are of a core at half its pace, and one later is a little slower."""
    block = conv()
    backend = Moments(
        lambda n: (2.0, 0.01, True, 2.0) if n < 20 else (1.0, 0.02, True, 1.1 if n == 25 else 1.0)
    )
    with LatencyTable(tmp_path / "t.sqlite") as table:
        assert table.measure([block], backend).repeated == 20
        rows = table.store.measured(block.signature, backend.fingerprint())
        assert all(row.hot.median_ms == pytest.approx(cliffs(*p)) for p, row in rows.items())


def test_rows_of_a_slow_pace_are_replaced_together(tmp_path):
    """Beside rows at half the pace each would look like a cliff, and sampling would want the rows around it."""
    blocks = [FakeBlock(name, f'{{"{name}": 1}}', (grid(512), grid(512))) for name in "ab"]
    calm = Moments(lambda n: (1.0, 0.0, True, 1.0))
    with LatencyTable(tmp_path / "calm.sqlite") as table:
        first = table.measure(blocks[:1], calm).measured
        both = first + table.measure(blocks, calm).measured
    busy = Moments(lambda n: (2.0, 0.0, True, 2.0) if n < first else (1.0, 0.0, True, 1.0))
    with LatencyTable(tmp_path / "busy.sqlite") as table:
        report = table.measure(blocks, busy)
        assert (report.measured, report.repeated) == (both, first)
        for block in blocks:
            rows = table.store.measured(block.signature, busy.fingerprint())
            assert all(row.hot.median_ms == pytest.approx(busy.latency(*p)) for p, row in rows.items())


def test_rows_that_are_unsteady_in_memory_only_are_measured_again(tmp_path):
    """Every fifth measurement of the first fifty says half as much again from memory."""

    class Busy(FakeBackend):
        def block_latency(self, block, widths, config=None):
            bad = len(self.log) < 50 and len(self.log) % 5 == 0
            found = super().block_latency(block, widths)
            ms = found.cold.median_ms
            return replace(found, cold=Measurement(1.5 * ms, ms, 2 * ms, 3, stable=False)) if bad else found

    block, backend = conv(), Busy(cold=2.0)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        assert (report.repeated, report.unstable) == (10, ())
        rows = table.store.measured(block.signature, backend.fingerprint()).values()
        assert all(row.cold.median_ms == 2 * row.hot.median_ms for row in rows)


def test_each_state_of_a_row_is_that_of_its_calmer_measurement(tmp_path):
    def found(hot_ms, hot_steady, cold_ms, cold_steady):
        hot, cold = (
            Measurement(ms, ms, ms if steady else 2 * ms, 3, steady)
            for ms, steady in ((hot_ms, hot_steady), (cold_ms, cold_steady))
        )
        return BlockLatency(hot, cold)

    left = [found(1, True, 2, True), found(1, True, 9, False), found(5, False, 2, True)]

    class Sequence(FakeBackend):
        def block_latency(self, block, widths, config=None):
            return left.pop(0)

    with LatencyTable(tmp_path / "t.sqlite") as table:
        block, backend = FakeBlock("b", "{}", (grid(16),)), Sequence()
        report = table.measure([block], backend)
        assert (report.repeated, report.unstable) == (1, ())
        assert set(table.store.measured("{}", backend.fingerprint()).values()) == {found(1, True, 2, True)}


def test_rows_that_a_calmer_though_unsteady_measurement_makes_necessary_are_measured(tmp_path):
    """All are unsteady; what is measured first is a straight line, and what is measured again has cliffs."""
    block = conv()

    class Changing(FakeBackend):
        def block_latency(self, block, widths, config=None):
            again = (block.name, widths) in self.log
            ms = super().block_latency(block, widths).hot.median_ms if again else 1e-3 * sum(widths)
            self.log.append((block.name, widths))
            return BlockLatency(Measurement(ms, ms, (1.01 if again else 1.02) * ms, 3, stable=False))

    with LatencyTable(tmp_path / "t.sqlite") as table:
        backend = Changing()
        report = table.measure([block], backend)
        surface = table.surface(block, backend.fingerprint())
        assert {point for _, point, _ in report.unstable} >= set(surface.points)


def test_unsteady_rows_of_earlier_calls_are_measured_again_when_asked_for_and_the_steady_stand(tmp_path):
    block = conv()
    busy, calm = Moments(lambda n: (1.5, 0.01, n % 2 > 0, 1.0)), FakeBackend()
    busy.latency = calm.latency = lambda c_in, c_out: 1.0 + c_in * c_out
    with LatencyTable(tmp_path / "t.sqlite") as table:
        unsteady = table.measure([block], busy).unstable
        assert unsteady
        assert table.measure([block], calm).unstable == unsteady
        report = table.measure([block], calm, retry_unstable=True)
        assert (report.repeated, report.unstable) == (len(unsteady), ())
        rows = table.store.measured(block.signature, calm.fingerprint())
        for _, point, _ in unsteady:
            assert rows[point].hot.median_ms == calm.latency(*point)


def test_unsteady_rows_that_no_price_rests_on_are_not_told(tmp_path):
    """Of one signature: a row beyond the block's grid, and one that two blocks rest on."""
    noisy = Moments(lambda n: (1.0, 0.3, False, 1.0))
    wide, narrow = FakeBlock("b", "{}", (grid(64),)), FakeBlock("b", "{}", (grid(16),))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        everything = {point for _, point, _ in table.measure([wide], noisy).unstable}
        assert everything >= {(8,), (16,), (64,)}
        assert {point for _, point, _ in table.measure([narrow], noisy).unstable} == {(8,), (16,)}
        both = [point for _, point, _ in table.measure([narrow, wide], noisy).unstable]
        assert sorted(both) == sorted(everything)


def test_a_table_is_complete_at_every_moment_in_which_rows_are_measured_again(tmp_path):
    """What sampling wants because of a better row is there before that row is."""
    block = conv()

    class Changing(FakeBackend):
        def block_latency(self, block, widths, config=None):
            again = (block.name, widths) in self.log
            if again:
                table.surface(block, self.fingerprint())
                prices.append(widths)
            ms = super().block_latency(block, widths).hot.median_ms if again else 1e-3 * sum(widths)
            self.log.append((block.name, widths))
            return BlockLatency(Measurement(ms, ms, ms, 3, stable=again))

    prices: list[tuple[int, ...]] = []
    with LatencyTable(tmp_path / "t.sqlite") as table:
        backend = Changing()
        assert table.measure([block], backend).unstable == ()
        assert prices
        rows = table.store.measured(block.signature, backend.fingerprint())
        for point in table.plan(block, backend.fingerprint())[0].used:
            assert rows[point].hot.median_ms == cliffs(*point)


def test_a_failure_that_sampling_no_longer_asks_for_is_none(tmp_path):
    """A row misleads the sampling into asking for others, of which one crashes; measured again, it does not."""
    block = FakeBlock("b", "{}", (grid(256),))

    class Misled(FakeBackend):
        def block_latency(self, block, widths, config=None):
            again = (block.name, widths) in self.log
            found = super().block_latency(block, widths)
            if widths == (192,) and not again:
                return BlockLatency(Measurement(900.0, 900.0, 900.0, 3, stable=False))
            return found

    with LatencyTable(tmp_path / "t.sqlite") as table:
        straight = FakeBackend()
        table.measure([block], straight)
        asked = {widths for _, widths in straight.log}
    with LatencyTable(tmp_path / "u.sqlite") as table:
        misled = Misled()
        table.measure([block], misled)
        only_misled = {widths for _, widths in misled.log} - asked
        assert only_misled
    with LatencyTable(tmp_path / "v.sqlite") as table:
        backend = Misled(fails_at=min(only_misled))
        assert table.measure([block], backend).failed == ()
        table.surface(block, backend.fingerprint())


def test_a_measurement_in_a_slower_state_of_the_core_replaces_none(tmp_path):
    block = FakeBlock("b", "{}", (grid(16),))
    moments = [(1.0, 0.3, False, 1.0), (1.0, 0.0, True, 1.0), (2.0, 0.0, True, 2.0)]  # rows 16, 8, 16 again
    backend = Moments(lambda n: moments[min(n, 2)])
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        assert report.unstable == (("b", (16,), pytest.approx(0.3)),)
        rows = table.store.measured("{}", backend.fingerprint())
        assert rows[16,].hot.median_ms == backend.latency(16)


def test_of_two_unsteady_measurements_of_a_row_the_calmer_stands(tmp_path):
    block = FakeBlock("b", "{}", (grid(16),))
    spreads = [0.0, 0.5, 0.3, 0.4]  # rows 8 and 16, then 16 again, once: nothing became steady
    first = Moments(lambda n: (1.0, spreads[n], n == 0, 1.0))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], first)
        assert report.repeated == 1
        assert [spread for *_, spread in report.unstable] == [pytest.approx(0.3)]
        assert len(first.log) == 3


# ---- the file -----------------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error_when_it_must_exist(tmp_path):
    with pytest.raises(TableError, match=r"there is no latency table"):
        LatencyTable(tmp_path / "none.sqlite", create=False)
    assert not (tmp_path / "none.sqlite").exists()


def test_foreign_and_damaged_files_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("this is no database at all, but long enough to be read as one\n" * 40)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = foreign.read_bytes()
    with pytest.raises(TableError, match=r"text\.sqlite is no latency table"):
        LatencyTable(text)
    with pytest.raises(TableError, match=r"no latency table"):
        LatencyTable(foreign)
    assert sqlite3.connect(foreign).execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    assert len(foreign.read_bytes()) == len(before)


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("error TEXT", "error TEXT AS (hex(zeroblob(300000000)))"),
        ("hot_ms REAL", "hot_ms REAL AS (attempts)"),
        ("owner TEXT NOT NULL", "owner TEXT NOT NULL CHECK (length(hex(zeroblob(300000000))) > 0)"),
        ("changed REAL NOT NULL", "changed REAL NOT NULL DEFAULT 1"),
    ],
)
def test_a_table_that_computes_is_refused(tmp_path: Path, column: str, other: str) -> None:
    """A few bytes of SQL in it would fill the memory when a row is read."""
    path = tmp_path / "t.sqlite"
    LatencyTable(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA writable_schema = 1")
        database.execute(
            "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = 'latency'", (column, other)
        )
    for read_only in (True, False):
        with pytest.raises(TableError, match="holds latency of another make"):
            LatencyStore(path, read_only=read_only)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "t.sqlite"
    with LatencyTable(path) as table:
        table.measure([conv()], FakeBackend())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TableError, match=r"damaged|cannot be used"), LatencyTable(path) as table:
        table.measure([conv()], FakeBackend())


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "t.sqlite"
    LatencyTable(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(TableError, match="format 99"):
        LatencyTable(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match="cannot open the latency table"):
        LatencyTable(tmp_path / "file" / "t.sqlite")


def test_a_row_is_claimed_once_and_a_dead_owner_frees_it(tmp_path, monkeypatch):
    store, fingerprint = LatencyStore(tmp_path / "t.sqlite"), FakeBackend().fingerprint()
    points = [(8,), (16,)]
    assert store.claim("b", "{}", fingerprint, points) == (8,)
    other = LatencyStore(tmp_path / "t.sqlite")
    other._owner = f"{other._owner}0"  # another process on this host
    # the claim's owner is alive, so the other process gets the next row, and then none
    assert other.claim("b", "{}", fingerprint, points) == (16,)
    assert other.claim("b", "{}", fingerprint, [(8,)]) is None
    # the owner of (16,) does not exist: its row is free for us
    assert store.claim("b", "{}", fingerprint, [(16,)]) == (16,)
    store.close()
    other.close()


def test_a_row_that_kills_its_process_is_given_up_after_three_attempts(tmp_path):
    store, fingerprint = LatencyStore(tmp_path / "t.sqlite"), FakeBackend().fingerprint()
    alive = store._owner
    for attempt in range(3):
        store._owner = f"{alive}{attempt}"
        assert store.claim("b", "{}", fingerprint, [(8,)]) == (8,)
    store._owner = alive
    assert store.claim("b", "{}", fingerprint, [(8,)]) is None
    assert store.failures("{}", fingerprint) == {(8,): "the process died 3 times measuring it"}
    store.close()


def test_an_interrupt_frees_the_row_under_way(tmp_path):
    class Interrupted(FakeBackend):
        def block_latency(self, block, widths, config=None):
            raise KeyboardInterrupt

    block = conv()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(KeyboardInterrupt):
            table.measure([block], Interrupted())
        assert table.store.claim(block.name, block.signature, FakeBackend().fingerprint(), [(256, 256)])


def _measure_in_process(path: Path, pause: float, log: Path) -> None:
    class Logged(FakeBackend):
        def block_latency(self, block, widths, config=None):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {json.dumps(widths)}\n")
            return super().block_latency(block, widths, config)

    with LatencyTable(path) as table:
        table.measure([conv()], Logged(pause=pause))


def test_kill_9_loses_only_the_row_under_way(tmp_path):
    path, log = tmp_path / "t.sqlite", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_measure_in_process, args=(path, 0.02, log))
    process.start()
    while not log.exists() or len(log.read_text().splitlines()) < 12:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    started = [tuple(json.loads(line.split(" ", 1)[1])) for line in log.read_text().splitlines()]
    backend = FakeBackend()
    with LatencyTable(path) as table:
        kept = {row.widths for row in table.rows()}
        assert set(started[:-1]) <= kept
        table.measure([conv()], backend)
        assert not {widths for _, widths in backend.log} & kept
        assert np.isfinite(dense(table.price(conv(), backend.fingerprint()), conv())).all()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_processes_share_a_table_without_double_work(tmp_path):
    path, log = tmp_path / "t.sqlite", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_measure_in_process, args=(path, 0.01, log)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert len({widths for _, widths in lines}) == len(lines)
    assert {pid for pid, _ in lines} == {str(worker.pid) for worker in workers}
    alone = FakeBackend()
    with LatencyTable(tmp_path / "alone.sqlite") as table:
        table.measure([conv()], alone)
    assert sorted(widths for _, widths in lines) == sorted(json.dumps(widths) for _, widths in alone.log)


def test_blocks_that_a_larger_one_can_be_are_priced_by_its_rows(tmp_path: Path) -> None:
    """As a dense block's layers: each reads more than the one before, at least and at most."""
    layers = [
        FakeBlock(f"layer{k}", "a", (tuple(range(8 * k, 64 + 32 * k + 1, 8)), grid(64))) for k in (1, 2, 3)
    ]
    wide, tall = FakeBlock("wide", "b", (grid(64), grid(32))), FakeBlock("tall", "b", (grid(32), grid(64)))
    blocks = [*layers, wide, tall]
    home = priced_as(blocks)
    assert {home["a", layer.grids].name for layer in layers} == {"layer3"}
    assert home["a", layers[0].grids].grids == (tuple(range(8, 161, 8)), grid(64))
    assert home["b", wide.grids] is wide
    assert home["b", tall.grids] is tall
    assert [block.name for block in unique_blocks(blocks)] == ["layer3", "wide", "tall"]
    backend = FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure(blocks, backend)
        assert {name for name, _ in backend.log} == {"layer3", "wide", "tall"}
        for layer in layers:
            price = table.price(home["a", layer.grids], backend.fingerprint())
            errors = np.abs(dense(price, layer) / truth(layer) - 1)
            assert np.percentile(errors, 95) < 0.05
