"""Tables, words and pictures of the accuracy benchmark's record: `docs/results/accuracy.md`, made of nothing else."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy_claims import (
    CLAIMS,
    DEFAULT,
    UNEQUAL,
    Finding,
    Lines,
    accuracies,
    case_of,
    cases_in,
    findings,
    runs,
    untested,
)
from accuracy_methods import ABLATION, METHODS, OPTIONS, RIVALS, Case
from accuracy_statistics import CONFIRMED, FEWEST, MARGIN, NOT_CONFIRMED, UNKNOWN, Interval, interval
from rich.console import Console
from rich.markdown import Markdown

from smcp_fx.report.trade_off import Point, Series, kept_shares, trade_off
from smcp_fx.storage.files import write_texts

_COSTS = {"flops": "FLOPs", "latency": "latency"}
#: The methods in the trade-off's picture; what varies only the schedule is told in the table.
_DRAWN = (*ABLATION, *RIVALS, *(name for name in OPTIONS if name not in ABLATION))
Rows = list[list[str]]


def print_tables(lines: Lines) -> None:
    """Print what the document would hold, without its pictures."""
    Console(width=150).print(Markdown("\n\n".join(_sections(lines, {}))))


def write_document(lines: Lines, folder: Path) -> list[Path]:
    """Write ``accuracy.md`` and its pictures into ``folder``; returns their paths."""
    drawn = {f"accuracy_{name}.svg": markup for name, markup in pictures(lines).items()}
    texts = {folder / name: f"{markup}\n" for name, markup in drawn.items()}
    texts[folder / "accuracy.md"] = "\n\n".join(_sections(lines, drawn)) + "\n"
    write_texts(texts, "the accuracy benchmark's document")
    return list(texts)


def pictures(lines: Lines) -> dict[str, str]:
    """The SVG pictures by name; those without data are left out."""
    found: dict[str, str | None] = {}
    for cost, unit in _COSTS.items():
        series = [Series(name, tuple(_points(lines, name, cost))) for name in _DRAWN]
        if any(entry.points for entry in series):
            series.append(Series("dense", (_dense_point(lines),)))
        found[f"trade_off_{cost}"] = trade_off(series, f"Networks pruned to shares of the dense {unit}")
    present = cases_in(lines)
    for name, shown in (
        ("kept_by_target", [Case(DEFAULT, "flops", target) for target in (0.5, 0.25, 0.1)]),
        ("kept_by_method", [Case(name, "flops", 0.25) for name in (*ABLATION, *RIVALS)]),
    ):
        chosen = [case for case in shown if case in present]
        rows = [(_kept_name(name, case), _mean_shares(runs(lines, case))) for case in chosen]
        layers = [layer["path"] for layer in runs(lines, chosen[0])[0]["layers"]][:-1] if chosen else []
        found[name] = kept_shares(layers, rows, "Channels kept, means over the seeds")
    return {name: str(markup) for name, markup in found.items() if markup is not None}


def _kept_name(picture: str, case: Case) -> str:
    return f"{case.target:.0%} of the FLOPs" if picture == "kept_by_target" else case.method


def _mean_shares(found: Sequence[Mapping[str, Any]]) -> list[float]:
    """The mean share of output channels kept, layer by layer, the classifier left out."""
    by_run = [[layer["out_kept"] / layer["out_channels"] for layer in line["layers"][:-1]] for line in found]
    return [statistics.fmean(shares) for shares in zip(*by_run, strict=True)]


def _points(lines: Lines, method: str, cost: str) -> list[Point]:
    points = []
    for case in cases_in(lines):
        if (case.method, case.cost) == (method, cost):
            found = runs(lines, case)
            accuracy = interval([line["accuracy"]["end"] for line in found])
            speed_up = statistics.fmean(1 / line["latency"]["share"] for line in found)
            low, high = (accuracy.low, accuracy.high) if accuracy.count > 1 else (accuracy.mean,) * 2
            points.append(Point(speed_up, accuracy.mean, low, high, f"{case.target:.0%} of {_COSTS[cost]}"))
    return points


def _dense_point(lines: Lines) -> Point:
    accuracy = _of(_dense(lines))
    low, high = (accuracy.low, accuracy.high) if accuracy.count > 1 else (accuracy.mean,) * 2
    return Point(1.0, accuracy.mean, low, high, "before pruning")


def _dense(lines: Lines) -> dict[int, float]:
    """The dense networks' accuracies by seed."""
    return {line["seed"]: line["accuracy"]["dense"] for line in lines if "accuracy" in line}


