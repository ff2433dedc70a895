"""The search for a latency target: which networks are measured, which is kept, and what is asked for next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from smcp_fx.compiler.seeking import CLOSE, TRIES, aim_for, is_met, seek


@dataclass(frozen=True)
class Told:
    """A measured fraction, and its standard error."""

    fraction: float
    error: float = 0.001


@dataclass
class Network:
    """Predicted to cost ``predicted``; ``sessions`` tells what it measures each time."""

    predicted: float
    sessions: Iterator[float]
    measured: int = 0

    def measure(self) -> Told:
        self.measured += 1
        return Told(next(self.sessions))


def sought(
    asked: float, sessions: Callable[[float], Sequence[float]], known: Sequence[tuple[float, float]] = ()
) -> tuple[Network, float, bool, list[Network]]:
    """What `seek` returns, and every network that was solved for; ``sessions``: what one measures, by prediction."""
    networks: list[Network] = []

    def solve(predicted: float) -> Network:
        networks.append(Network(predicted, iter(sessions(predicted))))
        return networks[-1]

    return *seek(asked, solve(asked), solve, known), networks


def test_a_first_network_that_fits_in_two_sessions_ends_it() -> None:
    found, measured, met, networks = sought(0.5, lambda predicted: (0.498, 0.504))
    assert met and measured == pytest.approx(0.501)
    assert networks == [found] and (found.predicted, found.measured) == (0.5, 2)


def test_a_network_that_misses_is_measured_once_and_teaches_the_next_aim() -> None:
    found, measured, met, networks = sought(0.5, lambda predicted: (1.25 * predicted,) * 2)
    assert met and measured == pytest.approx(0.5)
    assert [n.predicted for n in networks] == pytest.approx([0.5, 0.4])
    assert [n.measured for n in networks] == [1, 2] and found is networks[1]


def test_a_second_session_that_misses_rules_a_network_out_and_teaches_the_next_aim_too() -> None:
    """Of the factors that two sessions of one network tell, 1 and 1.08, the middle (of logarithms) counts."""
    sessions = {500: (0.5, 0.54), 481: (0.5, 0.5)}
    _, measured, met, networks = sought(0.5, lambda predicted: sessions[round(1000 * predicted)])
    assert [n.predicted for n in networks] == pytest.approx([0.5, 0.5 / 1.08**0.5])
    assert met and measured == 0.5 and [n.measured for n in networks] == [2, 2]


def test_a_second_session_that_is_off_by_as_much_as_the_first_is_near_counts_with_it() -> None:
    _, measured, met, networks = sought(0.5, lambda predicted: (0.494, 0.514))
    assert met and len(networks) == 1 and measured == pytest.approx(0.504)


def test_what_was_measured_before_is_known() -> None:
    """Twice as much as predicted, and the first network misses: its successor is on the line through both."""
    _, _, met, networks = sought(0.5, lambda p: (0.9 * p**0.7,) * 2, [(1.0, 0.9)])
    assert met and networks[-1].predicted == pytest.approx((0.5 / 0.9) ** (1 / 0.7))


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("channels", range(2, 8))
def test_a_network_far_from_its_neighbours_is_found(channels: int, factor: float) -> None:
    """A layer narrowed by an eighth at a time: an aim gives the widest network within it, and most give the same."""
    shares: list[float] = []

    def solve(aim: float) -> Network:
        shares.append(max((k / 8 for k in range(1, 9) if k / 8 <= aim), default=1 / 8))
        return Network(shares[-1], iter((factor * shares[-1] + 0.004,) * 2))

    asked = factor * channels / 8
    _, measured, met = seek(asked, solve(asked), solve)
    assert met and measured == pytest.approx(asked, abs=CLOSE)
    assert len(shares) <= TRIES + 1


def test_where_nothing_fits_the_nearest_network_counts() -> None:
    """Networks beside a gap."""
    found, measured, met, networks = sought(0.5, lambda p: (0.53 if p >= 0.45 else 0.4,))
    assert len(networks) == TRIES + 1 and not met
    assert measured == 0.53 and found.predicted >= 0.45


def test_networks_that_all_miss_in_their_second_session_leave_the_nearest_mean() -> None:
    seconds = iter([0.55, 0.46, 0.53, 0.56, 0.45, 0.57])
    found, measured, met, networks = sought(0.5, lambda _: (0.5, next(seconds)))
    assert not met and all(n.measured == 2 for n in networks) and len(networks) == TRIES + 1
    assert found is networks[2] and measured == pytest.approx(0.515)


def test_a_miss_that_the_measurement_cannot_tell_is_none() -> None:
    for error in (0.0, 0.002, CLOSE / 2):  # sure enough: a point
        assert is_met(0.99 * CLOSE, error) and is_met(-0.99 * CLOSE, error)
        assert not is_met(1.01 * CLOSE, error)
    assert is_met(0.0139, 0.007) and not is_met(-0.0141, 0.007)  # two standard errors
    assert is_met(1.99 * CLOSE, 0.05) and not is_met(2.01 * CLOSE, 0.05)  # however unsure


def test_the_next_aim_by_hand() -> None:
    """One measurement gives a factor, near ones their median, and one far away the slope."""
    assert aim_for(0.5, [(0.5, 0.6)]) == pytest.approx(0.5 * 0.5 / 0.6)
    noisy = [(0.5, 0.5 * 1.2 * 1.04), (0.5, 0.5 * 1.2 / 1.04)]
    assert aim_for(0.5, noisy) == pytest.approx(0.5 / 1.2)
    outlier = [(0.5, 0.43), (0.53, 0.53 * 1.05), (0.54, 0.54 * 1.05)]
    assert aim_for(0.5, outlier) == pytest.approx(0.5 / 1.05)
    line = [(p, 0.9 * p**0.7) for p in (1.0, 0.5, 0.45, 0.42)]
    assert 0.9 * aim_for(0.3, line) ** 0.7 == pytest.approx(0.3)
    steep = [(1.0, 0.8), (0.5, 0.2)]  # beyond both no latency falls so fast: noise
    assert aim_for(0.1, steep) == pytest.approx(0.5 * (0.1 / 0.2) ** (1 / 1.25))
    # What is asked is passed on the way from the last to the first, only.
    between = [(0.9, 0.9), (0.4, 0.1), (0.1, 0.1)]
    assert aim_for(0.3, between) == pytest.approx(0.3)
    falling = [(0.4, 0.2), (0.8, 0.1)]  # more is not faster: noise, and no line to follow
    assert aim_for(0.15, falling) == pytest.approx(0.8 * 0.15 / 0.1)


def test_a_cliff_is_closed_in_on() -> None:
    """Latencies that grow by 0.7 within a quarter (weights no longer stay in cache): each aim lies between.

    Between what measured below and what measured above, and one of ``TRIES`` is close enough.
    """

    def measured(predicted: float) -> float:
        return predicted * (1.0 + 0.7 / (1.0 + (0.212 / predicted) ** 20))

    tried = [(0.3, measured(0.3))]
    for _ in range(TRIES):
        aim = aim_for(0.3, tried)
        below = [p for p, m in tried if m < 0.3]
        above = [p for p, m in tried if m > 0.3]
        assert max(below, default=0.0) < aim < min(above)
        tried.append((aim, measured(aim)))
    assert min(abs(m - 0.3) for _, m in tried) <= CLOSE
