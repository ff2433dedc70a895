"""How a runtime counts channels: steps, saws, other paths, told by few rows of several blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_latencies import grid, over, steps, whole

from smcp_fx.latency.scale import SCALES, Scale, kind_of
from smcp_fx.latency.surface import Surface, choose_scales

SIZES = (64, 128, 192, 256, 512)


def told(latency: Callable[..., float], grids_of: Callable, noise: float = 0.01, seed: int = 0):
    """The scales of blocks of several sizes, a row's noise given, and the blocks."""
    rng = np.random.default_rng(seed)
    blocks = [
        (grids, {p: ms * rng.lognormal(0, noise) for p, ms in whole(grids, latency).items()})
        for grids in map(grids_of, SIZES)
    ]
    return choose_scales(blocks), blocks


def worst(scales, blocks, latency: Callable[..., float]) -> float:
    """The 95th percentile of the errors over the blocks' whole grids."""
    errors = [
        np.abs(over(Surface(grids, rows, scales)) / np.vectorize(latency)(*np.ix_(*map(np.array, grids))) - 1)
        for grids, rows in blocks
    ]
    return float(np.percentile(np.concatenate([e.ravel() for e in errors]), 95))


@pytest.mark.parametrize(
    ("latency", "step"),
    [
        (lambda c: 1e-2 + 3e-4 * steps(c), 16),
        (lambda c: 1e-2 + 3e-4 * steps(c, 32), 32),
        (lambda c: 1e-2 + 3e-4 * c, 1),
    ],
)
def test_steps_are_told_from_slopes_in_noise(latency: Callable[[int], float], step: int) -> None:
    found = [told(latency, lambda size: (grid(size),), seed=seed)[0][0].step for seed in range(10)]
    assert sum(one == step for one in found) >= 8


def test_steps_of_both_widths_are_found_and_prices_follow_them() -> None:
    def latency(x: int, y: int) -> float:
        return 0.01 + 1e-3 * steps(x) + 1e-4 * steps(x) * steps(y)

    scales, blocks = told(latency, lambda size: (grid(size), grid(size)))
    assert [scale.step for scale in scales] == [16, 16]
    assert worst(scales, blocks, latency) < 0.05


def saw(c: int, unit: int = 16) -> float:
    """Units that come four at a time: the first of them brings 56% of what four do, as convolutions measured."""
    rounds, part = divmod(-(-c // unit), 4)
    return 4 * unit * (rounds + (0.0, 0.56, 0.74, 0.87)[part])


def test_a_saw_is_found() -> None:
    def latency(x: int, y: int) -> float:
        return 0.02 + 1e-4 * steps(x) * saw(y)

    scales, blocks = told(latency, lambda size: (grid(size), grid(size)))
    assert (scales[1].step, scales[1].saw, scales[0].saw) == (16, True, False)
    assert worst(scales, blocks, latency) < 0.05


def sums_of_groups(full: int) -> tuple[int, ...]:
    """As ShuffleNet's streams: groups of odd sizes, each kept whole or at a multiple of 8."""
    sums = {0}
    for size in (7, 7, 15, 29, full - 58):
        sums = {a + b for a in sums for b in (*grid(size), size)}
    return tuple(sorted({*grid(full), *sums}))


def test_widths_that_no_vector_divides_are_priced_by_their_own() -> None:
    """Depthwise convolutions whose channels four does not divide take up to 36 times as long."""

    def latency(c: int) -> float:
        return 1e-3 + 5e-6 * c if c % 4 == 0 else 1e-2 + 1.5e-4 * c

    scales, blocks = told(latency, lambda size: (sums_of_groups(size + 64),))
    assert scales[0].aligned == 4
    assert worst(scales, blocks, latency) < 0.06


@pytest.mark.parametrize("scale", SCALES)
def test_widths_stay_in_order_along_every_scale(scale: Scale) -> None:
    along = scale.coordinate(np.arange(1, 600))
    assert (np.diff(along) >= -1e-9).all() and (along > 0).all()


def test_blocks_of_one_kind_are_alike_in_their_first_operation() -> None:
    def signature(operation: str, kernel: str = "(3, 3)", groups: str = "1", more: str = "relu") -> str:
        step = (
            f'{{"operation": "{operation}", "module": {{"kernel_size": "{kernel}", "groups": "{groups}"}}}}'
        )
        return f'{{"steps": [{step}, {{"operation": "{more}"}}], "inputs": []}}'

    convolution = kind_of(signature("conv2d"))
    assert kind_of(signature("conv2d", more="add")) == convolution
    assert len({convolution, *map(kind_of, (
        signature("conv2d", "(1, 1)"), signature("conv2d", groups="depthwise"), signature("linear"), '{"op": "conv"}',
    ))}) == 5  # fmt: skip
