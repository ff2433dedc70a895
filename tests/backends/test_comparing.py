"""Two networks compared in rounds: when that ends, and what a machine that changes between rounds does to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from smcp_fx.backends import CompareConfig, compare, comparing
from smcp_fx.backends.base import Engine

#: Of a network of 100 ms and more: warm-up, and a round's untimed and timed runs.
WARM_UP, ROUND = 4, 12 + 3


class ByRound(Engine):
    """Takes so many ms in each round, warm-up being as the first."""

    def __init__(self, ms: Callable[[int], float]) -> None:
        self.ms, self.calls = ms, 0

    def run(self, inputs):
        raise AssertionError("only timed")

    def timer(self, inputs=None):
        def once() -> float:
            index = max(self.calls - WARM_UP, 0) // ROUND
            self.calls += 1
            return self.ms(index)

        return once


@pytest.fixture
def seconds(monkeypatch) -> list[float]:
    """How long a round takes: the clock is looked at once to begin with, and then before every round."""
    step, looks = [0.0], itertools.count()

    def tick() -> float:
        return step[0] * max(next(looks) - 1, 0)

    monkeypatch.setattr(comparing, "time", SimpleNamespace(perf_counter=tick))
    return step


def test_networks_that_repeat_take_the_fewest_rounds():
    dense, pruned = ByRound(lambda _: 200.0), ByRound(lambda _: 100.0)
    found = compare(dense, pruned, CompareConfig(rounds=4))
    assert (found.fraction, found.q1, found.q3, found.rounds, found.stable) == (0.5, 0.5, 0.5, 4, True)
    assert dense.calls == pruned.calls == WARM_UP + 4 * ROUND
    assert found.dense.repeats == found.pruned.repeats == 4 * 3


def test_a_moment_that_is_slow_for_both_changes_nothing():
    """In every other round everything takes twice as long."""

    def pace(index: int) -> float:
        return 2.0 if index % 2 else 1.0

    found = compare(ByRound(lambda i: 200 * pace(i)), ByRound(lambda i: 120 * pace(i)))
    assert (found.fraction, found.q1, found.q3, found.rounds) == pytest.approx((0.6, 0.6, 0.6, 5))
    assert not found.stable  # and its ms are not to be relied on


def test_fractions_that_scatter_take_more_rounds_until_their_median_is_known():
    """0.49, 0.5 or 0.51 in turn: quartiles 0.02 apart, so the standard error is 1.2533 * 0.02 / 1.349 / sqrt(n)."""
    scatter = (0.49, 0.5, 0.51)
    needed = (1.2533 * 0.02 / 1.349 / 0.003) ** 2  # 38.4 rounds
    found = compare(ByRound(lambda _: 200.0), ByRound(lambda i: 200 * scatter[i % 3]))
    assert found.rounds == 39 > needed > 38
    assert (found.q1, found.q3) == pytest.approx((0.49, 0.51))
    assert found.fraction == pytest.approx(0.5)
    rough = compare(
        ByRound(lambda _: 200.0), ByRound(lambda i: 200 * scatter[i % 3]), CompareConfig(error=0.01)
    )
    assert rough.rounds == 5


def test_no_round_begins_when_time_is_up_but_the_least(seconds):
    """Each round takes 4 s: 15 s are over after the fourth, and 1 s is over before the least are done."""
    seconds[0] = 4.0
    scatter = (0.4, 0.5, 0.6)
    engines = [(ByRound(lambda _: 200.0), ByRound(lambda i: 200 * scatter[i % 3])) for _ in range(2)]
    assert compare(*engines[0]).rounds == 4
    seconds[0] = 1e3
    assert compare(*engines[1], CompareConfig(seconds=1.0)).rounds == 3
