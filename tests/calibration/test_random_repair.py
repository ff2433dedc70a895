"""Repair on random networks; tools/check_random_networks.py --repair runs more."""

from __future__ import annotations

import pytest
import torch
from random_networks import random_network, richest
from random_repair import check_repair


@pytest.mark.parametrize("place", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(4)])
def test_any_network_is_repaired_without_harm(place: int) -> None:
    _, seed = richest([({}, 20)], most=4)[place]
    network = random_network(seed)
    print(f"random_network({seed}): {'; '.join(network.program)}")
    assert check_repair(network, torch.randn(2, 3, 8, 8), seed) > 3
