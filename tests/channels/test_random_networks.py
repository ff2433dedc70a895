"""Masked equals sliced on random networks, in double precision; a failure names its seed and program."""

from __future__ import annotations

import functools

import pytest
import torch
from models import check_slicing
from random_networks import Family, random_network, richest

#: How many networks of each family the few below are taken from.
FAMILIES: list[tuple[Family, int]] = [({"gates": True}, 120), ({"statistics": True}, 60), ({}, 160)]
PARTS = 8


@functools.cache
def chosen() -> list[tuple[Family, int]]:
    return richest(FAMILIES)


# tools/check_random_networks.py runs thousands.
@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] * (p > 0)) for p in range(PARTS)])
def test_slicing_is_exact(part: int) -> None:
    free = []
    for family, seed in chosen()[part::PARTS]:
        network = random_network(seed, **family)
        print(
            f"random_network({seed}, **{family}): {'; '.join(network.program)}"
        )  # shown when the test fails
        prepared = check_slicing(network, (torch.randn(2, 3, 8, 8),), seeds=(seed,))
        free.append(prepared.channels.free_share)
    # A library that pinned everything would pass all comparisons.
    assert sum(free) / len(free) > 0.4
