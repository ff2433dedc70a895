"""Repair on random networks; tools/check_random_networks.py --repair runs more."""

from __future__ import annotations

import pytest
import torch
from random_networks import random_network
from random_repair import check_repair


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= 10)) for first in range(0, 20, 10)]
)
def test_any_network_is_repaired_without_harm(first: int) -> None:
    repaired = 0
    for seed in range(first, first + 10):
        network = random_network(seed)
        print(f"random_network({seed}): {'; '.join(network.program)}")
        repaired += check_repair(network, torch.randn(2, 3, 8, 8), seed)
    assert repaired > 10
