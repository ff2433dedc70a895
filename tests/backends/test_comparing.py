"""Two networks compared in rounds: when that ends, and what a machine that changes between rounds does to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from smcp_fx.backends import CompareConfig, compare
from smcp_fx.backends.base import Engine
from smcp_fx.backends.timing import comparing
from smcp_fx.errors import InputError

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

    def reload(self):
        return ByRound(self.ms)


@pytest.fixture
def seconds(monkeypatch) -> list[float]:
    """How long a round takes: the clock is looked at once to begin with, and then before every round."""
    step, looks, now = [0.0], itertools.count(), [0.0]

    def tick() -> float:
        now[0] += step[0] * (next(looks) > 1)
        return now[0]

    monkeypatch.setattr(comparing, "time", SimpleNamespace(perf_counter=tick))
    return step


def test_networks_that_repeat_take_the_fewest_rounds(seconds):
    dense, pruned = ByRound(lambda _: 200.0), ByRound(lambda _: 100.0)
    found = compare(dense, pruned, CompareConfig(rounds=4, seconds=0.0))
    assert (found.fraction, found.q1, found.q3, found.error, found.rounds) == (0.5, 0.5, 0.5, 0.0, 4)
    assert dense.calls == pruned.calls == WARM_UP + 4 * ROUND
    assert (found.dense.median_ms, found.pruned.median_ms) == (200.0, 100.0)
    assert found.dense.repeats == found.pruned.repeats == 4 * 3


def test_networks_that_repeat_are_not_left_to_one_moments_luck(seconds):
    seconds[0] = 0.2
    assert compare(ByRound(lambda _: 200.0), ByRound(lambda _: 100.0), CompareConfig(seconds=1.5)).rounds == 8


def test_a_moment_that_is_slow_for_both_changes_no_fraction(seconds):
    """In every other round everything takes twice as long."""
    seconds[0] = 1.0

    def pace(index: int) -> float:
        return 2.0 if index % 2 else 1.0

    found = compare(ByRound(lambda i: 200 * pace(i)), ByRound(lambda i: 120 * pace(i)))
    assert (found.fraction, found.q1, found.q3, found.rounds) == pytest.approx((0.6, 0.6, 0.6, 5))
    assert not found.dense.stable and not found.pruned.stable  # the ms are not to be relied on


def test_a_change_between_two_turns_moves_one_round(seconds):
    """Everything takes twice as long from the pruned network's third turn on: 120 over 200 ms, all but once."""
    seconds[0] = 1.0
    found = compare(
        ByRound(lambda i: 200.0 if i < 3 else 400.0), ByRound(lambda i: 120.0 if i < 2 else 240.0)
    )
    assert (found.fraction, found.q1, found.q3, found.rounds) == pytest.approx((0.6, 0.6, 0.6, 5))


def test_fractions_that_scatter_take_more_rounds_until_their_median_is_known(seconds):
    """0.49, 0.5 or 0.51 in turn: quartiles 0.02 apart, so the standard error is 1.2533 * 0.02 / 1.349 / sqrt(n)."""
    seconds[0] = 0.25
    scatter = (0.49, 0.5, 0.51)
    needed = (1.2533 * 0.02 / 1.349 / 0.003) ** 2  # 38.4 rounds
    found = compare(ByRound(lambda _: 200.0), ByRound(lambda i: 200 * scatter[i % 3]))
    assert found.rounds == 39 > needed > 38
    assert (found.fraction, found.q1, found.q3) == pytest.approx((0.5, 0.49, 0.51))
    assert found.error == pytest.approx(0.003 * (needed / 39) ** 0.5, rel=1e-3)
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
    found = compare(*engines[1], CompareConfig(longest_seconds=1.0))
    assert found.rounds == 3
    assert found.error > CompareConfig.error


def test_impossible_settings_are_refused():
    for rounds, late in ((2, 3), (5, 0)):
        with pytest.raises(InputError, match="1 <= late_rounds <= rounds"):
            CompareConfig(rounds=rounds, late_rounds=late)
