"""One network's latency as a fraction of another's, measured until the fraction is known well enough.

Other work on a machine's outer cache and memory slows a large and a small network by different factors, for seconds
or minutes, and a core's pace does not show it (docs: latency.md). So the result of a short measurement depends on
when it was taken. Networks are therefore compared in rounds, until the rounds agree well enough or time is up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smcp_fx.backends.base import Engine
from smcp_fx.backends.timing.measuring import (
    Measurement,
    Sample,
    TimingConfig,
    calm,
    summarise,
    take_turns,
    warm_up,
)
from smcp_fx.errors import InputError
from smcp_fx.texts import significant

#: One round, in which a large network gets one turn of three runs. Before each turn it runs untimed for up to 120 ms
#: (twelve runs of 10 ms): after about ten runs a network is as fast as it is by itself.
_ROUND = TimingConfig(min_repeats=3, max_repeats=60, budget_ms=150.0, attempts=1, settle_ms=120.0)
#: The standard error of a median, over that of a mean; and the interquartile range of a normal distribution.
_MEDIAN, _QUARTILES = math.sqrt(math.pi / 2), 1.349


@dataclass(frozen=True)
class CompareConfig:
    """How long to compare: ``rounds`` and ``seconds`` at least, until ``error`` is reached, or time is up.

    ``error``: standard error of the fraction, absolute (0.003: 0.3 points), by its scatter from round to round. After
    ``longest_seconds`` no further round is begun, except the first ``late_rounds``. The defaults are chosen so that a
    comparison takes seconds: a fraction varies more from minute to minute than by its error (docs: latency.md).
    """

    rounds: int = 5
    seconds: float = 1.0
    error: float = 0.003
    longest_seconds: float = 15.0
    late_rounds: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.late_rounds <= self.rounds:
            raise InputError(f"{self}: 1 <= late_rounds <= rounds must hold")


@dataclass(frozen=True)
class RelativeLatency:
    """Two networks measured in turns, round after round: ms of all rounds, and pruned over dense.

    ``fraction``: the median of the rounds' own, dimensionless; ``q1``, ``q3``: their quartiles; ``error``: the
    standard error of their median. A moment that is slow for both changes the ms, but not the fraction.
    """

    dense: Measurement
    pruned: Measurement
    fraction: float
    q1: float
    q3: float
    error: float
    rounds: int

    def __str__(self) -> str:
        dense, pruned = (significant(side.median_ms) for side in (self.dense, self.pruned))
        return f"{self.fraction:.1%} ± {100 * self.error:.1f} points ({pruned} of {dense} ms)"


def compare(dense: Engine, pruned: Engine, config: CompareConfig | None = None) -> RelativeLatency:
    """Measure two networks on their example inputs in turns (a b a b ...), round after round."""
    config = config or CompareConfig()
    timers = [dense.timer(), pruned.timer()]
    cpu_bound = dense.cpu_bound and pruned.cpu_bound
    for timer in timers:
        warm_up(timer, _ROUND)
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    fractions: list[float] = []
    began = time.perf_counter()
    while _goes_on(fractions, time.perf_counter() - began, config):
        medians = []
        for own, found in zip(samples, take_turns(timers, _ROUND, cpu_bound), strict=True):
            kept = calm(found, _ROUND.min_repeats)
            own.extend(kept)
            medians.append(summarise(kept, _ROUND.spread_limit).median_ms)
        fractions.append(medians[1] / medians[0])
    before, after = (summarise(calm(own, len(own) // 2), _ROUND.spread_limit) for own in samples)
    q1, median, q3 = (float(q) for q in np.percentile(fractions, [25, 50, 75]))
    return RelativeLatency(before, after, median, q1, q3, _error(fractions), len(fractions))


def _goes_on(fractions: Sequence[float], seconds: float, config: CompareConfig) -> bool:
    """Whether another round is needed, after these."""
    if len(fractions) < config.late_rounds:
        return True
    if seconds >= config.longest_seconds:
        return False
    return len(fractions) < config.rounds or seconds < config.seconds or _error(fractions) > config.error


def _error(fractions: Sequence[float]) -> float:
    """Return the standard error of the median, by the quartiles."""
    q1, q3 = np.percentile(fractions, [25, 75])
    return float(_MEDIAN * (q3 - q1) / _QUARTILES / math.sqrt(len(fractions)))
