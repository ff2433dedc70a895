"""The measurement loop: warm up until stable, repeat, take the median and the quartiles.

Several timers are measured *interleaved* (a b c a b c ...), so that a slow moment of the machine affects all of them
alike and their ratio stays fair. Each turn begins with untimed runs, as the others have left the caches cold.

A run is *disturbed* if another process had the thread's core meanwhile, or if the core was unusually slow before or
after it. Disturbed runs are dropped while there are enough others; otherwise each counts with the time for which the
thread had its core. Samples that spread too far are taken again; if no attempt is calm, the calmest is returned and
marked unstable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from smcp_fx.backends.timing.pace import Pace, pace
from smcp_fx.errors import InputError

#: Runs the thing once and returns how long it took, in ms.
Timer = Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """Median and quartiles of repeated runs, in ms; ``stable``: the spread was within its limit."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    repeats: int
    stable: bool

    @property
    def spread(self) -> float:
        """Interquartile range over the median, dimensionless."""
        return (self.q3_ms - self.q1_ms) / self.median_ms if self.median_ms > 0 else 0.0

    def surer(self, other: Measurement) -> Measurement:
        """Return the steady one of two measurements of the same thing; if both or neither is, the calmer."""
        return other if (other.stable, -other.spread) > (self.stable, -self.spread) else self


@dataclass(frozen=True)
class TimingConfig:
    """How long to measure: ``max_repeats`` runs, fewer once ``budget_ms`` is spent, ``min_repeats`` at least.

    ``spread_limit``: interquartile range over median above which the samples are taken again, ``attempts`` times at
    most. ``warmup_tolerance``: the warm-up ends when the median of the last ``warmup_window`` runs is within it of
    the median of the ones before, or after ``warmup_ms``. ``droppable``: how many disturbed runs may be dropped for
    each repeat wanted; beyond that the machine is too busy to measure on, and the result is unstable. Where several
    timers take turns, a turn begins with ``settle`` untimed runs, or as many as fit into ``settle_ms`` (one at
    least), as the others pushed its data out of the caches: after about ten runs a network is as fast as it is by
    itself. ``burst`` timed runs follow.
    """

    min_repeats: int = 7
    max_repeats: int = 100
    budget_ms: float = 500.0
    spread_limit: float = 0.05
    attempts: int = 3
    warmup_window: int = 2
    warmup_tolerance: float = 0.05
    warmup_ms: float = 1000.0
    droppable: float = 3.0
    settle: int = 12
    settle_ms: float = 30.0
    burst: int = 3

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


#: For one block among hundreds. Rows may be measured quickly, as noise averages out in the table's sums. How many
#: runs are enough was measured (docs: experiments.md).
QUICK = TimingConfig(
    min_repeats=3,
    max_repeats=5,
    budget_ms=8.0,
    spread_limit=0.08,
    attempts=2,
    droppable=1.0,
    warmup_window=1,
    warmup_ms=4.0,
)


#: A thread that had its core for less than this share of the time was disturbed. Chosen, not measured.
UNDISTURBED = 0.95


@dataclass(frozen=True)
class Sample:
    """One run: how long it took, and whether it was disturbed.

    If its thread was kept off its core, ``ms`` is the time for which it had it.
    """

    ms: float
    disturbed: bool = False


def take_sample(timer: Timer, pace: Pace | None = None) -> Sample:
    """Run ``timer`` once.

    ``pace``: given if the work runs in this thread alone, where a disturbance shows. The run waits until the
    core is as fast as usual. It counts as disturbed if it was kept off the core, or if the core was slower
    before or after it.
    """
    if pace is None:
        return Sample(timer())
    usual = pace.await_usual()
    cpu, wall = time.thread_time(), time.perf_counter()
    ms = timer()
    wall, cpu = 1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)
    if cpu < UNDISTURBED * wall - 0.002:
        return Sample(min(ms, cpu), disturbed=True)
    return Sample(ms, disturbed=not (usual and pace.is_usual()))


def stopwatch(run: Callable[[], object]) -> Timer:
    """Return a timer of ``run`` by the wall clock."""

    def once() -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    return once


