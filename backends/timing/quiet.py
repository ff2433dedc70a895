"""Whether this machine is quiet enough to measure on: checked before time is spent on rows that mean nothing.

Occasional noise is waited for and averaged out. That does not help if this thread has its core for less than half of
the time: nearly every run of a few ms is interrupted, others fill the caches, and no number of repeats recovers the
true time. It happens when more processes compute than there are cores, and in containers limited to less than a core.
"""

from __future__ import annotations

import time

from smcp_fx.errors import MachineBusyError

#: Nothing is measured in a thread that has its core for less than this share of the time. At a load of 12 on two
#: cores rows came out a thousand times too fast; at loads of 2 to 4 within a fifth (a convolution of 151 M
#: multiply-adds).
LEAST_SHARE = 0.5
#: How long a look takes: many times longer than a scheduler's time slice. Chosen, not measured.
_LOOK_S = 0.2
#: How long to wait for others' work to end, and the seconds between two looks. Chosen, not measured.
_PATIENCE_S, _EVERY_S = 20.0, 1.0


def core_share() -> float:
    """Compute for a fifth of a second, and return the share of it for which this thread had a core."""
    wall, cpu = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - wall) < _LOOK_S:
        pass
    return (time.thread_time() - cpu) / passed


def require_core() -> None:
    """Return once this thread has most of a core, waiting a while for it; else raise `MachineBusyError`."""
    until = time.monotonic() + _PATIENCE_S
    while (share := core_share()) < LEAST_SHARE:
        if time.monotonic() >= until:
            raise MachineBusyError(
                f"this machine is too busy to measure on: after {_PATIENCE_S:.0f} s a thread that only computes had "
                f"a core for {share:.0%} of the time, and at least {LEAST_SHARE:.0%} are needed. Stop what else "
                "computes on it (or give the container a whole core), and start again: rows that are measured are "
                "kept, and smcp-table measure --retry-unstable repeats those that were unsteady."
            )
        time.sleep(_EVERY_S)
