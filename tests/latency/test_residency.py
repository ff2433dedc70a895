"""How cold a network's weights are, by its footprint and by the time between runs."""

from __future__ import annotations

import numpy as np
import pytest

from smcp_fx.errors import InputError
from smcp_fx.latency.residency import Residency

MB = 1 << 20


def test_share_rises_from_the_floor_to_one_around_the_cache() -> None:
    residency = Residency(16 * MB, steepness=6, floor=0.1)
    assert residency.share(0) == pytest.approx(0.1)
    assert residency.share(16 * MB) == pytest.approx(0.55)
    assert residency.share(1 << 40) == pytest.approx(1.0)
    sizes = np.geomspace(1e3, 1e9, 50)
    assert (np.diff([residency.share(size) for size in sizes]) >= 0).all()
    for size in (1 * MB, 12 * MB, 30 * MB):
        step = 1e-4 * size
        numeric = (residency.share(size + step) - residency.share(size - step)) / (2 * step)
        assert residency.slopes(size) == pytest.approx((numeric, 0.0), rel=1e-4)
    assert residency.slopes(0) == (0.0, 0.0)
    with pytest.raises(InputError, match="floor"):
        Residency(1.0, floor=1.0)


def test_share_rises_with_the_time_between_runs_where_others_use_the_cache() -> None:
    alone, shared = Residency(16 * MB, floor=0.1), Residency(16 * MB, floor=0.1, half_ms=5.0)
    assert alone.share(MB, 1e6) == alone.share(MB)
    assert shared.share(0.0, 5.0) == pytest.approx(0.55)
    assert shared.share(16 * MB, 5.0) == pytest.approx(1 - 0.9 * 0.5 * 0.5)
    times = np.geomspace(0.01, 1e3, 50)
    assert (np.diff([shared.share(MB, ms) for ms in times]) > 0).all()
    for size, ms in ((1 * MB, 1.0), (12 * MB, 4.0), (30 * MB, 20.0)):
        by_byte, by_ms = (
            (shared.share(size + a, ms + b) - shared.share(size - a, ms - b)) / (2 * (a + b))
            for a, b in ((1e-4 * size, 0.0), (0.0, 1e-4 * ms))
        )
        assert shared.slopes(size, ms) == pytest.approx((by_byte, by_ms), rel=1e-4)
    with pytest.raises(InputError, match="half_ms"):
        Residency(1.0, half_ms=0.0)


@pytest.mark.parametrize("size", [1 * MB, 14 * MB, 60 * MB])
@pytest.mark.parametrize("half_ms", [0.5, 3.0, 40.0])
def test_a_latency_is_that_of_the_share_which_it_leads_to(size: int, half_ms: float) -> None:
    residency = Residency(16 * MB, floor=0.1, half_ms=half_ms)
    ms = residency.latency(2.0, 5.0, size, 0.5)
    assert ms == pytest.approx(2.5 + 3.0 * residency.share(size, ms))
    # And the least such: below it a network that is in cache gets colder.
    for less in np.linspace(0.0, 0.999 * ms, 40):
        assert 2.5 + 3.0 * residency.share(size, less) > less


def test_latency_by_hand() -> None:
    residency = Residency(10.0, steepness=2, floor=0.0)
    assert residency.latency(2.0, 4.0, footprint=10.0, run_ms=0.5) == pytest.approx(0.5 + 2.0 + 1.0)


def test_what_is_assumed_before_networks_are_measured() -> None:
    """Of weights as large as the cache half come from memory, and of little ones after 0.7 of the time to forget."""
    assumed = Residency.of_cache(32 * MB, 4.0)
    warm = 1 - assumed.floor
    assert assumed.share(32 * MB) == pytest.approx(1 - warm / 2)
    assert assumed.share(0.0, 0.7 * 4.0) == pytest.approx(1 - warm / 2)
    assert Residency.of_cache(32 * MB).share(0.0, 1e6) == pytest.approx(assumed.floor)
