"""The measurement loop: warm up until stable, repeat, take the median and the quartiles.

Several timers are measured *interleaved* (a b c a b c ...), so that a slow moment of the machine hits all of
them alike and their ratio stays fair. A set of samples whose spread is above the limit is thrown away and
taken again; if no attempt is calm, the calmest is returned and marked unstable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from smcp_fx.errors import InputError

#: Runs the thing once and returns how long it took, in ms.
Timer = Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """Median and quartiles of repeated runs, in ms; ``stable`` says whether the spread was within its limit."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    repeats: int
    stable: bool

    @property
    def spread(self) -> float:
        """Interquartile range over the median, dimensionless."""
        return (self.q3_ms - self.q1_ms) / self.median_ms if self.median_ms > 0 else 0.0


@dataclass(frozen=True)
class TimingConfig:
    """How long to measure. Repeats stop at ``max_repeats``, or at ``min_repeats`` once ``budget_ms`` is spent.

    ``spread_limit``: interquartile range over median above which the samples are taken again, ``attempts``
    times at most. ``warmup_tolerance``: the warm-up ends when the median of the last ``warmup_window`` runs is
    within it of the median of the ones before, or after ``warmup_ms``.
    """

    min_repeats: int = 7
    max_repeats: int = 100
    budget_ms: float = 500.0
    spread_limit: float = 0.05
    attempts: int = 3
    warmup_window: int = 2
    warmup_tolerance: float = 0.05
    warmup_ms: float = 1000.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise InputError(
                f"min_repeats = {self.min_repeats} and max_repeats = {self.max_repeats}: "
                "1 <= min_repeats <= max_repeats is needed"
            )
        if self.attempts < 1 or self.warmup_window < 1:
            raise InputError(
                f"attempts = {self.attempts} and warmup_window = {self.warmup_window} must be at least 1"
            )


#: For one block among hundreds: the table's sums average the noise out, so a row may be quick.
QUICK = TimingConfig(min_repeats=3, max_repeats=25, budget_ms=15.0, attempts=2, warmup_window=1, warmup_ms=50.0)


def summarise(samples_ms: Sequence[float], spread_limit: float) -> Measurement:
    """Return the median and quartiles of ``samples_ms``; stable when the spread is within ``spread_limit``."""
    q1, median, q3 = (float(q) for q in np.percentile(np.asarray(samples_ms, dtype=np.float64), [25, 50, 75]))
    measurement = Measurement(median, q1, q3, len(samples_ms), stable=True)
    if measurement.spread <= spread_limit:
        return measurement
    return Measurement(median, q1, q3, len(samples_ms), stable=False)


def warm_up(timer: Timer, config: TimingConfig) -> int:
    """Run ``timer`` until two windows of runs in a row agree, and return the number of runs."""
    window, runs = config.warmup_window, 0
    samples: list[float] = []
    start = time.perf_counter()
    while True:
        samples.append(timer())
        runs += 1
        if len(samples) >= 2 * window:
            before = float(np.median(samples[-2 * window : -window]))
            last = float(np.median(samples[-window:]))
            if abs(last - before) <= config.warmup_tolerance * before:
                return runs
        if 1e3 * (time.perf_counter() - start) >= config.warmup_ms:
            return runs


def measure_timers(timers: Sequence[Timer], config: TimingConfig | None = None) -> list[Measurement]:
    """Measure all ``timers`` interleaved, one `Measurement` each, in their order.

    All of them have the same number of repeats. When one is unstable the whole set is taken again, since
    samples of different moments are not comparable.
    """
    config = config or TimingConfig()
    if not timers:
        return []
    for timer in timers:
        warm_up(timer, config)
    best: list[Measurement] = []
    for _ in range(config.attempts):
        result = _attempt(timers, config)
        if not best or max(m.spread for m in result) < max(m.spread for m in best):
            best = result
        if all(m.stable for m in result):
            break
    return best


def _attempt(timers: Sequence[Timer], config: TimingConfig) -> list[Measurement]:
    samples: list[list[float]] = [[] for _ in timers]
    spent_ms = 0.0
    while len(samples[0]) < config.min_repeats or (
        len(samples[0]) < config.max_repeats and spent_ms < config.budget_ms * len(timers)
    ):
        for taken, timer in zip(samples, timers, strict=True):
            taken.append(timer())
            spent_ms += taken[-1]
    return [summarise(taken, config.spread_limit) for taken in samples]
