"""Masked equals sliced on random networks, in double precision; a failure names its seed and program."""

from __future__ import annotations

import pytest
import torch
from models import check_slicing
from random_networks import random_network


# The first hundred are part of every run; the others are marked slow. tools/check_random_networks.py runs more.
@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.slow] * (first >= 100)) for first in range(0, 160, 20)],
)
def test_slicing_is_exact(first: int) -> None:
    free = []
    for seed in range(first, first + 20):
        network = random_network(seed)
        print(f"random_network({seed}): {'; '.join(network.program)}")  # shown when the test fails
        prepared = check_slicing(network, (torch.randn(2, 3, 8, 8),), seeds=(seed,))
        free.append(prepared.channels.free_share)
    # A library that pinned everything would pass all comparisons.
    assert sum(free) / len(free) > 0.3


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= 40)) for first in range(0, 120, 20)]
)
def test_gates_and_tied_weights_in_unusual_places(first: int) -> None:
    free = []
    for seed in range(first, first + 20):
        network = random_network(seed, gates=True)
        print(f"random_network({seed}, gates=True): {'; '.join(network.program)}")
        prepared = check_slicing(network, (torch.randn(2, 3, 8, 8),), seeds=(seed,))
        free.append(prepared.channels.free_share)
    assert sum(free) / len(free) > 0.4


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= 20)) for first in range(0, 60, 20)]
)
def test_norms_and_statistics_over_channels(first: int) -> None:
    free = []
    for seed in range(first, first + 20):
        network = random_network(seed, statistics=True)
        print(f"random_network({seed}, statistics=True): {'; '.join(network.program)}")
        prepared = check_slicing(network, (torch.randn(2, 3, 8, 8),), seeds=(seed,))
        free.append(prepared.channels.free_share)
    assert sum(free) / len(free) > 0.6
