"""Repair on random networks; tools/check_random_networks.py --repair runs more."""

from __future__ import annotations

import pytest
import torch
from random_networks import random_network, richest
from random_repair import check_repair

PARTS = 2


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] * (p > 0)) for p in range(PARTS)])
def test_any_network_is_repaired_without_harm(part: int) -> None:
    repaired = 0
    for _, seed in richest([({}, 20)])[part::PARTS]:
        network = random_network(seed)
        print(f"random_network({seed}): {'; '.join(network.program)}")
        repaired += check_repair(network, torch.randn(2, 3, 8, 8), seed)
    assert repaired > 10
