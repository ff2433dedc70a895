"""Verdicts on the parts' figures, and one table of the runtimes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.stats import spearmanr

#: Largest difference of outputs over their scale, by engine.
ERRORS = {"fp16": 1e-2, "fp16_batch1": 1e-2, "fp32": 1e-4}
#: Table against engines, targets against measured fractions, and a table's time from nothing, in seconds.
MEAN_ERROR, RANKS, MISS, TABLE_SECONDS = 0.05, 0.98, 0.03, 600.0


def agreement(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far predictions are from measurements, over the networks so far."""
    predicted, measured = (np.array([row[key] for row in rows]) for key in ("predicted_ms", "measured_ms"))
    errors = np.abs(predicted / measured - 1)
    found = {"mean_absolute_error": float(errors.mean()), "largest_error": float(errors.max())}
    if len(rows) > 2:
        found["spearman"] = float(spearmanr(predicted, measured)[0])
    return found


def summary(asked: float, tries: list[dict[str, Any]]) -> dict[str, Any]:
    """A target's first try, and the one that came nearest."""
    measured = [one for one in tries if "measured" in one]
    best = min(measured, key=lambda one: abs(one["measured"] - asked), default=None)
    return {"first": tries[0], "best": best, "tried": tries}


def verdicts(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``{name: {"found", "limit", "holds"}}`` for whatever has been measured; a part left out has none."""
    return {
        name: {
            "found": found,
            "limit": f"{sign} {limit:g}",
            "holds": found <= limit if sign == "<=" else found >= limit,
        }
        for name, found, sign, limit in _figures(results)
    }


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float, str, float]]:
    engines, table, prunings = (results.get(part, {}) for part in ("engines", "table", "prunings"))
    for name, limit in ERRORS.items():
        if name in engines:
            yield f"outputs_{name}", engines[name]["relative_error"], "<=", limit
    if table.get("complete") and not table["rows_before"]:
        yield "table_seconds", table["measuring_seconds"], "<=", TABLE_SECONDS
    if "spearman" in prunings:
        yield "table_mean_absolute_error", prunings["mean_absolute_error"], "<=", MEAN_ERROR
        yield "table_spearman", prunings["spearman"], ">=", RANKS
    for asked, target in results.get("targets", {}).get("targets", {}).items():
        for which in ("first", "best"):
            if "measured" in (target[which] or {}):
                yield (
                    f"target_{asked}_{which}_miss",
                    abs(target[which]["measured"] - float(asked)),
                    "<=",
                    MISS,
                )
    for name in ("knapsack_same_value", "allocator_same_counts"):
        if name in results.get("solvers", {}):
            yield name, float(results["solvers"][name]), ">=", 1.0


def runtimes(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the dense network's ms in fp16 at the batch, by runtime, fastest first."""
    found = {
        name: row["median_ms"] for name, row in results.get("others", {}).items() if "median_ms" in _dict(row)
    }
    dense = results.get("engines", {}).get("fp16", {})
    found |= {f"tensorrt_{mode}": dense[mode]["median_ms"] for mode in ("graph", "enqueue") if mode in dense}
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
