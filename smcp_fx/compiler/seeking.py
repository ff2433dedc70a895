"""The search for a network of the requested latency: solve, measure, correct the aim, solve again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

#: A measured fraction this far from the target is good enough to leave the masks as they are.
CLOSE = 0.01
#: Most further solves for a target. Up to four met 124 of 126 targets, up to six all (docs: experiments.md); the last
#: ones are for small networks on a busy machine, whose measurements vary by a point.
TRIES = 5
#: Predictions nearer than this (in logarithms) say nothing about the slope of the measured latency. Chosen, not
#: measured.
_APART = 0.1
#: Slopes outside these limits are not extrapolated: latencies fall at most a little faster than predicted (weights
#: that begin to fit into cache), and constant overheads make them fall more slowly. Chosen, not measured.
_SLOPES = (0.4, 1.25)


class Measured(Protocol):
    """A network measured beside the dense one: its fraction of the dense latency, and the standard error."""

    @property
    def fraction(self) -> float: ...

    @property
    def error(self) -> float: ...


class Candidate(Protocol):
    """A network that a solve chose. ``predicted``: its cost, in the unit of the target."""

    @property
    def predicted(self) -> float: ...

    def measure(self) -> Measured:
        """Measure the file that would be emitted, each time in a new session."""
        ...


C = TypeVar("C", bound=Candidate)


def seek(
    asked: float, first: C, solve: Callable[[float], C], earlier: Sequence[tuple[float, float]] = ()
) -> tuple[C, float, bool]:
    """Return the network nearest to ``asked`` of the dense latency, its measured share, and if that is met.

    ``first``: the network of the present solve; ``solve`` returns one for another predicted cost. ``earlier``: past
    pairs (predicted, measured fraction). Sessions differ, so a network that meets the target is measured again in
    another one, and the mean of both must meet it. If no network does, the nearest is returned.
    """
    pairs, tried = list(earlier), list[tuple[C, float]]()
    candidate, aim = first, first.predicted
    low, high = 0.0, math.inf  # aims up to low give too fast a network, from high on too slow a one
    for attempt in range(TRIES + 1):
        if attempt:
            aim = _between(low, high, aim_for(asked, pairs), asked / tried[-1][1])
            candidate = solve(aim)
        fractions: list[float] = []
        for _ in range(2):
            measured = candidate.measure()
            fractions.append(measured.fraction)
            pairs.append((candidate.predicted, measured.fraction))
            mean, error = float(np.mean(fractions)), measured.error / math.sqrt(len(fractions))
            met = is_met(mean - asked, error)
            if not met:
                break
        if met:
            return candidate, mean, True
        tried.append((candidate, mean))
        if mean < asked:
            low = max(low, aim)
        else:
            high = min(high, candidate.predicted)
    return *min(tried, key=lambda entry: abs(entry[1] - asked)), False


def _between(low: float, high: float, aim: float, step: float) -> float:
    """Return the ``aim``; if it cannot give a new network, one further by the factor ``step``, or halfway.

    Where whole multiples of channels go, networks are far apart, and an aim a little higher gives the same one.
    """
    if low >= high or low < aim < high:
        return aim
    if low and high < math.inf:
        return math.sqrt(low * high)
    return (low or high) * step


def is_met(missed: float, error: float) -> bool:
    """Whether a measured fraction is near enough to the requested one.

    The limit is `CLOSE`, or the noise of the measurement: two standard errors (of ``error``), up to twice
    `CLOSE`. Within the limit, another solve would follow noise.
    """
    return abs(missed) <= max(CLOSE, min(2 * error, 2 * CLOSE))


def aim_for(asked: float, tried: Sequence[tuple[float, float]]) -> float:
    """Return the predicted cost to solve for, so that the fraction ``asked`` is measured.

    ``tried``: pairs (predicted, measured), in order. The answer lies on a line, in logarithms, through the
    present point: the median of the last pair and all pairs with nearly the same prediction, since sessions
    differ. The slope of the line is, in this order of preference,

    - the slope to the nearest pair on the other side of ``asked``: the answer lies between the two, however
      steeply the latency falls there (weights that begin to fit into cache);
    - the slope to the last pair far enough away to define one, within `_SLOPES`;
    - one, as if latencies fell as predicted, if there is no such pair or its slope is negative (noise).
    """
    logs, wanted = np.log(np.asarray(tried, np.float64)), math.log(asked)
    near = np.abs(logs[:, 0] - logs[-1, 0]) <= _APART
    here = np.median(logs[near], axis=0)
    missing = wanted - here[1]
    over, risen = (logs[~near] - here).T
    slopes = risen / over
    across = (slopes > 0) & (risen * missing > missing**2)
    if across.any():
        slope = slopes[across][np.abs(over[across]).argmin()]
    elif len(slopes) and slopes[-1] > 0:
        slope = np.clip(slopes[-1], *_SLOPES)
    else:
        slope = 1.0
    return float(np.exp(here[0] + missing / slope))
