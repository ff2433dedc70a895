"""The latency benchmark's networks: those that calibrate are of sizes spread evenly."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from latency_networks import SMALLEST, Network  # noqa: E402

sys.path[:] = _PATH

WIDTHS = {"a": 400, "b": 600, "c": 1000}


def weights(counts: Mapping[str, int]) -> float:
    """Three layers in a row: what goes in times what comes out of each."""
    return 3.0 * counts["a"] + counts["a"] * counts["b"] + counts["b"] * counts["c"]


def network() -> Network:
    groups = [
        SimpleNamespace(name=name, free=True, permitted=tuple(range(1, size + 1)))
        for name, size in WIDTHS.items()
    ]
    prepared: Any = SimpleNamespace(channels=SimpleNamespace(groups=groups))
    cost: Any = SimpleNamespace(
        full_counts=WIDTHS, whole=lambda counts: SimpleNamespace(weight_bytes=weights(counts))
    )
    return Network(prepared, cost, ())


@pytest.mark.parametrize("number", [2, 5, 12])
def test_sizes_fall_evenly_from_the_dense_networks(number: int) -> None:
    found = network().sizes(number)
    assert len(found) == number and found[0] == WIDTHS
    assert found == network().sizes(number)
    for name, size in WIDTHS.items():
        assert all(1 <= counts[name] <= size for counts in found)
        assert SMALLEST / 2 * size - 1 <= found[-1][name] <= SMALLEST * 1.5 * size + 1
    evenly = np.geomspace(weights(WIDTHS), weights(found[-1]), number)
    # A share moves each group by a unit at a time, a fiftieth of the smallest; nothing exceeds what is wanted.
    for counts, wanted in list(zip(found, evenly, strict=True))[1:-1]:
        assert 0.96 * wanted <= weights(counts) <= wanted


def test_random_prunings_are_other_networks_and_repeat() -> None:
    found = [network().random_counts(index) for index in range(1, 21)]
    assert found == [network().random_counts(index) for index in range(1, 21)]
    assert len({tuple(counts.values()) for counts in (*found, *network().sizes(12))}) == 32