def _sections(lines: Lines, drawn: Mapping[str, str]) -> list[str]:
    parts = [
        "# The method's claims, tested",
        "Made from the record by `python tools/bench/accuracy.py --show docs/records/accuracy.jsonl "
        "--out docs/results`.",
        _about(lines),
        "## What it shows",
        _summary(lines),
        _table(
            ["", "claim", "at", "difference, points", "cost: ours, theirs", "seeds", "verdict"],
            _claim_rows(lines),
        ),
        _said_of_verdicts(lines),
    ]
    for cost, unit in _COSTS.items():
        rows = _case_rows(lines, cost)
        parts += (
            [f"## Pruned to shares of the {unit}", _infeasible(lines, cost)]
            if rows or cost == "flops"
            else []
        )
        header = ["method", "target", "seeds", "accuracy at stop", "accuracy at the end"]
        header += ["FLOPs kept", "latency measured", "changed after the ramp"]
        parts += [_table(header, rows)] if rows else []
        name = f"accuracy_trade_off_{cost}.svg"
        parts += [f"![Accuracy over measured speed-up]({name})"] if name in drawn else []
    kept = [name for name in drawn if "kept" in name]
    parts += ["## Channels kept"] if kept else []
    parts += [f"![Channels kept in each layer]({name})" for name in kept]
    return [part for part in parts if part]


def _about(lines: Lines) -> str:
    finished = [line for line in lines if "accuracy" in line]
    if not finished:
        return "The record holds no finished run."
    last, effort = finished[-1], finished[-1]["effort"]
    versions = ", ".join(f"{name} {number}" for name, number in last["versions"].items())
    steps = effort["steps_per_epoch"]
    unsteady = sum(not line["latency"]["stable"] for line in finished)
    return (
        f"A ResNet of three basic blocks (32, 64 and 128 channels; 2.1 M multiply-adds) on scikit-learn's digits, "
        f"each at a random place of a {effort['side']} × {effort['side']} image under Gaussian noise of "
        f"{effort['noise']:g} of the ink's range: every training image is drawn anew, {effort['test_images']:,} test "
        f"images of held-out digits are drawn once. Every method of a seed starts from the same dense network "
        f"({effort['dense_epochs'] * steps} steps of {effort['batch']} images; {_percent(_of(_dense(lines)))} test "
        f"accuracy) and has {effort['epochs'] * steps} more steps, the same images, and the same learning rates "
        f"(SGD, Nesterov momentum, peak {effort['lr']:g} dense and {effort['lr'] * 2 / 3:.3g} "
        f"pruning, cosine). The narrow "
        f"network trains from scratch for all of them. Schedules are the paper's, scaled. This library's pruner and "
        f"the greedy one keep multiples of 8 channels; the narrow network, magnitude pruning and Torch-Pruning any "
        f"number.\n\n{len(finished)} runs; {last['device']}; {versions}. Intervals are 95 % (Student's t) over "
        f"seeds, for differences over the seeds' differences. {unsteady} of {len(finished)} "
        f"latencies were taken while the "
        f"machine was busy and spread by more than 5 %."
    )


def _of(values: Mapping[int, float]) -> Interval:
    return interval(list(values.values()))


def _summary(lines: Lines) -> str:
    """In words, from the findings alone."""
    found = findings(lines)
    told = []
    for verdict in (CONFIRMED, NOT_CONFIRMED, UNKNOWN):
        places: dict[str, list[str]] = {}
        for finding in found:
            if finding.verdict == verdict:
                places.setdefault(finding.claim.text, []).append(_at(finding))
        names = [f"{text} ({', '.join(at)})" for text, at in places.items()]
        count = sum(len(at) for at in places.values())
        told.append(f"**{verdict[0].upper()}{verdict[1:]}** ({count}): {'; '.join(names) or 'none'}.")
    left = untested(lines)
    if left:
        told.append(f"**Not run**: {'; '.join(dict.fromkeys(claim.text for claim in left))}.")
    return "\n\n".join(told)


