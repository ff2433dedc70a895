"""Masked equals sliced on random networks, in double precision; a failure names its seed and program."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from models import check_slicing
from random_networks import random_network

#: How many networks of each family are looked at, the richest in kinds first.
FAMILIES: list[tuple[dict[str, bool], int]] = [({"gates": True}, 120), ({"statistics": True}, 60), ({}, 160)]
PARTS = 8


@functools.cache
def chosen() -> list[tuple[dict[str, bool], int]]:
    """Family and seed of the networks that have a kind of step which none before them has."""
    seen: set[str] = set()
    found = []
    for family, seeds in FAMILIES:
        for seed in range(seeds):
            kinds = {re.split(r"[\d(]", step)[0] for step in random_network(seed, **family).program}
            if not kinds <= seen:
                found.append((family, seed))
            seen |= kinds
    assert len(seen) > 300
    return found


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
