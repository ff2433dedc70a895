"""How fast the outer cache forgets, because others use it too.

A server's cores share their last-level cache with other programs, whose data replaces a network's. Of 4 MiB
that were read once, two fifths had to be fetched from memory again after a pause of 4 ms, and all of it after
16 ms (a guest on an EPYC; docs: latency.md). So a slow network finds its weights gone, however small it is,
and the busier the machine, the sooner they go.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from smcp_fx.backends.base import Array, cache_bytes, inner_cache_bytes
from smcp_fx.backends.timing.measuring import (
    UNDISTURBED,
    Sample,
    Timer,
    calm,
    stopwatch,
    summarise,
    take_sample,
)
from smcp_fx.backends.timing.pace import pace

#: The share that is gone after t ms is 1 / (1 + (half / t) ** FADING). Fitted to shares after 0.5 to 16 ms (docs:
#: latency.md).
FADING = 1.8
#: Bytes to read: more than inner caches hold, and few compared with the outer one. Chosen, not measured.
_BYTES = 4 << 20
#: Pauses after which it is read. On a shared server, part of it is gone after each of them (docs: latency.md).
_PAUSES_MS = (1.0, 2.0, 4.0, 8.0)
#: Reads after each pause, and after emptying the caches; chosen so that all of it takes 0.3 s.
_RUNS, _COLD_RUNS = 12, 8
#: At most this many times as many reads if others take this core during a pause. Chosen, not measured.
_LONGER = 3
#: Shares nearer than this to 0 or 1 are too uncertain to compute a time from. Chosen, not measured.
_TELLING = 0.02
#: A cache that saves less than this on the whole read is as good as none. Chosen, not measured.
_LEAST_MS = 1e-3


def fading_half_ms() -> float:
    """Measure after how many ms half of the outer cache is replaced; inf if it stays. Takes 0.3 s."""
    read = stopwatch(_lines().max)
    for _ in range(_RUNS):
        read()
    cold = _median(evict_caches, read, _COLD_RUNS)
    for _ in range(_RUNS):
        read()
    hot = _median(read, read, 2 * _RUNS)
    gone = {
        pause: (_median(functools.partial(idle, pause), read, _RUNS) - hot) / max(cold - hot, _LEAST_MS)
        for pause in _PAUSES_MS
    }
    if max(gone.values()) <= _TELLING:
        return math.inf
    telling = {pause: share for pause, share in gone.items() if _TELLING < share < 1 - _TELLING}
    if not telling:  # all is gone after the shortest pause
        return float(min(_PAUSES_MS) * (_TELLING / (1 - _TELLING)) ** (1 / FADING))
    return float(
        np.median([pause * ((1 - share) / share) ** (1 / FADING) for pause, share in telling.items()])
    )


def evict_caches() -> None:
    """Read memory three times as large as the cache that networks outgrow, so that nothing else is left in it.

    One and a half times as much is not enough, as caches do not forget in the order in which they were filled:
    reading 4 MiB then took 0.169 ms, after three times as much 0.176 ms, and after four times 0.177 ms.
    """
    _eviction_buffer().max()


@functools.cache
def _eviction_buffer() -> Array:
    return np.ones(3 * cache_bytes() // 4, dtype=np.float32)


def displace_inner_caches() -> None:
    """Read memory four times as large as the inner caches, so that what they held is left in the outer one only."""
    _displacing_buffer().max()


@functools.cache
def _displacing_buffer() -> Array:
    return np.ones(4 * inner_cache_bytes() // 4, dtype=np.float32)


@functools.cache
def _lines() -> Array:
    """One number per cache line, of memory larger than the inner caches and smaller than the outer one."""
    return np.ones(min(_BYTES, cache_bytes() // 4) // 4, dtype=np.float32)[::16]


def _median(before: Callable[[], object], read: Timer, runs: int) -> float:
    """Return how long a read takes after ``before``, in ms.

    If another process had this core in between, it pushed out more than the machine's other cores do. Such reads are
    left out if there are enough others.
    """
    samples: list[Sample] = []
    while len(calm(samples, 0)) < runs and len(samples) < _LONGER * runs:
        cpu, wall = time.thread_time(), time.perf_counter()
        before()
        kept = time.thread_time() - cpu >= UNDISTURBED * (time.perf_counter() - wall)
        sample = take_sample(read, pace())
        samples.append(replace(sample, disturbed=sample.disturbed or not kept))
    return summarise(calm(samples, runs // 3), 0.0).median_ms


def idle(ms: float) -> None:
    """Wait without reading anything. (A thread that sleeps loses its core.)"""
    until = time.perf_counter() + 1e-3 * ms
    while time.perf_counter() < until:
        pass
