"""The measurement loop: warm-up, turns, repeats, and what is thrown away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from smcp_fx.backends.timing.measuring import (
    Sample,
    TimingConfig,
    measure_timers,
    summarise,
    take_sample,
    warm_up,
)
from smcp_fx.errors import InputError

FAST = TimingConfig(min_repeats=2, max_repeats=3, budget_ms=1, attempts=1, warmup_ms=1)


class Machine:
    """Stands for `time`: only what runs takes time, and only what is said of it."""

    def __init__(self) -> None:
        self.wall_ms = self.cpu_ms = 0.0

    def perf_counter(self) -> float:
        return 1e-3 * self.wall_ms

    def thread_time(self) -> float:
        return 1e-3 * self.cpu_ms

    def run(self, ms: float, cpu_ms: float | None = None) -> float:
        self.wall_ms += ms
        self.cpu_ms += ms if cpu_ms is None else cpu_ms
        return ms


MACHINE = Machine()


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr("smcp_fx.backends.timing.measuring.time", MACHINE)


class Clock:
    """A timer of runs that take the given ms, and counts."""

    def __init__(self, *ms: float, log: list[str] | None = None, name: str = "") -> None:
        self.ms, self.calls, self.log, self.name = list(ms), 0, log, name

    def __call__(self) -> float:
        self.calls += 1
        if self.log is not None:
            self.log.append(self.name)
        return MACHINE.run(self.ms.pop(0) if len(self.ms) > 1 else self.ms[0])


def test_median_and_quartiles():
    m = summarise([Sample(ms) for ms in (1.0, 2.0, 3.0, 4.0, 100.0)], spread_limit=1.0)
    assert (m.q1_ms, m.median_ms, m.q3_ms, m.repeats, m.stable) == (2.0, 3.0, 4.0, 5, True)
    assert m.spread == pytest.approx(2 / 3)
    assert not summarise([Sample(ms) for ms in (1.0, 2.0, 3.0, 4.0)], spread_limit=0.1).stable
    assert not summarise([Sample(1.0, True), Sample(1.0, True), Sample(1.0)], 0.1).stable


def test_warm_up_ends_when_runs_agree():
    config = TimingConfig(warmup_window=1, warmup_tolerance=0.1, warmup_ms=1e6)
    assert warm_up(Clock(9, 5, 3, 2, 1.9, 1.9), config) == 5


def test_timers_take_turns_that_begin_with_untimed_runs():
    log: list[str] = []
    config = TimingConfig(
        min_repeats=4, max_repeats=4, attempts=1, warmup_window=1, settle=3, settle_ms=1e6, burst=2
    )
    a, b = Clock(1.0, log=log, name="a"), Clock(2.0, log=log, name="b")
    first, second = measure_timers([a, b], config)
    assert "".join(log) == "aabb" + "aaaaabbbbb" * 2
    assert (first.median_ms, second.median_ms, first.repeats) == (1.0, 2.0, 4)


def test_untimed_runs_are_not_timed_and_end_with_their_time():
    """Each turn is dear at first: 9 and 9 ms untimed, then 1 ms."""
    turn = [9.0, 9.0, 1.0, 1.0]
    config = TimingConfig(min_repeats=4, max_repeats=4, attempts=1, warmup_window=1, settle=2, burst=2)
    measured, _ = measure_timers([Clock(9.0, 9.0, *turn, *turn), Clock(1.0)], config)
    assert (measured.median_ms, measured.q3_ms) == (1.0, 1.0)

    config = TimingConfig(min_repeats=1, max_repeats=1, attempts=1, warmup_window=1, settle_ms=1.0, burst=1)
    slow = Clock(2.0)
    measure_timers([slow, Clock(1.0)], config)
    assert slow.calls == 2 + 1 + 1  # warm-up, one untimed, one timed


def test_a_clock_of_whole_steps_is_averaged():
    """Three of ten runs of 2.3 steps show as 3: the median would say 2."""
    samples = [Sample(0.002)] * 7 + [Sample(0.003)] * 3
    m = summarise(samples, spread_limit=0.05, resolution_ms=0.001)
    assert m.median_ms == pytest.approx(0.0023)
    assert m.stable
    assert summarise([*samples, Sample(5.0)], 0.05, 0.001).median_ms == pytest.approx(0.0023)
    assert not summarise([Sample(0.002), Sample(0.012)] * 5, 0.05, 0.001).stable
    assert not summarise(samples, spread_limit=0.05).stable


def test_an_unstable_set_is_taken_again_and_then_said_to_be_unstable():
    config = TimingConfig(min_repeats=4, max_repeats=4, attempts=3, spread_limit=0.05, warmup_window=1)
    calm_later = Clock(1, 1, *(1, 2, 1, 2), *(1, 1, 1, 1), 5)
    (m,) = measure_timers([calm_later], config)
    assert (m.median_ms, m.stable, calm_later.calls) == (1.0, True, 10)
    (m,) = measure_timers([Clock(1, 1, *(1, 5, 1, 5), *(1, 2, 1, 2), *(1, 4, 1, 4))], config)
    assert (m.q3_ms - m.q1_ms, m.stable) == (1.0, False)


def test_repeats_follow_the_budget():
    config = TimingConfig(min_repeats=3, max_repeats=50, budget_ms=100, warmup_window=1)
    assert measure_timers([Clock(10.0)], config)[0].repeats == 10
    assert measure_timers([Clock(90.0)], config)[0].repeats == 3
    assert measure_timers([Clock(0.1)], config)[0].repeats == 50
    assert measure_timers([], config) == []


def test_a_thread_that_had_no_core_is_noticed():
    steady = SimpleNamespace(await_usual=lambda: True, is_usual=lambda: True)
    kept_off = take_sample(lambda: MACHINE.run(20.0, cpu_ms=5.0), steady)
    assert (kept_off.ms, kept_off.disturbed) == (pytest.approx(5.0), True)
    assert take_sample(lambda: MACHINE.run(20.0, cpu_ms=5.0)) == Sample(20.0)
    assert take_sample(lambda: MACHINE.run(20.0, cpu_ms=19.5), steady) == Sample(20.0)
    unsteady = SimpleNamespace(await_usual=lambda: True, is_usual=lambda: False)
    assert take_sample(lambda: MACHINE.run(20.0), unsteady) == Sample(20.0, disturbed=True)


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="min_repeats"):
        TimingConfig(min_repeats=5, max_repeats=4)
    with pytest.raises(InputError, match="attempts"):
        TimingConfig(attempts=0)
