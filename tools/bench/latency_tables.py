"""The tables of the latency benchmark's records, written between two marks of a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from smcp_fx.latency_residency import Residency, Whole, calibrate, relative_errors

Lines = list[dict[str, Any]]
#: So many networks calibrate in records that do not say which do.
_CALIBRATING = 5
#: Networks that spread further calibrate nothing. Near the size of the cache, where they say most, few are steady.
_TELLING = 0.25
#: Errors at points that took less say more of the profiler's clock (1 us) than of the interpolation.
MEASURABLE_MS = 0.01
_OF_THEMSELVES = (
    " Where all were measured a second time, right after: how far they are from themselves on average, and the ranks "
    "(Spearman) of one measurement in the other; no prediction can be held to more."
)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write_tables(occasions: Sequence[Lines], path: Path, steady: float) -> None:
    """Put every occasion's tables between the marks of ``path``, which is made if it is not there.

    Timings that spread further than ``steady`` are counted and left out.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Latency\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [_occasion(lines, steady, number) for number, lines in enumerate(occasions, 1)]
    latest = [lines for lines in occasions if _way(lines) == _way(occasions[-1])]
    compared = [(latest, f" in way {_way(occasions[-1])}")]
    if len(latest) < len(occasions):
        compared.append((occasions, " in any way"))
    parts[:0] = [_worst(found, steady, what) for found, what in compared if len(found) > 1]
    path.write_text(before + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + after, encoding="utf-8")


def steady_wholes(lines: Lines, model: str, setting: str, steady: float) -> list[Whole]:
    """The prunings that are predicted and were timed steadily, at the machine's usual speed."""
    return _wholes(lines, model, setting, steady, calibrating=False, limit=steady)


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
    found = _found(lines, "whole", model, setting)
    usual = np.median([line["dense_ms"] for line in found]) if found else 0.0
    return [
        Whole(**{**line["whole"], "measured_ms": line["whole"]["measured_ms"] * usual / line["dense_ms"]})
        for line, calibrates in _with_roles(found, steady)
        if line["spread"] <= limit and calibrates == calibrating
    ]


def _with_roles(found: Lines, steady: float) -> list[tuple[dict[str, Any], bool]]:
    """Each network and whether it is one to calibrate on; where a record does not say, the first five steady ones."""
    found = sorted(found, key=lambda line: int(line["index"]))
    first = [line["index"] for line in found if line["spread"] <= steady][:_CALIBRATING]
    return [(line, bool(line.get("calibrates", line["index"] in first))) for line in found]


