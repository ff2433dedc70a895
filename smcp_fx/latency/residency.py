"""How much of a network's weights comes from memory rather than from cache, and the effect on its latency.

A block's weights are in cache when it runs if they stayed there since the network's last run. Two things push them
out: what the *whole* network touches in between (its footprint, compared with the size of the cache), and what others
who share the cache touch meanwhile (more, the longer the network takes). A table row has both states, hot and cold; a
network's latency lies between the two sums over its blocks:

    T     = run + hot + share(footprint, T) * (cold - hot)
    share = 1 - (1 - floor) * (1 - rise(footprint)) * (1 - fade(T))

T is on both sides; the smallest solution counts, which is reached from a full cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from smcp_fx.errors import InputError

# The constants of this model were fitted to measurements of 21 pairs of network and setting on two occasions, where
# they lowered the mean error from 4.6 to 3.9% and from 4.2 to 3.2%; on a third, from 3.0 to 2.8% (docs:
# experiments.md).
#: How fast the share rises with the footprint; it is half-way up where the footprint is as large as the cache.
_STEEPNESS = 2.0
#: The share is half-way up after this part of the time in which the cache loses half of its content; how fast
#: it rises with time.
_OF_HALF_MS, _STEEPNESS_IN_TIME = 0.7, 3.2
#: The share of weights that come from memory however small and fast a network is. Fitted as those above.
_FLOOR = 0.03
#: How much a byte that blocks write counts beside a byte of weights: runtimes reuse memory within a run. On six
#: records of networks 0.25 to 0.5 predict nearly alike, and better than 0.
OF_ACTIVATIONS = 0.3
#: The equation for T is solved once a step changes T by less than this share, or after this many steps.
_SETTLED, _STEPS = 1e-9, 200
#: This many times the half-way point is as good as infinity.
_ALL = 1e12


@dataclass(frozen=True)
class Residency:
    """The share of a network's weights that comes from memory, in [0, 1].

    It rises with the network's footprint, half-way up at ``half_bytes``; ``steepness``: how fast. It also rises with
    the time between runs, as others use the cache, half-way up after ``half_ms`` (inf: nobody does); ``fading``: how
    fast. ``floor``: the least share, of the smallest and fastest network.
    """

    half_bytes: float
    steepness: float = _STEEPNESS
    floor: float = _FLOOR
    half_ms: float = math.inf
    fading: float = _STEEPNESS_IN_TIME

    def __post_init__(self) -> None:
        if min(self.half_bytes, self.steepness, self.half_ms, self.fading) <= 0:
            raise InputError(f"{self}: half_bytes, steepness, half_ms and fading must be positive")
        if not 0 <= self.floor < 1:
            raise InputError(f"{self}: 0 <= floor < 1 must hold")

    @classmethod
    def of_cache(cls, cache_bytes: int, half_ms: float = math.inf) -> Residency:
        """Return the residency for a machine's cache.

        ``cache_bytes``: the size of the cache that networks outgrow; ``half_ms``: after how many ms half of
        it is replaced (`Backend.fading_half_ms`).
        """
        return cls(float(cache_bytes), half_ms=_OF_HALF_MS * half_ms)

    def share(self, footprint: float, ms: float = 0.0) -> float:
        """Return the share for a network with this footprint, in bytes, that takes ``ms``."""
        return 1 - (1 - self.floor) * (1 - self._rise(footprint)) * (1 - self._fade(ms))

    def slopes(self, footprint: float, ms: float = 0.0) -> tuple[float, float]:
        """Return the derivatives of the share, per byte and per ms."""
        rise, fade = self._rise(footprint), self._fade(ms)
        warm = (1 - self.floor) * (1 - rise) * (1 - fade)
        return (
            warm * self.steepness * rise / footprint if footprint > 0 else 0.0,
            warm * self.fading * fade / ms if ms > 0 else 0.0,
        )

    def latency(self, hot_ms: float, cold_ms: float, footprint: float, run_ms: float = 0.0) -> float:
        """Return the predicted latency of a whole network, in ms."""
        fixed, of_cold = run_ms + hot_ms, cold_ms - hot_ms
        ms = 0.0
        for _ in range(_STEPS):
            before, ms = ms, fixed + self.share(footprint, ms) * of_cold
            if abs(ms - before) <= _SETTLED * ms:
                break
        return ms

    def _rise(self, footprint: float) -> float:
        return _half_way(footprint, self.half_bytes, self.steepness)

    def _fade(self, ms: float) -> float:
        return _half_way(ms, self.half_ms, self.fading)


def _half_way(value: float, half: float, steepness: float) -> float:
    """Rise from 0 to 1, half-way up at ``half``."""
    if value <= 0 or math.isinf(half):
        return 0.0
    return 1 / (1 + math.pow(min(half / value, _ALL), steepness))


@dataclass(frozen=True)
class Whole:
    """A whole network: its blocks' sums in both states, a run's own cost (ms), and the bytes it touches."""

    hot_ms: float
    cold_ms: float
    weight_bytes: float
    run_ms: float
    activation_bytes: float = 0.0

    @property
    def footprint(self) -> float:
        """The bytes that a run touches, weighted by how much they push weights out of the cache."""
        return self.weight_bytes + OF_ACTIVATIONS * self.activation_bytes
