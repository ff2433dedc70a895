"""Runs of a block in its context, in two states: hot, right after another, and cold, after emptying the caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from smcp_fx.backends.base import BlockLatency
from smcp_fx.backends.timing.fading import displace_inner_caches, evict_caches
from smcp_fx.backends.timing.measuring import Measurement, Sample, Timer, TimingConfig, take_sample
from smcp_fx.backends.timing.pace import Pace
from smcp_fx.errors import BackendError, MachineBusyError

#: Runs in the hot state, beside those that follow a cold one. The second number of undisturbed runs is enough
#: if their interquartile range is at most this share of their median: on 63 rows of ResNet-18, measured four
#: times each way, 11 such runs gave the medians of 25 within 0.1% (docs: experiments.md).
_HOT_RUNS, _ENOUGH, _AGREEING = 25, 11, 0.03
#: This many runs are enough after this long (ms), if the core is mostly slow. Chosen, not measured.
_FEW_RUNS, _LONG_MS = 9, 150.0
#: Runs in the cold state, few because emptying the caches takes longer than all the rest. The median of three ignores
#: one disturbed run; two are enough if they agree. Their spread may be larger by this factor: others use the memory
#: too, and noise averages out in the table's sums. Chosen, not measured.
_COLD_RUNS, FEW_COLD_RUNS, COLD_SPREAD = 3, 2, 3.0
#: No block on a processor is faster than this: a run of one node takes about 0.4 us.
LEAST_MS = 1e-4
#: When a disturbed run still tells the block's time: see `sample_of_block`. Chosen, not measured.
_TELLING, _OF_CONTEXT = 0.8, 0.5


@dataclass
class BlockRuns:
    """Timed runs of a session, in order: the state of each, hot or cold, and its sample, context included."""

    timer: Timer
    core: Pace | None
    states: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def of(self, state: str) -> list[Sample]:
        """The samples of a state."""
        return [sample for what, sample in zip(self.states, self.samples, strict=True) if what == state]

    def take_hot(self, config: TimingConfig) -> None:
        """Take runs one right after another, displacing the inner caches, until enough of them were undisturbed."""
        spent_ms, counted, dropped = 0.0, 0, 0
        began = time.perf_counter()
        while counted < config.min_repeats or (counted < _HOT_RUNS and spent_ms < config.budget_ms):
            waited = 1e3 * (time.perf_counter() - began) >= _LONG_MS
            if counted >= _FEW_RUNS and (waited or runs_agree(self.of("hot"))):
                break
            displace_inner_caches()
            sample = self._take("hot")
            spent_ms += sample.ms
            if sample.disturbed and dropped < config.droppable * _HOT_RUNS:
                dropped += 1
            else:
                counted += 1

    def take_cold(self, config: TimingConfig, warm_code: Callable[[], object]) -> None:
        """Take runs after emptying the caches, each followed by a hot run."""
        counted, dropped = 0, 0
        while counted < _COLD_RUNS:
            if counted == FEW_COLD_RUNS and runs_agree(self.of("cold"), counted):
                break
            evict_caches()
            warm_code()
            cold = self._take("cold")
            displace_inner_caches()
            hot = self._take("hot")
            if (cold.disturbed or hot.disturbed) and dropped < config.droppable * _COLD_RUNS:
                dropped += 1
            else:
                counted += 1

    def take_cold_alone(self, config: TimingConfig) -> None:
        """Take runs after emptying the caches, one after another."""
        counted, dropped = 0, 0
        while counted < _COLD_RUNS:
            evict_caches()
            if self._take("cold").disturbed and dropped < config.droppable * _COLD_RUNS:
                dropped += 1
            else:
                counted += 1

    def _take(self, state: str) -> Sample:
        sample = take_sample(self.timer, self.core)
        self.states.append(state)
        self.samples.append(sample)
        return sample


def steadiest(
    attempt: Callable[[], tuple[Measurement, Measurement] | None], attempts: int, count: int, least_ms: float
) -> BlockLatency:
    """Return the steadiest of some attempts to measure a block, hot and cold; a useless attempt is None.

    ``count`` multiply-adds take ``least_ms`` at least: faster attempts do not count. Raises `BackendError` if all are
    faster, `MachineBusyError` if all are useless.
    """
    found: BlockLatency | None = None
    impossible = 0.0
    for _ in range(attempts):
        states = attempt()
        if states is None:
            continue
        fastest = min(state.median_ms for state in states)
        if fastest < least_ms:
            impossible = fastest
            continue
        found = BlockLatency(*states) if found is None else found.steadier(BlockLatency(*states))
        if found.stable:
            break
    if found is None and impossible:
        raise BackendError(
            f"{count:,} multiply-adds seemed to take {impossible:.4g} ms, and need {least_ms:.4g} at least on this "
            "processor: the machine was too busy for its clocks to tell. Measure again when it is idle."
        )
    if found is None:
        raise MachineBusyError(
            "every run of the block was disturbed too much to tell how long it takes: the machine is too busy. "
            "Measure again when it is idle."
        )
    return found


def runs_agree(samples: Sequence[Sample], enough: int = _ENOUGH) -> bool:
    """Whether there are ``enough`` undisturbed runs, and they agree so well that more would not move their median."""
    times = [sample.ms for sample in samples if not sample.disturbed]
    if len(times) < enough:
        return False
    q1, median, q3 = np.percentile(times, [25, 50, 75])
    return bool(q3 - q1 <= _AGREEING * median)


def sample_of_block(
    ms: float, context_ms: float, sample: Sample, usual_context_ms: float | None
) -> Sample | None:
    """Return the block's part of a run; None if the run was disturbed too much to tell it.

    ``ms``, ``context_ms``: the profiler's times of the block's nodes and of all other nodes. They are
    wall-clock times, which in a disturbed run include time when others had the core. ``usual_context_ms``:
    the other nodes' time in undisturbed runs; None if there were none.

    A disturbed run gives bounds. The block took at most the time for which the thread computed (``sample.ms``), and
    at most its nodes' wall-clock time; it took at least the thread's time less the context's. If the bounds are
    close, the upper one is used. Otherwise the usual context gives a better lower bound, unless the block is small
    beside it.
    """
    if not sample.disturbed:
        return Sample(ms)
    most, least = min(ms, sample.ms), sample.ms - context_ms
    if least >= _TELLING * most > 0:
        return Sample(most, disturbed=True)
    if usual_context_ms is None:
        return None
    told = min(most, max(least, sample.ms - usual_context_ms))
    return Sample(told, disturbed=True) if told > 0 and told >= _OF_CONTEXT * usual_context_ms else None