def calm(samples: Sequence[Sample], least: int) -> Sequence[Sample]:
    """Return the undisturbed samples if there are at least ``least``, else all samples."""
    found = [sample for sample in samples if not sample.disturbed]
    return found if len(found) >= least else samples


def summarise(samples: Sequence[Sample], spread_limit: float, resolution_ms: float = 0.0) -> Measurement:
    """Return median and quartiles; stable if the spread is within its limit and most runs undisturbed.

    A clock with steps of ``resolution_ms`` gives no finer median. Then the mean of the samples near the
    median counts, whose rounding averages out, and quartiles up to two steps apart are no spread.
    """
    times = np.asarray([sample.ms for sample in samples], dtype=np.float64)
    q1, median, q3 = (float(q) for q in np.percentile(times, [25, 50, 75]))
    if resolution_ms:
        near = np.abs(times - median) <= max(2 * resolution_ms, spread_limit * median)
        median = float(times[near].mean()) if near.any() else median
    undisturbed = 2 * sum(sample.disturbed for sample in samples) <= len(samples)
    steady = q3 - q1 <= max(spread_limit * median, 2 * resolution_ms)
    return Measurement(median, q1, q3, len(samples), stable=undisturbed and steady)


def warm_up(timer: Timer, config: TimingConfig) -> int:
    """Run ``timer`` until two successive windows of runs agree, and return the number of runs."""
    window = config.warmup_window
    samples: list[float] = []
    start = time.perf_counter()
    while True:
        samples.append(timer())
        if len(samples) >= 2 * window:
            before = float(np.median(samples[-2 * window : -window]))
            last = float(np.median(samples[-window:]))
            if abs(last - before) <= config.warmup_tolerance * before:
                return len(samples)
        if 1e3 * (time.perf_counter() - start) >= config.warmup_ms:
            return len(samples)


def measure_timers(
    timers: Sequence[Timer], config: TimingConfig | None = None, *, cpu_bound: bool = False
) -> list[Measurement]:
    """Measure all ``timers`` interleaved, one `Measurement` each, in their order.

    All timers run equally often. Disturbed runs are dropped if enough others are left. If one timer is
    unstable, the whole set is taken again, since samples of different moments are not comparable.
    """
    config = config or TimingConfig()
    if not timers:
        return []
    for timer in timers:
        warm_up(timer, config)
    best: list[Measurement] = []
    for _ in range(config.attempts):
        taken = take_turns(timers, config, cpu_bound)
        result = [summarise(calm(own, config.min_repeats), config.spread_limit) for own in taken]
        if not best or _unrest(result) < _unrest(best):
            best = result
        if all(m.stable for m in result):
            break
    return best


def _unrest(result: Sequence[Measurement]) -> tuple[bool, float]:
    return not all(m.stable for m in result), max(m.spread for m in result)


def take_turns(timers: Sequence[Timer], config: TimingConfig, cpu_bound: bool = False) -> list[list[Sample]]:
    """Run ``timers`` in turns until there are enough samples of each, and return them, in order.

    They include disturbed runs once as many as ``config`` allows have been dropped.
    """
    samples: list[list[Sample]] = [[] for _ in timers]
    droppable = [int(config.droppable * config.min_repeats)] * len(timers)
    burst = config.burst if len(timers) > 1 else 1
    spent_ms = 0.0
    while len(samples[0]) < config.min_repeats or (
        len(samples[0]) < config.max_repeats and spent_ms < config.budget_ms * len(timers)
    ):
        for index, (timer, own) in enumerate(zip(timers, samples, strict=True)):
            if len(timers) > 1:
                _settle(timer, config)
            taken = 0
            while taken < burst:
                sample = take_sample(timer, pace() if cpu_bound else None)
                if sample.disturbed and droppable[index]:
                    droppable[index] -= 1
                    continue
                own.append(sample)
                spent_ms += sample.ms
                taken += 1
    return samples


def _settle(timer: Timer, config: TimingConfig) -> None:
    """Run untimed, to refill the caches after the other timers' turns."""
    start = time.perf_counter()
    for _ in range(config.settle):
        timer()
        if 1e3 * (time.perf_counter() - start) >= config.settle_ms:
            break
