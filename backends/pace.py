"""How fast this core runs right now, compared with what it can.

A core's speed changes by a factor of up to two within milliseconds and for seconds, as its sibling thread (which
may be another machine's, to a guest) or the chip's other cores have work or not. The thread is not kept off its
core by that, so its own time shows nothing. A fixed piece of arithmetic, timed before and after a sample, does.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections import deque

import numpy as np

#: So many turns of the interpreter's loop take some microseconds, no library and no memory.
_TURNS = range(250)
#: Paces further than this from the usual one (as a ratio) are another state of the core.
TOLERANCE = 1.15
#: The state to measure in is the fastest that the core has for this share of the time: the slower ones are not one
#: state but many, and one that is frequent now and rare in an hour would give a table rows of two states.
_SHARE = 0.05
#: The usual pace is first taken from so long a while, then followed over so many samples.
_FIRST_MS = 1000.0
_REMEMBERED = 2000
#: A core that stays slow for this long is left for the next one that this thread may run on.
_LEAVE_MS = 20.0
#: A pace that does not come back within this is not the usual one any more.
_PATIENCE_MS = 3000.0


class Pace:
    """Tells whether the core is in its usual state. ``usual_ms``: what the fixed work takes then."""

    def __init__(self) -> None:
        start = time.perf_counter()
        first = [_fixed_work_ms()]
        while 1e3 * (time.perf_counter() - start) < _FIRST_MS:
            first.append(_fixed_work_ms())
        self._recent = deque(first[:: 1 + 2 * len(first) // _REMEMBERED], maxlen=_REMEMBERED)
        self._learn()

    def is_usual(self) -> bool:
        """Time the fixed work and compare; twice, where what ran before has left the caches to itself."""
        return self._fits(_fixed_work_ms()) or self._fits(_fixed_work_ms())

    def await_usual(self) -> None:
        """Wait until the core is in its usual state, or move to one that is.

        What it is in is the usual one if that takes seconds.
        """
        met = _fixed_work_ms()
        self._recent.append(met)  # what was met, not what is waited through
        self._since += 1
        if self._since >= _REMEMBERED // 4:
            self._learn()
        start = time.perf_counter()
        for core in itertools.cycle(_cores()):
            since = time.perf_counter()
            while 1e3 * (time.perf_counter() - since) < _LEAVE_MS:
                if self._fits(met):
                    return
                met = _fixed_work_ms()
            if 1e3 * (time.perf_counter() - start) >= _PATIENCE_MS:
                self._recent.clear()
                self._recent.append(met)
                self._learn()
            _move_to(core)

    def _fits(self, ms: float) -> bool:
        return 1 / TOLERANCE <= ms / self.usual_ms <= TOLERANCE

    def _learn(self) -> None:
        self.usual_ms, self._since = float(np.quantile(self._recent, _SHARE)), 0


@functools.cache
def pace() -> Pace:
    """Return this process's pace; the first call takes a second."""
    return Pace()


def _cores() -> list[int]:
    """The cores that this thread may run on; one, where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def _move_to(core: int) -> None:
    """Have this thread go on there, and stay as free as it was."""
    allowed = _cores()
    if core in allowed and len(allowed) > 1:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, allowed)


def _fixed_work_ms() -> float:
    start = time.perf_counter()
    total = 0
    for turn in _TURNS:
        total += turn
    return 1e3 * (time.perf_counter() - start)
