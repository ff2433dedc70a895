"""How far predicted latencies are from measured ones, and these from themselves, in a record of the benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from smcp_fx.latency.residency import Residency, Whole, calibrate, relative_errors

Lines = list[dict[str, Any]]
#: So many networks calibrate in records that do not say which do.
_CALIBRATING = 5
#: Networks that spread further calibrate nothing. Near the size of the cache, where they say most, few are steady.
_TELLING = 0.25


@dataclass(frozen=True)
class Sums:
    """Relative errors of the prunings of a model at a setting that were not calibrated on.

    ``before`` and ``after`` calibration of the steady ones, ``of_all_before`` and ``of_all`` of all ``number``
    prunings; ``apart`` is how far a second measurement of the same networks is from the first (empty where there was
    none). Ranks (Spearman) are those of the predictions, and of one measurement in the other; nan of fewer than two.
    """

    number: int
    calibrating: int
    before: np.ndarray
    after: np.ndarray
    of_all_before: np.ndarray
    of_all: np.ndarray
    apart: np.ndarray
    rank: float
    rank_of_all: float
    rank_again: float
    spread: float

    @classmethod
    def of(cls, lines: Lines, model: str, setting: str, cache_bytes: int, steady: float) -> Sums | None:
        """Errors before and after calibration; None where none was timed that calibrates, or is predicted."""
        calibrating = calibrating_wholes(lines, model, setting, steady)
        others = _wholes(lines, model, setting, steady, calibrating=False, limit=steady)
        unsteady_too = _wholes(lines, model, setting, steady, calibrating=False, limit=np.inf)
        if not calibrating or not unsteady_too:
            return None
        start = starting_at(cache_bytes, lines, model, setting)
        fitted = calibrate(calibrating, start)
        before, after = (np.array(relative_errors(r, others)) for r in (start, fitted))
        of_all_before, of_all = (np.array(relative_errors(r, unsteady_too)) for r in (start, fitted))
        measured, of_all_ms = (np.array([w.measured_ms for w in found]) for found in (others, unsteady_too))
        roles = _with_roles(_timed(lines, model, setting), steady)
        first, second = np.array([
            (
                line.get("first_ms", line["whole"]["measured_ms"]) / line.get("dense_first_ms", line["dense_ms"]),
                line["again_ms"] / line["dense_again_ms"],
            )
            for line, calibrates in roles if not calibrates and "again_ms" in line
        ]).reshape(-1, 2).T  # fmt: skip
        return cls(
            number=len(unsteady_too),
            calibrating=len(roles) - len(unsteady_too),
            before=before,
            after=after,
            of_all_before=of_all_before,
            of_all=of_all,
            apart=second / first - 1,
            rank=_rank(measured * (1 + after), measured),
            rank_of_all=_rank(of_all_ms * (1 + of_all), of_all_ms),
            rank_again=_rank(second, first),
            spread=float(np.median([line["spread"] for line, _ in roles])),
        )


class Occasion:
    """One record: what was measured, on what, and how far sums are from it.

    Timings that spread further than ``steady`` are unsteady.
    """

    def __init__(self, lines: Lines, steady: float) -> None:
        self.lines = lines
        self.steady = steady
        self.machine = next(line for line in lines if line["kind"] == "machine")
        self.keys = list(dict.fromkeys((line["model"], line["setting"]) for line in lines if "model" in line))

    @property
    def way(self) -> str:
        """The way in which its rows were timed, and in what pages if they were huge."""
        settings = self.machine["fingerprint"]["settings"]
        pages = " with huge pages" if settings.get("huge_pages") == "on" else ""
        return f"{settings['block_timing']}{pages}"

    @cached_property
    def sums(self) -> dict[tuple[str, str], Sums]:
        """Of each model and setting of which there are any, predicted as the library does now."""
        cache_bytes = self.machine["cache_bytes"]
        every = {key: Sums.of(self.lines, *key, cache_bytes, self.steady) for key in self.keys}
        return {key: sums for key, sums in every.items() if sums is not None}

    def found(self, kind: str, key: tuple[str, str] | None = None) -> Lines:
        """The lines of a kind, of a model and setting or of all."""
        return [
            x for x in self.lines if x["kind"] == kind and key in (None, (x.get("model"), x.get("setting")))
        ]


def starting_at(cache_bytes: int, lines: Lines, model: str, setting: str) -> Residency:
    """Return what to begin the calibration with: a cache that forgets as it did when these networks were timed."""
    halves = [line["half_ms"] for line in _timed(lines, model, setting) if "half_ms" in line]
    return Residency.of_cache(cache_bytes, float(np.median(halves)) if halves else math.inf)


def calibrating_wholes(lines: Lines, model: str, setting: str, steady: float) -> list[Whole]:
    """The networks that calibrate the prediction for the others, at the machine's usual speed."""
    return _wholes(lines, model, setting, steady, calibrating=True, limit=_TELLING)


def _wholes(
    lines: Lines, model: str, setting: str, steady: float, *, calibrating: bool, limit: float
) -> list[Whole]:
    """Those of a role that spread no further than the limit.

    Each was timed in turns with the dense network. Where that took another time than it mostly did, the machine
    was faster or slower then, and the pruning's latency is scaled as the dense one's.
    """
    found = _timed(lines, model, setting)
    usual = np.median([line["dense_ms"] for line in found]) if found else 0.0
    return [
        Whole(**{**line["whole"], "measured_ms": line["whole"]["measured_ms"] * usual / line["dense_ms"]})
        for line, calibrates in _with_roles(found, steady)
        if line["spread"] <= limit and calibrates == calibrating
    ]


def _timed(lines: Lines, model: str, setting: str) -> Lines:
    return [x for x in lines if x["kind"] == "whole" and (x["model"], x["setting"]) == (model, setting)]


def _with_roles(found: Lines, steady: float) -> list[tuple[dict[str, Any], bool]]:
    """Each network and whether it is one to calibrate on; where a record does not say, the first five steady ones."""
    found = sorted(found, key=lambda line: int(line["index"]))
    first = [line["index"] for line in found if line["spread"] <= steady][:_CALIBRATING]
    return [(line, bool(line.get("calibrates", line["index"] in first))) for line in found]


def _rank(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Spearman's coefficient, nan of fewer than two."""
    return float(spearmanr(predicted, measured)[0]) if len(measured) > 1 else float("nan")
