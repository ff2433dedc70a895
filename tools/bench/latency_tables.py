"""The tables of the latency benchmark's record."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np
from latency_sums import Lines, Occasion
from records import table

from smcp_fx.latency.table import MEASURABLE_MS

_OF_THEMSELVES = (
    " Where all were measured a second time, right after: how far they are from themselves on average, and the ranks "
    "(Spearman) of one measurement in the other; no prediction can be held to more."
)
#: Of errors of interpolation: of all, of those long and steady enough to tell, and these from themselves.
_HELD_OUT = ["held-out median", "95% of held-out", "telling, median", "95% of telling",
             "measured anew, median", "95% of measured anew"]  # fmt: skip


def _told(rank: float) -> str:
    return "" if np.isnan(rank) else f"{rank:.3f}"


def of_record(lines: Lines, steady: float) -> str:
    """The tables of a record. Timings that spread further than ``steady`` are told apart."""
    occasion = Occasion(lines, steady)
    machine = occasion.machine
    when = datetime.fromtimestamp(machine["time"], timezone.utc).strftime("%Y-%m-%d")
    device = machine["fingerprint"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    parts = (
        f"{when}, {device['device']}, {device['threads']} thread, {device['runtime']} {device['version']}",
        f"{versions}; cache that networks outgrow {machine['cache_bytes'] >> 20} MiB; rows timed in way "
        f"{occasion.way}. Settings are image side x batch.",
        _sums(occasion),
        _rounding(occasion),
        _rows(occasion),
    )
    return "\n\n".join(part for part in parts if part)


def _sums(occasion: Occasion) -> str:
    if not occasion.sums:
        return ""
    rows = [
        [*key, str(len(sums.errors)), *_errors(sums.errors), _told(sums.rank), f"{sums.spread:.1%}",
         *_errors(sums.apart)[1:2], _told(sums.rank_again)]
        for key, sums in occasion.sums.items()
    ]  # fmt: skip
    head = ["model", "setting", "prunings", "bias", "mean error", "within 10%", "Spearman", "spread",
            "from themselves", "Spearman with themselves"]  # fmt: skip
    every, steady = (
        np.concatenate([getattr(sums, which) for sums in occasion.sums.values()])
        for which in ("errors", "steady")
    )
    again = any(len(sums.apart) for sums in occasion.sums.values())
    return (
        "Predicted against measured latency of whole networks. What the machine drifted between networks that were "
        "not timed together is taken out by the dense one, which took turns with all:\n\n"
        + table(head, rows)
        + f"\n\nAll: {_summary(every)}; those whose timings spread (interquartile range) by at most "
        f"{occasion.steady:.0%} of their median: {_summary(steady)}." + (_OF_THEMSELVES if again else "")
    )


def _summary(errors: np.ndarray) -> str:
    """Size and errors in words."""
    if not len(errors):
        return "none"
    _, mean, within = _errors(errors)
    return f"mean error {mean}, {within} of {len(errors)} within 10%"


def _errors(errors: np.ndarray) -> list[str]:
    """Bias, mean error, and the share within 10%; empty of none."""
    if not len(errors):
        return ["", "", ""]
    return [f"{errors.mean():+.1%}", f"{np.abs(errors).mean():.1%}", f"{np.mean(np.abs(errors) <= 0.1):.0%}"]


def _rounding(occasion: Occasion) -> str:
    found = occasion.found("rounding")
    if not found:
        return ""
    free = [line for line in found if line["measured"] <= 1.0]
    words = (
        f"Rounding: of {len(found)} sampled groups, {len(found) - len(free)} chosen counts are faster than the "
        "larger one that the table prices lowest (their blocks measured anew, in turns)."
    )
    if free:
        told = [f"{x['model']} {x['setting']} {x['group']}: {x['chosen']} to {x['larger']} takes "
                f"x {x['measured']:.3f}{_quartiles(x)} (table: x {x['tabled']:.3f})" for x in free]  # fmt: skip
        words += " More channels for nothing: " + "; ".join(told) + "."
    return words


def _quartiles(line: dict[str, Any]) -> str:
    return " ({:.3f} to {:.3f})".format(*line["quartiles"]) if "quartiles" in line else ""


def _rows(occasion: Occasion) -> str:
    rows = [
        [x["model"], x["setting"], str(x["blocks"]), str(x["measured"]), str(x["reused"]), f"{x['seconds']:.0f} s",
         *_held_out(x), *_held_out(x, telling=True), *_again(x, occasion), str(x["unstable"]), str(x["failed"])]
        for x in occasion.found("table")
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["model", "setting", "blocks", "rows measured", "reused", "time", *_HELD_OUT, "unstable", "failed"]
    return (
        "The tables behind it. Errors of interpolation at measured points that it does not rest on: of all, and of "
        "those that tell, which took 10 µs and more (the runtime's profiler counts whole microseconds) and were "
        "steady, where that was written down. Where some of 10 µs and more were measured anew, each in another "
        "session, after the table: how far those that were steady then are from themselves. Medians, and what 95% "
        "of them do not exceed.\n\n" + table(head, rows) + _all_anew(occasion) + _from_memory(occasion)
    )


def _from_memory(occasion: Occasion) -> str:
    """The same of the other state, where that was written down."""
    rows = [
        [x["model"], x["setting"], *_held_out(x, "cold_"), *_held_out(x, "cold_", telling=True),
         *_again(x, occasion, "cold_")]
        for x in occasion.found("table") if "cold_errors" in x
    ]  # fmt: skip
    if not rows:
        return ""
    words = "\n\nThe same of the state in which weights come from memory:\n\n"
    return words + table(["model", "setting", *_HELD_OUT], rows) + _all_anew(occasion, "cold_")


def _held_out(line: dict[str, Any], state: str = "", telling: bool = False) -> list[str]:
    errors = np.array(line[f"{state}errors"])
    if telling:
        long = np.array(line[f"{state}held_out_ms"]) >= MEASURABLE_MS
        errors = errors[long & np.array(line.get(f"{state}steady", long), dtype=bool)]
    if len(errors) == 0:
        return ["", ""]
    return [f"{share:.1%}" for share in np.percentile(errors, [50, 95])]


def _again(table: dict[str, Any], occasion: Occasion, state: str = "") -> list[str]:
    """How far rows are from themselves in another session; empty where that was not measured."""
    apart, _ = _anew(occasion.found("again", (table["model"], table["setting"])), state)
    return [f"{share:.1%}" for share in np.percentile(apart, [50, 95])] if len(apart) else ["", ""]


def _anew(lines: Lines, state: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """How far rows whose second measurement was steady are from it, and from interpolation."""
    found = [x for x in lines if f"{state}ms" in x]
    steady = np.array([s for x in found for s in x[f"{state}stable"]], dtype=bool)
    first, second, errors = (
        np.array([v for x in found for v in x[f"{state}{name}"]])[steady]
        for name in ("ms", "again_ms", "errors")
    )
    return np.abs(second / first - 1), errors


def _all_anew(occasion: Occasion, state: str = "") -> str:
    apart, errors = _anew(occasion.found("again"), state)
    if not len(apart):
        return ""
    return (
        f"\n\nOf {len(apart)} held-out rows of 10 µs and more that were steady when measured anew, "
        f"{(errors <= 0.1).mean():.0%} are within 10% of what is interpolated there (95% within "
        f"{np.percentile(errors, 95):.1%}), and {(apart <= 0.1).mean():.0%} within 10% of themselves (95% within "
        f"{np.percentile(apart, 95):.1%})."
    )
