"""How fast the outer cache forgets, from reads after pauses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from smcp_fx.backends import base
from smcp_fx.backends.timing import fading
from smcp_fx.backends.timing.measuring import Sample, Timer


class Machine:
    """A cache that others take half of in ``half_ms``; what is read after that tells how much came from memory."""

    def __init__(self, half_ms: float, hot_ms: float = 0.05, cold_ms: float = 0.17) -> None:
        self.half_ms, self.hot_ms, self.cold_ms = half_ms, hot_ms, cold_ms
        self.since = 0.0

    def evict(self) -> None:
        self.since = math.inf

    def idle(self, ms: float) -> None:
        self.since += ms

    def sample(self, timer: Timer, pace: object = None) -> Sample:
        gone = 1.0 if math.isinf(self.since) else 0.0
        if 0 < self.since < math.inf:
            gone = 1 / (1 + (self.half_ms / self.since) ** fading.FADING)
        self.since = 0.0
        return Sample(self.hot_ms + gone * (self.cold_ms - self.hot_ms))

    def measured(self, monkeypatch: pytest.MonkeyPatch) -> float:
        monkeypatch.setattr(fading, "evict_caches", self.evict)
        monkeypatch.setattr(fading, "idle", self.idle)
        monkeypatch.setattr(fading, "take_sample", self.sample)
        return fading.fading_half_ms()


@pytest.mark.parametrize("half_ms", [1.0, 3.0, 5.0, 12.0, 30.0])
def test_the_time_after_which_half_is_gone(half_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(half_ms).measured(monkeypatch) == pytest.approx(half_ms, rel=0.02)


def test_pauses_in_which_another_process_had_the_core_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three are such: of these all is gone, whatever the cache does."""
    machine, clock = Machine(4.0), Clock()

    def idle(ms: float) -> None:
        clock.pauses += 1
        machine.since += ms
        clock.wall += ms
        if clock.pauses % 3:
            machine.since = math.inf
            clock.wall += 50.0
        clock.cpu += ms

    monkeypatch.setattr(machine, "idle", idle)
    monkeypatch.setattr(fading, "time", clock)
    assert machine.measured(monkeypatch) == pytest.approx(4.0, rel=0.02)


class Clock:
    """Stands for `time`: what passes, and what the thread computes, is set by hand."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.pauses = 0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu


def test_a_cache_of_ones_own_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(math.inf).measured(monkeypatch) == math.inf
    assert Machine(math.inf, cold_ms=0.05).measured(monkeypatch) == math.inf  # memory as fast as cache


def test_what_is_read_is_larger_than_inner_caches_and_smaller_than_the_outer_one() -> None:
    inner, outer = base.inner_cache_bytes(), base.cache_bytes()
    fading.displace_inner_caches()
    assert fading._displacing_buffer().nbytes >= 2 * inner
    lines = fading._lines()
    assert lines.strides == (64,)
    assert lines.size * 64 <= outer // 2
    assert fading.fading_half_ms() > 0


def test_caches_by_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 KiB, 2 MiB, 32 MiB and an outer one of 300 MiB networks outgrow the third."""
    monkeypatch.setattr(base, "_CACHES", tmp_path)
    assert (base.cache_bytes(), base.inner_cache_bytes()) == (32 << 20, 1 << 20)  # the kernel does not tell
    for index, size in enumerate(("48K", "2048K", "32768K", "307200K", "none")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert (base.cache_bytes(), base.inner_cache_bytes()) == (32 << 20, 2 << 20)