def _said_of_verdicts(lines: Lines) -> str:
    count, point = len(findings(lines)), f"{100 * MARGIN:g} point"
    return (
        f'A difference is "confirmed" when its whole interval is on the claimed side of 0, "not confirmed" when it '
        f"is on the other; a claim that two are alike when the whole interval is within {point}, "
        f"not confirmed when it "
        f"is beyond; a claim that two differ when the interval leaves out 0, not confirmed when it is within "
        f"{point}. All else cannot be told here, nor what has fewer than {FEWEST} seeds, nor an "
        f"advantage of the side that "
        f"costs over {UNEQUAL:.0%} more. Of {count} such intervals about {count * 0.05:.0f} would miss 0 by chance."
    )


def _claim_rows(lines: Lines) -> Rows:
    order = {claim: index for index, claim in enumerate(CLAIMS)}
    rows = []
    for finding in sorted(findings(lines), key=lambda f: order[f.claim]):
        difference = finding.difference
        shown, count = ("", "0") if difference is None else (_points_apart(difference), str(difference.count))
        rows.append(
            [
                str(finding.claim.number),
                finding.claim.text,
                _at(finding),
                shown,
                f"{finding.ours:.1%}, {finding.theirs:.1%}",
                count,
                finding.verdict,
            ]
        )
    return rows


def _at(finding: Finding) -> str:
    return f"{finding.target:.0%} of {_COSTS[finding.cost]}"


def _case_rows(lines: Lines, cost: str) -> Rows:
    shown = [case for case in cases_in(lines) if case.cost == cost]
    rows = []
    for case in sorted(shown, key=lambda case: (-case.target, METHODS.index(case.method))):
        found = runs(lines, case)
        at_stop = accuracies(lines, case, "at_stop")
        settled = [statistics.median(_settled(line)) for line in found if _settled(line)]
        rows.append(
            [
                case.method,
                f"{case.target:.0%}",
                str(len(found)),
                _percent(_of(at_stop)) if at_stop else "",
                _percent(_of(accuracies(lines, case))),
                _range([line["flops_share"] for line in found]),
                _range([line["latency"]["share"] for line in found]),
                f"{statistics.median(settled):.1%}" if settled else "",
            ]
        )
    return rows


def _settled(line: Mapping[str, Any]) -> list[float]:
    """Shares of the channels whose masks changed at the solves that followed the ramp."""
    return [float(share) for share in line["changed"][line["ramp_solves"] :]]


def _infeasible(lines: Lines, cost: str) -> str:
    """The targets that nothing permitted could reach, and the smallest cost that could be."""
    found = [line for line in lines if "infeasible" in line and line["cost"] == cost]
    if not found:
        return ""
    targets = Counter(case_of(line).target for line in found)
    shares = sorted(line["smallest"] / line["budget"] * line["target"] for line in found)
    named = ", ".join(f"{target:.0%}" for target in sorted(targets, reverse=True))
    return (
        f"Out of reach: {named} of the dense {_COSTS[cost]}. With 8 channels everywhere the network still takes "
        f"{shares[len(shares) // 2]:.0%} by the table."
    )


def _table(header: Sequence[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _percent(value: Interval) -> str:
    """E.g. "93.1 ± 0.4 %"."""
    spread = f" ± {100 * value.half:.1f}" if value.count > 1 else ""
    return f"{100 * value.mean:.1f}{spread} %"


def _points_apart(value: Interval) -> str:
    """E.g. "+0.8 (-0.1 to 1.7)", in points."""
    if value.count < 2:
        return f"{100 * value.mean:+.1f}"
    return f"{100 * value.mean:+.1f} ({100 * value.low:+.1f} to {100 * value.high:+.1f})"


def _range(shares: Sequence[float]) -> str:
    low, high = min(shares), max(shares)
    return f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