def _occasion(lines: Lines, steady: float, number: int) -> str:
    machine = next(line for line in lines if line["kind"] == "machine")
    when = datetime.fromtimestamp(machine["time"], timezone.utc).strftime("%Y-%m-%d")
    device = machine["fingerprint"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    keys = list(dict.fromkeys((line["model"], line["setting"]) for line in lines if "model" in line))
    return "\n\n".join(
        part
        for part in (
            f"### {number}. {when}, {device['device']}, {device['threads']} thread, "
            f"{device['runtime']} {device['version']}",
            f"{versions}; cache that networks outgrow {machine['cache_bytes'] >> 20} MiB; rows timed in way "
            f"{_way(lines)}. Settings are image side x batch.",
            _sums(lines, keys, _start(lines), steady),
            _targets(lines, keys),
            _rounding(lines),
            _rows(lines),
        )
        if part
    )


@dataclass(frozen=True)
class Sums:
    """Relative errors of the prunings that were not calibrated on, and what they were measured with.

    ``of_all`` and ``rank_of_all`` are after calibration, unsteady ones included; ``apart`` and ``rank_again`` hold
    the same networks' second measurement to the first (empty where there was none). Ranks (Spearman) of fewer than
    two are nan.
    """

    before: np.ndarray
    after: np.ndarray
    of_all: np.ndarray
    apart: np.ndarray
    rank: float
    rank_of_all: float
    rank_again: float
    spread: float

    @classmethod
    def of(cls, lines: Lines, model: str, setting: str, start: Residency, steady: float) -> Sums | None:
        """None where nothing was timed that calibrates, or that is predicted."""
        calibrating = calibrating_wholes(lines, model, setting, steady)
        others = steady_wholes(lines, model, setting, steady)
        unsteady_too = _wholes(lines, model, setting, steady, calibrating=False, limit=np.inf)
        if not calibrating or not unsteady_too:
            return None
        fitted = calibrate(calibrating, start)
        before, after = (np.array(relative_errors(r, others)) for r in (start, fitted))
        of_all = np.array(relative_errors(fitted, unsteady_too))
        measured, of_all_ms = (np.array([w.measured_ms for w in found]) for found in (others, unsteady_too))
        roles = _with_roles(_found(lines, "whole", model, setting), steady)
        first, second = np.array([
            (line["whole"]["measured_ms"] / line["dense_ms"], line["again_ms"] / line["dense_again_ms"])
            for line, calibrates in roles if not calibrates and "again_ms" in line
        ]).reshape(-1, 2).T  # fmt: skip
        spread = float(np.median([line["spread"] for line, _ in roles]))
        ranks = (
            _rank(measured * (1 + after), measured),
            _rank(of_all_ms * (1 + of_all), of_all_ms),
            _rank(second, first),
        )
        return cls(before, after, of_all, second / first - 1, *ranks, spread)


def _rank(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Spearman's coefficient, nan of fewer than two."""
    return float(spearmanr(predicted, measured)[0]) if len(measured) > 1 else float("nan")


def _told(rank: float) -> str:
    return "" if np.isnan(rank) else f"{rank:.3f}"


def _lowest(ranks: Sequence[float]) -> str:
    return _told(min((rank for rank in ranks if not np.isnan(rank)), default=float("nan")))


def _worst_errors(occasions: Sequence[np.ndarray]) -> list[str]:
    """The greatest mean error and the smallest share within 10 % of occasions that have any."""
    some = [np.abs(errors) for errors in occasions if len(errors)]
    if not some:
        return ["", ""]
    return [f"{max(e.mean() for e in some):.1%}", f"{min(np.mean(e <= 0.1) for e in some):.0%}"]


def _worst(occasions: Sequence[Lines], steady: float, what: str) -> str:
    """Every model and setting as it was on the occasion that was worst in it, figure by figure."""
    keys = {(x["model"], x["setting"]): None for lines in occasions for x in lines if "model" in x}
    rows = []
    for model, setting in keys:
        found = [
            sums
            for lines in occasions
            if (sums := Sums.of(lines, model, setting, _start(lines), steady)) is not None
        ]
        targets = [x for lines in occasions for x in _found(lines, "target", model, setting)]
        off = max((100 * abs(x["measured"] - x["asked"]) for x in targets), default=float("nan"))
        if found:
            rows.append([
                model, setting, str(len(found)), str(min(len(s.after) for s in found)),
                *_worst_errors([s.before for s in found])[:1],
                *_worst_errors([s.after for s in found]), _lowest([s.rank for s in found]),
                *_worst_errors([s.of_all for s in found]), _lowest([s.rank_of_all for s in found]),
                f"{off:.1f}" if targets else "",
            ])  # fmt: skip
    head = ["model", "setting", "occasions", "steady prunings", "mean error before calibration", "after",
            "within 10 %", "Spearman", "mean error, all", "within 10 %, all", "Spearman, all",
            "points off the target"]  # fmt: skip
    return f"### The worst of {len(occasions)} occasions{what}, figure by figure\n\n" + _table(head, rows)


def _way(lines: Lines) -> str:
    """The way in which an occasion's rows were timed, and in what pages if they were huge."""
    settings = next(x for x in lines if x["kind"] == "machine")["fingerprint"]["settings"]
    pages = " with huge pages" if settings.get("huge_pages") == "on" else ""
    return f"{settings['block_timing']}{pages}"


def _start(lines: Lines) -> Residency:
    return Residency(**next(line for line in lines if line["kind"] == "machine")["residency"])


def _found(lines: Lines, kind: str, model: str, setting: str) -> Lines:
    return [x for x in lines if x["kind"] == kind and (x["model"], x["setting"]) == (model, setting)]


def _sums(lines: Lines, keys: list[tuple[str, str]], start: Residency, steady: float) -> str:
    """Errors on the prunings that were not calibrated on, before and after the calibration."""
    rows, every, of_all, numbers = [], [], [], set()
    for model, setting in keys:
        roles = _with_roles(_found(lines, "whole", model, setting), steady)
        found = [line for line, calibrates in roles if not calibrates]
        sums = Sums.of(lines, model, setting, start, steady)
        if sums is None:
            continue
        numbers.add(len(roles) - len(found))
        every += sums.after.tolist()
        of_all += sums.of_all.tolist()
        share = f"{len(sums.after)} of {len(found)}"
        rows.append(
            [model, setting, share, *_errors(sums.before), *_errors(sums.after), _told(sums.rank),
             f"{sums.spread:.1%}", *_errors(sums.of_all)[1:], _told(sums.rank_of_all),
             f"{np.abs(sums.apart).mean():.1%}" if len(sums.apart) else "", _told(sums.rank_again)]
        )  # fmt: skip
    if not rows:
        return ""
    errors = ["mean error", "within 10 %"]
    head = [
        "model",
        "setting",
        "steady prunings",
        "bias before",
        *errors,
        "bias after",
        *errors,
        "Spearman",
        "spread",
        "mean error, all",
        "within 10 %, all",
        "Spearman, all",
        "from themselves",
        "Spearman with themselves",
    ]
    total, unsteady_too = np.array(every), np.array(of_all)
    return (
        "Sum over the table against the measured whole network, before and after a calibration on "
        f"{_range(numbers)} other networks, the dense one among them, of the model and setting. What the machine "
        "drifted between networks that were not timed together is taken out by the dense one, which took turns with "
        "all:\n\n"
        + _table(head, rows)
        + f"\n\nAfter calibration: {_summary(total)}, of those whose timings spread (interquartile range) by at most "
        f"{steady:.0%} of their median; with the others (all): {_summary(unsteady_too)}."
        + (_OF_THEMSELVES if any(x["kind"] == "whole" and "again_ms" in x for x in lines) else "")
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


def _targets(lines: Lines, keys: list[tuple[str, str]]) -> str:
    rows = []
    for model, setting in keys:
        found = {x["asked"]: x for x in _found(lines, "target", model, setting)}
        if found:
            cells = []
            for asked in sorted(found, reverse=True):
                line = found[asked]
                first, unsure = line["tried"][0]["measured"], "" if line["stable"] else " (unsteady)"
                cells.append(f"{line['measured']:.1%}{unsure}; {first:.1%}, {len(line['tried'])}")
            rows.append([model, setting, *cells])
    if not rows:
        return ""
    asked = sorted({x["asked"] for x in lines if x["kind"] == "target"}, reverse=True)
    measured = [x for x in lines if x["kind"] == "target"]
    met = sum(abs(x["measured"] - x["asked"]) <= 0.03 for x in measured)
    first = sum(abs(x["tried"][0]["measured"] - x["asked"]) <= 0.03 for x in measured)
    rows = [row + [""] * (2 + len(asked) - len(row)) for row in rows]
    return (
        "Emitted files against what was asked for, share of the dense latency measured in turns (the first solve's "
        "and the number of solves behind it):\n\n"
        + _table(["model", "setting", *(f"asked {a:.0%}" for a in asked)], rows)
        + f"\n\n{met} of {len(measured)} within 3 points, {first} of them by the first solve."
    )


def _rounding(lines: Lines) -> str:
    found = [line for line in lines if line["kind"] == "rounding"]
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


def _rows(lines: Lines) -> str:
    found = [line for line in lines if line["kind"] == "table"]
    rows = [
        [x["model"], x["setting"], str(x["blocks"]), str(x["measured"]), str(x["reused"]), f"{x['seconds']:.0f} s",
         *_held_out(x, 0.0), *_held_out(x, MEASURABLE_MS), *_again(x, lines), str(x["unstable"]), str(x["failed"])]
        for x in found
    ]  # fmt: skip
    head = ["model", "setting", "blocks", "rows measured", "reused", "time", "held-out median", "95 %",
            "of 10 µs and more", "95 %", "measured anew", "95 %", "unstable", "failed"]  # fmt: skip
    words = (
        "The tables behind it. Errors of interpolation at measured points that it does not rest on: of all, and of "
        "those that took 10 µs and more (the runtime's profiler counts whole microseconds). Where some of these were "
        "measured anew, each in another session, after the table: how far those that were steady then are from "
        "themselves.\n\n"
    )
    return words + _table(head, rows) + _all_anew(lines) + _from_memory(lines) if rows else ""


def _from_memory(lines: Lines) -> str:
    """The same of the other state, where that was written down."""
    rows = [
        [x["model"], x["setting"], *_held_out(x, 0.0, "cold_"), *_held_out(x, MEASURABLE_MS, "cold_"),
         *_again(x, lines, "cold_")]
        for x in lines if x["kind"] == "table" and "cold_errors" in x
    ]  # fmt: skip
    head = [
        "model",
        "setting",
        "held-out median",
        "95 %",
        "of 10 µs and more",
        "95 %",
        "measured anew",
        "95 %",
    ]
    words = "\n\nThe same of the state in which weights come from memory:\n\n"
    return words + _table(head, rows) + _all_anew(lines, "cold_") if rows else ""


def _held_out(line: dict[str, Any], least_ms: float, state: str = "") -> list[str]:
    errors = np.array(line[f"{state}errors"])[np.array(line[f"{state}held_out_ms"]) >= least_ms]
    if len(errors) == 0:
        return ["", ""]
    return [f"{share:.1%}" for share in np.percentile(errors, [50, 95])]


def _again(table: dict[str, Any], lines: Lines, state: str = "") -> list[str]:
    """How far rows are from themselves in another session; empty where that was not measured."""
    apart, _ = _anew(lines, state, model=table["model"], setting=table["setting"])
    return [f"{share:.1%}" for share in np.percentile(apart, [50, 95])] if len(apart) else ["", ""]


def _anew(lines: Lines, state: str = "", **keys: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """How far rows whose second measurement was steady are from it, and from interpolation."""
    found = [
        x for x in lines
        if x["kind"] == "again" and f"{state}ms" in x and all(x[key] == value for key, value in keys.items())
    ]  # fmt: skip
    steady = np.array([s for x in found for s in x[f"{state}stable"]], dtype=bool)
    first, second, errors = (
        np.array([v for x in found for v in x[f"{state}{name}"]])[steady]
        for name in ("ms", "again_ms", "errors")
    )
    return np.abs(second / first - 1), errors


def _all_anew(lines: Lines, state: str = "") -> str:
    apart, errors = _anew(lines, state)
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
