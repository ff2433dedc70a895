"""Comparisons of a few rounds, for tests that judge no latency (those of `compare` do)."""

from __future__ import annotations

import functools

import pytest

from smcp_fx.backends import CompareConfig, compare
from smcp_fx.compiler import measuring, pipeline


def compare_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let the compile run compare for three rounds, and no more until they agree."""
    brief = functools.partial(compare, config=CompareConfig(rounds=3, seconds=0.0, longest_seconds=0.0))
    for module in (measuring, pipeline):
        patch.setattr(module, "compare", brief)
