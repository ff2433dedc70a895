"""Waiting for the core's usual pace, on a core whose moments are written down."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from smcp_fx.backends.timing import pace as module
from smcp_fx.backends.timing.measuring import Sample, TimingConfig, measure_timers, take_sample
from smcp_fx.backends.timing.pace import Pace

FAST, SLOW = 0.02, 0.036
#: Other tests wait for no core.
WAITING = {name: getattr(Pace, name) for name in ("await_usual", "is_usual")}


class Core:
    """A core that is slow at some times of its clock (ms), which goes on by what works on it."""

    def __init__(self, slow: Callable[[float], bool]) -> None:
        self.slow = slow
        self.now_ms = 0.0
        self.moves: list[int] = []

    def work(self, ms: float) -> float:
        """What ``ms`` of work at full pace take now."""
        took = ms * (SLOW / FAST if self.slow(self.now_ms) else 1.0)
        self.now_ms += took
        return took

    def perf_counter(self) -> float:
        return self.now_ms / 1e3

    thread_time = perf_counter


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch):
    def install(slow: Callable[[float], bool]) -> Core:
        made = Core(slow)
        for name, method in WAITING.items():
            monkeypatch.setattr(Pace, name, method)
        monkeypatch.setattr(module, "time", made)
        monkeypatch.setattr(module, "_fixed_work_ms", lambda: made.work(FAST))
        monkeypatch.setattr("smcp_fx.backends.timing.measuring.time", made)
        monkeypatch.setattr(module, "_move_to", made.moves.append)
        monkeypatch.setattr(module, "_cores", lambda: [0, 1])
        return made

    return install


def test_the_usual_pace_is_the_fastest_that_is_not_rare(core) -> None:
    core(lambda ms: ms % 10 > 1)
    assert Pace().usual_ms == pytest.approx(FAST)
    core(lambda ms: ms % 100 > 2)
    assert Pace().usual_ms == pytest.approx(SLOW)


def test_a_slow_core_is_waited_for(core) -> None:
    at = core(lambda ms: 2000 <= ms < 2400)
    pace = Pace()
    at.now_ms = 2100.0
    assert not pace.is_usual()
    pace.await_usual()
    assert at.now_ms == pytest.approx(2400.0, abs=0.1)
    assert pace.is_usual()
    assert pace.usual_ms == pytest.approx(FAST)


def test_a_run_that_left_the_caches_to_itself_is_no_other_pace(core, monkeypatch) -> None:
    """The first fixed work behind such a run takes longer, as its code has to be fetched; the second does not."""
    core(lambda ms: False)
    pace = Pace()
    after = iter([1.5 * FAST, FAST])
    monkeypatch.setattr(module, "_fixed_work_ms", lambda: next(after))
    assert pace.is_usual()


def test_a_core_that_stays_slow_is_left(core) -> None:
    """Of two cores the first is slow for a second, the second is not."""
    at = core(lambda ms: 2000 <= ms < 3000 and at.moves[-1:] != [1])
    pace = Pace()
    at.now_ms = 2100.0
    pace.await_usual()
    assert at.moves == [0, 1]
    assert at.now_ms == pytest.approx(2140.0, abs=0.1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_a_thread_that_moved_may_run_where_it_might() -> None:
    before = os.sched_getaffinity(0)
    module._move_to(max(before))
    assert os.sched_getaffinity(0) == before
    module._move_to(max(before) + 1000)
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_faster_than_usual_is_in_another_state_too(core) -> None:
    at = core(lambda ms: ms < 2000)
    pace = Pace()
    assert pace.usual_ms == pytest.approx(SLOW)
    at.now_ms = 2000.0
    assert not pace.is_usual()


def test_patience_ends_and_what_is_timed_then_is_disturbed(core) -> None:
    """Three seconds are waited once; each sample after that tries both cores, and is no undisturbed one."""
    at = core(lambda ms: 2000 <= ms < 12000)
    pace = Pace()
    at.now_ms = 2000.0
    assert not pace.await_usual()
    assert at.now_ms == pytest.approx(2000.0 + 3000.0, abs=50.0)
    before = at.now_ms
    assert take_sample(lambda: at.work(1.0), pace).disturbed
    assert at.now_ms == pytest.approx(before + 2 * 20.0 + 1.0 * SLOW / FAST, abs=0.2)
    assert pace.usual_ms == pytest.approx(FAST)
    at.now_ms = 12000.0
    assert take_sample(lambda: at.work(1.0), pace) == Sample(1.0)
    at.slow = lambda ms: ms >= 13000
    at.now_ms = 13000.0
    assert not pace.await_usual()
    assert at.now_ms == pytest.approx(13000.0 + 3000.0, abs=50.0)  # patience is whole again


def test_a_pace_that_was_away_for_a_minute_is_not_the_usual_one_any_more(core) -> None:
    at = core(lambda ms: ms >= 2000)
    pace = Pace()
    at.now_ms = 2000.0
    while at.now_ms < 55000.0:
        pace.await_usual()
    assert pace.usual_ms == pytest.approx(FAST)
    while at.now_ms < 62000.0:
        pace.await_usual()
    assert pace.usual_ms == pytest.approx(SLOW)


def test_many_looks_in_a_short_slow_while_do_not_make_it_the_usual_one(core) -> None:
    """Samples of a tenth of a millisecond, 100,000 of them within ten slow seconds."""
    at = core(lambda ms: 2000 <= ms < 12000 and ms % 20 > 0.1)
    pace = Pace()
    at.now_ms = 2000.0
    while at.now_ms < 12000.0:
        take_sample(lambda: at.work(0.1), pace)
        assert pace.usual_ms == pytest.approx(FAST)


def test_what_is_usual_follows_what_is_met(core) -> None:
    """Begun in a long slow moment: once the faster pace was met for three seconds, that is the usual one."""
    at = core(lambda ms: ms < 1500 or ms % 10 > 7)
    pace = Pace()
    assert pace.usual_ms == pytest.approx(SLOW)
    at.now_ms = 1500.0
    while at.now_ms < 9000.0:
        pace.await_usual()
        at.work(1.7)
    assert pace.usual_ms == pytest.approx(FAST)


def test_a_sample_behind_which_the_pace_changed_is_disturbed(core) -> None:
    at = core(lambda ms: 2000 <= ms < 2005)
    pace = Pace()
    at.now_ms = 1998.0
    assert take_sample(lambda: at.work(1.0), pace) == Sample(1.0)
    assert take_sample(lambda: at.work(3.0), pace) == Sample(3.0, disturbed=True)
    assert take_sample(lambda: at.work(1.0), pace) == Sample(1.0)  # waited until 2005


def test_runs_at_another_pace_are_dropped_where_one_thread_computes_all(core, monkeypatch) -> None:
    """Slow for two thirds of the time: all quartiles are those of the rest."""
    at = core(lambda ms: ms % 50 > 15)
    pace = Pace()
    monkeypatch.setattr("smcp_fx.backends.timing.measuring.pace", lambda: pace)
    config = TimingConfig(min_repeats=6, max_repeats=6, attempts=1, warmup_window=1, settle=1, droppable=9.0)
    timers = [lambda: at.work(2.0), lambda: at.work(1.0)]
    paced = measure_timers(timers, config, cpu_bound=True)
    assert [m.q3_ms for m in paced] == pytest.approx([2.0, 1.0])
    assert all(m.stable for m in paced)
    few = replace(config, droppable=0.0, max_repeats=60, budget_ms=1e6)
    assert [m.q3_ms for m in measure_timers(timers, few, cpu_bound=True)] == pytest.approx([2.0, 1.0])
    plain = measure_timers(timers, config)
    assert plain[0].q3_ms > 3.0
