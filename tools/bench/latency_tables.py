"""The tables of the latency benchmark's records, written between two marks of a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from latency_sums import Lines, Occasion

from smcp_fx.latency.table import MEASURABLE_MS

#: A target is met this well.
_MET = 0.03
#: What sums over the table are held to: mean error, share within 10 %, and rank coefficient.
_MEAN, _WITHIN, _RANK = 0.05, 0.9, 0.98
_OF_THEMSELVES = (
    " Where all were measured a second time, right after: how far they are from themselves on average, and the ranks "
    "(Spearman) of one measurement in the other; no prediction can be held to more."
)
#: Of errors of interpolation: of all, of those long and steady enough to tell, and these from themselves.
_HELD_OUT = ["held-out median", "95 % of held-out", "telling, median", "95 % of telling",
             "measured anew, median", "95 % of measured anew"]  # fmt: skip
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write_tables(records: Sequence[Lines], path: Path, steady: float, each: Path | None = None) -> None:
    """Put the records' tables between the marks of ``path``: of all occasions together, and of each.

    Those of each go into the file ``each`` where that is given. Files that are not there are made. Timings that
    spread further than ``steady`` are counted and told apart.
    """
    occasions = [Occasion(lines, steady) for lines in records]
    together = [_all_occasions(occasions)] if len(occasions) > 1 or each is not None else []
    apart = [_occasion(occasion, number) for number, occasion in enumerate(occasions, 1)]
    _fill(path, together if each is not None else together + apart, "Latency")
    if each is not None:
        _fill(each, apart, "Latency, occasion by occasion")


def _fill(path: Path, parts: Sequence[str], title: str) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(before + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + after, encoding="utf-8")


def _all_occasions(occasions: Sequence[Occasion]) -> str:
    """Every model and setting: the median occasion and the worst, figure by figure."""
    rows = []
    for key in dict.fromkeys(key for occasion in occasions for key in occasion.keys):
        found = [occasion.sums[key] for occasion in occasions if key in occasion.sums]
        targets = [x for occasion in occasions for x in occasion.found("target", key)]
        if found or targets:
            rows.append([
                *key, str(len(found)), str(min((len(s.after) for s in found), default="")),
                _typical_and_worst([_mean(s.of_all_before) for s in found], max, "{:.1%}"),
                _typical_and_worst([_mean(s.of_all) for s in found], max, "{:.1%}", lambda mean: mean <= _MEAN),
                _typical_and_worst([_within(s.of_all) for s in found], min, "{:.0%}", lambda share: share >= _WITHIN),
                _typical_and_worst([s.rank_of_all for s in found], min, "{:.3f}", lambda rank: rank >= _RANK),
                _typical_and_worst([_mean(s.apart) for s in found], max, "{:.1%}"),
                _typical_and_worst([s.rank_again for s in found], min, "{:.3f}"),
                *_met(targets),
            ])  # fmt: skip
    head = ["model", "setting", "occasions", "fewest steady", "mean error, uncalibrated", "mean error",
            "within 10 %", "Spearman", "from themselves", "Spearman with themselves", "targets within 3 points",
            "furthest off"]  # fmt: skip
    mixed = dict.fromkeys(f"{o.machine['fingerprint']['version']} in way {o.way}" for o in occasions)
    title = "One occasion" if len(occasions) == 1 else f"All {len(occasions)} occasions"
    return (
        f"### {title}\n\n"
        f"Of runtime {', and '.join(mixed)} of timing rows. Limits: mean error {_MEAN:.0%}, {_WITHIN:.0%} within "
        f"10 %, Spearman {_RANK}, targets {100 * _MET:.0f} points; figures beyond them are bold. Of several "
        "occasions: the median, and the worst; of targets the worst. All prunings count, those whose timings were "
        "unsteady, too; of the steady ones the fewest are told. Where networks were measured a second time, right "
        "after: how far they are from themselves, and the ranks of one in the other.\n\n"
        + _table(head, rows)
        + _met_of_all(occasions)
    )


def _typical_and_worst(
    values: Sequence[float],
    worst: Callable[[Sequence[float]], float],
    form: str,
    holds: Callable[[float], bool] = lambda _: True,
) -> str:
    """The median and the worst of what there is, bold where it does not hold."""
    some = [value for value in values if not np.isnan(value)]
    if not some:
        return ""
    found = worst(some)
    told = _bold_unless(holds(found), form.format(found))
    return f"{form.format(np.median(some))}; {told}" if len(some) > 1 else told


def _mean(errors: np.ndarray[Any, Any]) -> float:
    return float(np.abs(errors).mean()) if len(errors) else float("nan")


def _within(errors: np.ndarray[Any, Any]) -> float:
    return float(np.mean(np.abs(errors) <= 0.1)) if len(errors) else float("nan")


def _met(targets: Lines) -> list[str]:
    """How many targets were met, and the percentage points that a file was off by at most; empty of none."""
    if not targets:
        return ["", ""]
    off = [abs(_of_file(x) - x["asked"]) for x in targets]
    met = sum(value <= _MET for value in off)
    return [
        _bold_unless(met == len(off), f"{met} of {len(off)}"),
        _bold_unless(max(off) <= _MET, f"{100 * max(off):.1f}"),
    ]


def _of_file(line: dict[str, Any]) -> float:
    """The fraction that the emitted file measured in a session of its own, after it was chosen."""
    return float(line.get("again", line["measured"]))


def _bold_unless(holds: bool, text: str) -> str:
    return text if holds else f"**{text}**"


def _met_of_all(occasions: Sequence[Occasion]) -> str:
    targets = [x for occasion in occasions for x in occasion.found("target")]
    if not targets:
        return ""
    above = sum(_of_file(x) - x["asked"] > _MET for x in targets)
    met = sum(abs(_of_file(x) - x["asked"]) <= _MET for x in targets)
    return f"\n\nTargets: {met} of {len(targets)} within 3 points, {above} slower than that."


def _told(rank: float) -> str:
    return "" if np.isnan(rank) else f"{rank:.3f}"


def _occasion(occasion: Occasion, number: int) -> str:
    machine = occasion.machine
    when = datetime.fromtimestamp(machine["time"], timezone.utc).strftime("%Y-%m-%d")
    device = machine["fingerprint"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return "\n\n".join(
        part
        for part in (
            f"### {number}. {when}, {device['device']}, {device['threads']} thread, "
            f"{device['runtime']} {device['version']}",
            f"{versions}; cache that networks outgrow {machine['cache_bytes'] >> 20} MiB; rows timed in way "
            f"{occasion.way}. Settings are image side x batch.",
            _sums(occasion),
            _targets(occasion),
            _rounding(occasion),
            _rows(occasion),
        )
        if part
    )


def _sums(occasion: Occasion) -> str:
    """Errors on the prunings that were not calibrated on, before and after the calibration."""
    if not occasion.sums:
        return ""
    rows = [
        [*key, f"{len(sums.after)} of {sums.number}", *_errors(sums.before), *_errors(sums.after), _told(sums.rank),
         f"{sums.spread:.1%}", *_errors(sums.of_all)[1:], _told(sums.rank_of_all), *_errors(sums.apart)[1:2],
         _told(sums.rank_again)]
        for key, sums in occasion.sums.items()
    ]  # fmt: skip
    head = ["model", "setting", "steady prunings", "bias before", "mean error before", "within 10 % before",
            "bias after", "mean error after", "within 10 % after", "Spearman", "spread", "mean error, all",
            "within 10 %, all", "Spearman, all", "from themselves", "Spearman with themselves"]  # fmt: skip
    every, of_all = (
        np.concatenate([getattr(sums, which) for sums in occasion.sums.values()])
        for which in ("after", "of_all")
    )
    numbers = {sums.calibrating for sums in occasion.sums.values()}
    return (
        "Sum over the table against the measured whole network, before and after a calibration on "
        f"{_range(numbers)} other networks, the dense one among them, of the model and setting. What the machine "
        "drifted between networks that were not timed together is taken out by the dense one, which took turns with "
        "all:\n\n"
        + _table(head, rows)
        + f"\n\nAfter calibration: {_summary(every)}, of those whose timings spread (interquartile range) by at most "
        f"{occasion.steady:.0%} of their median; with the others (all): {_summary(of_all)}."
        + (_OF_THEMSELVES if any(len(sums.apart) for sums in occasion.sums.values()) else "")
    )


def _range(numbers: set[int]) -> str:
    """The smallest and the largest number, once where they are the same."""
    return " to ".join(str(number) for number in sorted({min(numbers), max(numbers)}))


def _summary(errors: np.ndarray) -> str:
    """Size and errors in words."""
    if not len(errors):
        return "none"
    _, mean, within = _errors(errors)
    return f"mean error {mean}, {within} of {len(errors)} within 10 %"


def _errors(errors: np.ndarray) -> list[str]:
    """Bias, mean error, and the share within 10 %; empty of none."""
    if not len(errors):
        return ["", "", ""]
    return [f"{errors.mean():+.1%}", f"{np.abs(errors).mean():.1%}", f"{np.mean(np.abs(errors) <= 0.1):.0%}"]


def _targets(occasion: Occasion) -> str:
    measured = occasion.found("target")
    if not measured:
        return ""
    asked = sorted({x["asked"] for x in measured}, reverse=True)
    rows = []
    for key in occasion.keys:
        of_asked = {x["asked"]: _target(x) for x in occasion.found("target", key)}
        if of_asked:
            rows.append([*key, *(of_asked.get(a, "") for a in asked)])
    met = sum(abs(_of_file(x) - x["asked"]) <= _MET for x in measured)
    first = sum(abs(x["tried"][0]["measured"] - x["asked"]) <= _MET for x in measured)
    return (
        "Emitted files against what was asked for, share of the dense latency measured in turns, in a session of its "
        "own after it was chosen (what the first solve's network measured, and the number of solves):\n\n"
        + _table(["model", "setting", *(f"asked {a:.0%}" for a in asked)], rows)
        + f"\n\n{met} of {len(measured)} within 3 points; the first solve's network {first}."
    )


def _target(line: dict[str, Any]) -> str:
    """What the file measured, what the first solve did, and after how many."""
    stable = _unsteady(line.get("again_stable", line["stable"]))
    return f"{_of_file(line):.1%}{stable} ({line['tried'][0]['measured']:.1%}, {len(line['tried'])})"


def _unsteady(stable: bool) -> str:
    return "" if stable else " (unsteady)"


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
        "session, after the table: how far those that were steady then are from themselves. Medians, and what 95 % "
        "of them do not exceed.\n\n" + _table(head, rows) + _all_anew(occasion) + _from_memory(occasion)
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
    return words + _table(["model", "setting", *_HELD_OUT], rows) + _all_anew(occasion, "cold_")


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
        f"{(errors <= 0.1).mean():.0%} are within 10 % of what is interpolated there (95 % within "
        f"{np.percentile(errors, 95):.1%}), and {(apart <= 0.1).mean():.0%} within 10 % of themselves (95 % within "
        f"{np.percentile(apart, 95):.1%})."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
