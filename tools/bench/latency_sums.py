"""How far predicted latencies are from measured ones, and these from themselves, in a record of the benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from smcp_fx.latency.residency import Residency, Whole

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Sums:
    """Relative errors of the predictions for the random prunings of a model at a setting.

    ``steady``: of those whose timings were; ``errors``: of all. ``apart``: how far a second measurement of the same
    networks is from the first (empty where there was none). Ranks (Spearman) are those of the predictions, and of one
    measurement in the other; nan of fewer than two. ``spread``: the median of the timings' own.
    """

    steady: np.ndarray
    errors: np.ndarray
    apart: np.ndarray
    rank: float
    rank_again: float
    spread: float

    @classmethod
    def of(cls, lines: Lines, model: str, setting: str, cache_bytes: int, steady: float) -> Sums | None:
        """Predict as the library does now; None where no pruning was timed."""
        found = [x for x in lines if x["kind"] == "whole" and (x["model"], x["setting"]) == (model, setting)]
        residency = _residency(cache_bytes, found)
        usual = np.median([line["dense_ms"] for line in found]) if found else 0.0
        found = [line for line in found if line["index"] > 0]
        if not found:
            return None
        # Each took turns with the dense network: where that was faster or slower than usual, so was the machine.
        measured = np.array([x["whole"]["measured_ms"] * usual / x["dense_ms"] for x in found])
        predicted = np.array([_predicted(residency, line["whole"]) for line in found])
        spreads = np.array([line["spread"] for line in found])
        first, second = np.array([
            (
                line.get("first_ms", line["whole"]["measured_ms"]) / line.get("dense_first_ms", line["dense_ms"]),
                line["again_ms"] / line["dense_again_ms"],
            )
            for line in found if "again_ms" in line
        ]).reshape(-1, 2).T  # fmt: skip
        errors = predicted / measured - 1
        return cls(
            steady=errors[spreads <= steady],
            errors=errors,
            apart=second / first - 1,
            rank=_rank(predicted, measured),
            rank_again=_rank(second, first),
            spread=float(np.median(spreads)),
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
        """Of each model and setting of which there are any."""
        cache_bytes = self.machine["cache_bytes"]
        every = {key: Sums.of(self.lines, *key, cache_bytes, self.steady) for key in self.keys}
        return {key: sums for key, sums in every.items() if sums is not None}

    def found(self, kind: str, key: tuple[str, str] | None = None) -> Lines:
        """The lines of a kind, of a model and setting or of all."""
        return [
            x for x in self.lines if x["kind"] == kind and key in (None, (x.get("model"), x.get("setting")))
        ]


def _residency(cache_bytes: int, found: Lines) -> Residency:
    """A cache that forgets as it did when these networks were timed."""
    halves = [line["half_ms"] for line in found if "half_ms" in line]
    return Residency.of_cache(cache_bytes, float(np.median(halves)) if halves else math.inf)


def _predicted(residency: Residency, whole: dict[str, float]) -> float:
    made_of = Whole(**{name: value for name, value in whole.items() if name != "measured_ms"})
    return residency.latency(made_of.hot_ms, made_of.cold_ms, made_of.footprint, made_of.run_ms)


def _rank(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Spearman's coefficient, nan of fewer than two."""
    return float(spearmanr(predicted, measured)[0]) if len(measured) > 1 else float("nan")
