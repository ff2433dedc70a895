"""How much of a network's weights comes from memory rather than from cache, and what that does to its latency.

A block's weights are in cache when it runs if they stayed there since the network's last run. What pushes them out
is what the *whole* network touches in between, its footprint, against the cache; and where others use the cache, too,
what these touch meanwhile, which is the more the longer the network takes. A table row has both states (hot, cold);
the sum over the blocks is weighed between them:

    T     = run + hot + share(footprint, T) * (cold - hot) + fetch * max(footprint - outer, 0)
    share = 1 - (1 - floor) * (1 - rise(footprint)) * (1 - fade(T))

T is on both sides: the least that solves this, to which a network comes that starts from a full cache.

The last term is that of a cache yet further out (a server's, of which a guest has a part): what it does not hold
comes from memory. It is nothing until a calibration finds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smcp_fx.errors import InputError

#: The share is half-way up when the footprint is as large as the cache it outgrows, and after this part of the time
#: in which half of what was read once is gone. Chosen, with the three below, on two occasions of 21 pairs of model
#: and setting each, whose mean errors before calibration they take from 4.6 to 3.9 and from 4.2 to 3.2 % (half of the
#: cache, all of that time, steepness 4 and fading 1.8 gave those); of a third, from 3.0 to 2.8 %.
_OF_HALF_MS = 0.7
_STEEPNESS = 2.0
_FLOOR = 0.03
_FADING = 3.2
#: What a calibration gives in mean log error for staying near its start, for each of (log half_bytes, log steepness,
#: floor, log half_ms, log fading), and for the log scale: networks that are all large say little of the floor, for
#: instance. How long weights stay in cache depends on activations and on who shares it; the factor should be one,
#: as rows are latencies. (Of 19 pairs of model and setting, 0.03 to 0.1 for the factor leave nearly the same errors.
#: With 0.2 size and time take up what a busy hour adds to all, and two pairs more have fewer than 90 % of their
#: prunings within 10 %. Of 63 pairs, 0.0005 to 0.003 for sizes and times leave mean errors of 2.67 to 2.70 %, 0.005
#: with one fading for all 2.79 %.)
_INERTIA = (0.001, 0.001, 0.2, 0.001, 0.001)
_SCALE_INERTIA = 0.07
#: The same for each ms a MiB of the fetch.
_FETCH_INERTIA = 0.5
#: What a calibration tries: factors of `half_bytes` and of `half_ms`, steepnesses, floors, fadings; and how much
#: slower than the outer cache memory is (ms a MiB), beyond how many MiB.
_SIZES = tuple(2.0 ** (i / 8) for i in range(-24, 13))
_TIMES = tuple(2.0 ** (i / 2) for i in range(-3, 4))
_STEEPNESSES, _FLOORS = (2.0, 4.0, 6.0, 8.0), (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
_FADINGS = (1.8, 2.4, 3.2)
_FETCHES, _OUTERS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09), (16, 24, 32, 48, 64, 96, 128)
#: A latency is settled when another step changes it by less than this share, and after so many.
_SETTLED, _STEPS = 1e-9, 200
_MIB = 1 << 20
_Floats = float | NDArray[np.float64]
#: A byte that blocks write counts so much beside one of weights: runtimes use memory again within a run. Chosen on
#: six records of whole networks, which 0.25 to 0.5 predict nearly alike and better than 0 does (docs: Experiments).
OF_ACTIVATIONS = 0.3


@dataclass(frozen=True)
class Residency:
    """How cold a network's weights are, in [0, 1]: rises with its footprint, half-way up at ``half_bytes``.

    ``steepness``: how fast; ``floor``: of a network however small and fast; ``scale``: measured over predicted
    latency where they differ by a factor; ``fetch``: ms that each MiB of footprint beyond the ``outer`` ones (MiB)
    adds, as it comes from further away; ``half_ms``: the share rises with the time between runs, too, half-way up at
    so many ms, as others use the cache (inf: nobody does), and ``fading`` says how fast.
    """

    half_bytes: float
    steepness: float = _STEEPNESS
    floor: float = _FLOOR
    scale: float = 1.0
    fetch: float = 0.0
    outer: float = 0.0
    half_ms: float = math.inf
    fading: float = _FADING

    def __post_init__(self) -> None:
        if min(self.half_bytes, self.steepness, self.scale, self.half_ms, self.fading) <= 0:
            raise InputError(f"{self}: half_bytes, steepness, scale, half_ms and fading must be positive")
        if not 0 <= self.floor < 1:
            raise InputError(f"{self}: 0 <= floor < 1 must hold")
        if min(self.fetch, self.outer) < 0:
            raise InputError(f"{self}: fetch and outer must not be negative")

    @classmethod
    def of_cache(cls, cache_bytes: int, half_ms: float = math.inf) -> Residency:
        """Return what to assume before networks are measured.

        ``cache_bytes``: the cache that networks outgrow; ``half_ms``: after which half of what it held is gone
        (`Backend.fading_half_ms`).
        """
        return cls(float(cache_bytes), half_ms=_OF_HALF_MS * half_ms)

    def share(self, footprint: float, ms: float = 0.0) -> float:
        """Return the share for a network of this footprint, in bytes, that takes this long."""
        return 1 - (1 - self.floor) * (1 - self._rise(footprint)) * (1 - self._fade(ms))

    def slopes(self, footprint: float, ms: float = 0.0) -> tuple[float, float]:
        """Return by how much the share rises with a byte more, and with a ms more."""
        rise, fade = self._rise(footprint), self._fade(ms)
        warm = (1 - self.floor) * (1 - rise) * (1 - fade)
        return (
            warm * self.steepness * rise / footprint if footprint > 0 else 0.0,
            warm * self.fading * fade / ms if ms > 0 else 0.0,
        )

    def beside(self, footprint: float) -> float:
        """Return the ms that a run takes beside its blocks, for the bytes that no cache holds."""
        return self.fetch * max(footprint / _MIB - self.outer, 0.0)

    def beside_slope(self, footprint: float) -> float:
        """Return by how many ms that rises with a byte more."""
        return self.fetch / _MIB if footprint > self.outer * _MIB else 0.0

    def latency(self, hot_ms: float, cold_ms: float, footprint: float, run_ms: float = 0.0) -> float:
        """Return the predicted latency of a whole network, in ms."""
        fixed, of_cold = run_ms + hot_ms + self.beside(footprint), cold_ms - hot_ms
        ms = 0.0
        for _ in range(_STEPS):
            before, ms = ms, self.scale * (fixed + self.share(footprint, ms) * of_cold)
            if abs(ms - before) <= _SETTLED * ms:
                break
        return ms

    def _rise(self, footprint: float) -> float:
        return float(_half_way(footprint, self.half_bytes, self.steepness))

    def _fade(self, ms: float) -> float:
        return float(_half_way(ms, self.half_ms, self.fading))


def _half_way(value: _Floats, half: _Floats, steepness: _Floats) -> NDArray[np.float64]:
    """Rise from 0 to 1, half-way up at ``half``."""
    with np.errstate(divide="ignore", over="ignore"):
        risen: NDArray[np.float64] = 1 / (1 + np.power(half / np.asarray(value, np.float64), steepness))
    return risen


@dataclass(frozen=True)
class Whole:
    """A whole network: its blocks' sums in both states, its weights and what they write, and what it measured."""

    hot_ms: float
    cold_ms: float
    weight_bytes: float
    run_ms: float
    measured_ms: float
    activation_bytes: float = 0.0

    @property
    def footprint(self) -> float:
        """Bytes that a run touches, as far as they take cache from the weights."""
        return self.weight_bytes + OF_ACTIVATIONS * self.activation_bytes


