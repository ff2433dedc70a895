"""How fast the outer cache forgets, because others use it, too.

A server's cores share their last-level cache with whoever runs beside them. What a network leaves there is pushed out
while it does something else: of 4 MiB that were read once, two fifths came from memory again after 4 ms of reading
nothing, and all after 16 ms (a guest on an EPYC; docs: Latency). So a network that takes long finds its weights
gone however small it is, and a busy hour is one in which that goes faster.
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

#: What is gone after t ms: 1 / (1 + (half / t) ** FADING). By the shares after 0.5 to 16 ms (docs: Latency).
FADING = 1.8
#: What is read: larger than inner caches, and small beside the outer one.
_BYTES = 4 << 20
#: Pauses behind which it is read: shares after them are neither nothing nor all on a shared server (docs: Latency).
_PAUSES_MS = (1.0, 2.0, 4.0, 8.0)
#: Reads behind each pause, and behind emptied caches; chosen so that all of it takes 0.3 s.
_RUNS, _COLD_RUNS = 12, 8
#: So many times as many, at most, where others take this thread's core during a pause.
_LONGER = 3
#: Shares nearer than this to nothing or to all tell no more than that. Chosen, not measured.
_TELLING = 0.02
#: A cache that is faster than memory by less, for all those lines, is as good as none. Chosen, not measured.
_LEAST_MS = 1e-3


def fading_half_ms() -> float:
    """Measure after how many ms half of what the outer cache held is gone; inf where it stays. Takes 0.3 s."""
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
    if not telling:  # all gone after the shortest
        return float(min(_PAUSES_MS) * (_TELLING / (1 - _TELLING)) ** (1 / FADING))
    return float(
        np.median([pause * ((1 - share) / share) ** (1 / FADING) for pause, share in telling.items()])
    )


def evict_caches() -> None:
    """Read through memory three times as large as the cache that networks outgrow, which leaves nothing else in it.

    Half again as much is not quite enough: caches do not forget in the order in which they were filled. (4 MiB read
    once took 0.169 ms then, 0.176 behind three times as much and 0.177 behind four.)
    """
    _eviction_buffer().max()


@functools.cache
def _eviction_buffer() -> Array:
    return np.ones(3 * cache_bytes() // 4, dtype=np.float32)


def displace_inner_caches() -> None:
    """Read through memory four times as large as the inner caches: what they held waits in the outer one then."""
    _displacing_buffer().max()


@functools.cache
def _displacing_buffer() -> Array:
    return np.ones(4 * inner_cache_bytes() // 4, dtype=np.float32)


@functools.cache
def _lines() -> Array:
    """One number of each line of some memory that is larger than inner caches and smaller than the outer one."""
    return np.ones(min(_BYTES, cache_bytes() // 4) // 4, dtype=np.float32)[::16]


def _median(before: Callable[[], object], read: Timer, runs: int) -> float:
    """Return what a read takes behind ``before``, in ms.

    Reads behind which another process had this core meanwhile are left out where there are enough others: what that
    one used has pushed more out than the machine's other cores do.
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
    """Wait, reading nothing; asleep the thread would lose its core."""
    until = time.perf_counter() + 1e-3 * ms
    while time.perf_counter() < until:
        pass
