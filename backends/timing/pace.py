"""How fast this core runs right now, compared with its usual speed.

A core's speed changes by a factor of up to two, from one millisecond to the next and for seconds, depending on the
work of its sibling thread and of the chip's other cores. (A guest's sibling may belong to another guest.) The thread
keeps its core all the while, so its own CPU time does not show it. A fixed piece of arithmetic, timed before and
after a sample, does.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections import deque

import numpy as np

#: The fixed work: this many turns of a loop in C, which take some microseconds and no memory. (An interpreted
#: loop allocates numbers, and its speed drifted by a fifth within a process as the heap changed.)
_TURNS = 2500
#: A pace further than this from the usual one (as a ratio) is another state of the core. With this check, the
#: held-out errors of a table that was measured on a busy machine fell to a third.
TOLERANCE = 1.1
#: We measure in the fastest state that the core was in for at least this share of the last minute. There are many
#: slower states, and one that is common now may be rare in an hour: a table would mix rows of two states. Rows
#: measured while the core was fast for a tenth of the time equalled those measured at three quarters, within 1 to 4
#: %.
_SHARE = 0.05
#: A minute is this many looks at the pace, at least this far apart. Time without measurements does not count.
_LOOKS, _BETWEEN_MS = 6000, 10.0
#: The usual pace is first learned in this time, as if the whole minute before had been like it, and again
#: after this many looks. If it was learned in 300 ms, it was sometimes that of a slow state.
_FIRST_MS = 1000.0
_LEARN_AFTER = 100
#: If a core stays slow for this long, the thread moves to the next one that it may run on. Chosen, not measured.
_LEAVE_MS = 20.0
#: After waiting this long in vain, every core is tried only once before each sample. Such samples count as disturbed
#: until the usual pace is back or has been learned anew. Chosen, not measured.
_PATIENCE_MS = 3000.0


class Pace:
    """Tells whether the core is in its usual state. ``usual_ms``: how long the fixed work takes then."""

    def __init__(self) -> None:
        start = time.perf_counter()
        first = [_fixed_work_ms()]
        while 1e3 * (time.perf_counter() - start) < _FIRST_MS:
            first.append(_fixed_work_ms())
        alike = np.linspace(0, len(first), _LOOKS, endpoint=False).astype(int)
        self._looks = deque((first[i] for i in alike), maxlen=_LOOKS)
        self._looked = time.perf_counter()
        self._waited_ms = 0.0
        self._learn()

    def is_usual(self) -> bool:
        """Time the fixed work and compare; try twice, as earlier work may have evicted it from the caches."""
        return self._fits(_fixed_work_ms()) or self._fits(_fixed_work_ms())

    def await_usual(self) -> bool:
        """Wait until the core is in its usual state, or move to one that is. Return whether that worked."""
        cores = _cores()
        for tried, core in enumerate(itertools.cycle(cores), start=1):
            since = time.perf_counter()
            while (waited_ms := 1e3 * (time.perf_counter() - since)) < _LEAVE_MS:
                if self._fits(self._look()):
                    self._waited_ms = 0.0
                    return True
            self._waited_ms += waited_ms
            _move_to(core)
            if tried >= len(cores) and self._waited_ms >= _PATIENCE_MS:
                break
        return False

    def _look(self) -> float:
        """Time the fixed work, and remember it if the last one remembered was long enough ago."""
        met, now = _fixed_work_ms(), time.perf_counter()
        if 1e3 * (now - self._looked) >= _BETWEEN_MS:
            self._looks.append(met)
            self._looked = now
            self._since += 1
            if self._since >= _LEARN_AFTER:
                self._learn()
        return met

    def _fits(self, ms: float) -> bool:
        return 1 / TOLERANCE <= ms / self.usual_ms <= TOLERANCE

    def _learn(self) -> None:
        self.usual_ms, self._since = float(np.quantile(self._looks, _SHARE)), 0


@functools.cache
def pace() -> Pace:
    """Return this process's pace; the first call takes a second."""
    return Pace()


def _cores() -> list[int]:
    """The cores that this thread may run on; a single one if the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def _move_to(core: int) -> None:
    """Move this thread to a core, without restricting it to that core from then on."""
    allowed = _cores()
    if core in allowed and len(allowed) > 1:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, allowed)


def _fixed_work_ms() -> float:
    work = itertools.repeat(None, _TURNS)
    start = time.perf_counter()
    deque(work, maxlen=0)
    return 1e3 * (time.perf_counter() - start)
