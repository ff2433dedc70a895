"""Means and paired differences with their 95% intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean of ``count`` values and half of its interval (Student's t), infinite for a single value."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, with its interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, math.inf, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, float(stdtrit(len(values) - 1, 0.5 + _CONFIDENCE / 2)) * error, len(values))


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
    """The mean difference over the seeds that both have, with its interval; None without such a seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in seeds]) if seeds else None