def relative_errors(residency: Residency, wholes: Sequence[Whole]) -> list[float]:
    """Return (predicted - measured) / measured of each network."""
    return [residency.latency(w.hot_ms, w.cold_ms, w.footprint, w.run_ms) / w.measured_ms - 1 for w in wholes]


def calibrate(wholes: Sequence[Whole], start: Residency) -> Residency:
    """Return the residency that predicts these measured networks best (least mean absolute log error).

    All eight numbers are searched on a grid around ``start``, and what is nearer to it wins where the errors are
    all but equal. Fewer than three networks give the scale alone.
    """
    if not wholes:
        return start
    hot, cold, footprints, run, measured = (
        np.array([getattr(w, name) for w in wholes])
        for name in ("hot_ms", "cold_ms", "footprint", "run_ms", "measured_ms")
    )
    few, shared = len(wholes) < 3, math.isfinite(start.half_ms)
    tried: tuple[tuple[float, ...], ...] = (
        (1.0,) if few else _SIZES,
        (start.steepness,) if few else _STEEPNESSES,
        (start.floor,) if few else _FLOORS,
        _TIMES if shared and not few else (1.0,),
        _FADINGS if shared and not few else (start.fading,),
    )
    grid = np.meshgrid(*tried, indexing="ij", sparse=True)
    # The last axis is the networks'.
    size, steepness, floor, time, fading = (values[..., None] for values in grid)
    moved = (np.log(size), np.log(steepness / start.steepness), floor - start.floor, np.log(time),
             np.log(fading / start.fading))  # fmt: skip
    pulled = (weight * np.abs(by)[..., 0] for weight, by in zip(_INERTIA, moved, strict=True))
    away = sum(pulled, start=np.zeros(1))
    # The time between runs is known: it was measured.
    warm = 1 - _half_way(measured, start.half_ms * time, fading)
    share = 1 - (1 - floor) * (1 - _half_way(footprints, start.half_bytes * size, steepness)) * warm
    in_blocks = run + hot + share * (cold - hot)
    beyond = [start]
    if not few:
        beyond += [replace(start, fetch=0.0, outer=0.0)]
        beyond += [replace(start, fetch=f, outer=o) for f, o in itertools.product(_FETCHES, _OUTERS)]
    best, least = start, np.inf
    for trial in beyond:
        off = np.log(measured / (in_blocks + [trial.beside(footprint) for footprint in footprints]))
        scales = np.median(off, axis=-1)
        errors = np.abs(off - scales[..., None]).mean(axis=-1) + away + _SCALE_INERTIA * np.abs(scales)
        at = np.unravel_index(int(np.argmin(errors)), errors.shape)
        error = errors[at] + _FETCH_INERTIA * abs(trial.fetch - start.fetch)
        if error < least:
            found = [values[int(index)] for values, index in zip(tried, at, strict=True)]
            best = replace(
                trial,
                half_bytes=start.half_bytes * found[0],
                steepness=found[1],
                floor=found[2],
                half_ms=start.half_ms * found[3],
                fading=found[4],
                scale=float(np.exp(scales[at])),
            )
            least = error
    return best
