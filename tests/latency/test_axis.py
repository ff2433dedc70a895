"""What a latency is like along one width: steps, alignment, saws and ends that stand apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_latencies import cliffs, conv, dense, grid, sample, steps, truth

from smcp_fx.latency.sampling import SamplingConfig, plan_samples


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
