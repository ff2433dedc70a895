"""How fast this core runs right now, compared with what it usually does.

A core's speed changes by a factor of up to two within milliseconds and for seconds, as its sibling thread (which
may be another machine's, to a guest) or the chip's other cores have work or not. The thread is not kept off its
core by that, so its own time shows nothing. A fixed piece of arithmetic, timed before and after a sample, does.
"""

from __future__ import annotations

import functools
import time
from collections import deque

import numpy as np

#: So many turns of the interpreter's loop take some ten microseconds, no library and no memory.
_TURNS = range(250)
#: Paces further than this from the usual one (as a ratio) are another state of the core.
_TOLERANCE = 1.15
#: The usual pace is first taken from so long a while, then followed over so many samples.
_FIRST_MS = 300.0
_REMEMBERED = 2000


class Pace:
    """Tells whether the core is in its usual state. ``usual_ms``: what the fixed work mostly takes."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        start = time.perf_counter()
        while 1e3 * (time.perf_counter() - start) < _FIRST_MS:
            self._recent.append(_fixed_work_ms())
        self.usual_ms = float(np.median(self._recent))
        self._since = 0

    def is_usual(self) -> bool:
        """Time the fixed work once and compare."""
        return 1 / _TOLERANCE <= _fixed_work_ms() / self.usual_ms <= _TOLERANCE

    def await_usual(self, limit_ms: float) -> bool:
        """Wait until the core is in its usual state, at most so long; tell whether it is."""
        self._follow(_fixed_work_ms())
        start = time.perf_counter()
        while not self.is_usual():
            if 1e3 * (time.perf_counter() - start) >= limit_ms:
                return False
        return True

    def _follow(self, ms: float) -> None:
        """Remember what was met, not what was waited through; what is usual changes with the most of it."""
        self._recent.append(ms)
        self._since += 1
        if self._since >= _REMEMBERED // 4:
            self.usual_ms, self._since = float(np.median(self._recent)), 0


@functools.cache
def pace() -> Pace:
    """Return this process's pace; the first call takes a third of a second."""
    return Pace()


def _fixed_work_ms() -> float:
    start = time.perf_counter()
    total = 0
    for turn in _TURNS:
        total += turn
    return 1e3 * (time.perf_counter() - start)
