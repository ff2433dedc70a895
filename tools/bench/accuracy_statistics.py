"""Means with confidence intervals over seeds, and what may be said of a claim by them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

CONFIDENCE = 0.95
#: Differences of less than this are no difference worth speaking of: one point of accuracy.
MARGIN = 0.01
#: With fewer seeds than this nothing is said.
FEWEST = 3

#: What is claimed of a difference: it is positive; it is nearly nothing; it is more than nothing, either way.
Kind = Literal["better", "alike", "different"]

CONFIRMED, NOT_CONFIRMED, UNKNOWN = "confirmed", "not confirmed", "cannot be told at this scale"


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval (Student's t), of ``count`` values; without one below two values."""

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
    """The mean of independent values and its 95 % interval; infinitely wide for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, math.inf, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2)) * error, len(values))


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
    """The mean difference over the seeds that both have, with its interval; None without such a seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in seeds]) if seeds else None


def verdict(difference: Interval | None, kind: Kind) -> str:
    """What the interval of a difference lets one say of a claim about it."""
    if difference is None or difference.count < FEWEST:
        return UNKNOWN
    apart = difference.low > 0 or difference.high < 0
    within = difference.low > -MARGIN and difference.high < MARGIN
    if kind == "better":
        reverse = NOT_CONFIRMED if difference.high < 0 else UNKNOWN
        return CONFIRMED if difference.low > 0 else reverse
    if kind == "alike":
        beyond = difference.low > MARGIN or difference.high < -MARGIN
        return CONFIRMED if within else NOT_CONFIRMED if beyond else UNKNOWN
    return CONFIRMED if apart else NOT_CONFIRMED if within else UNKNOWN
