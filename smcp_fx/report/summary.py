"""The result of a compile run in one sentence and one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from smcp_fx.report.formats import (
    MISSING,
    count,
    milliseconds,
    number,
    percent,
    relative_change,
    signed,
)
from smcp_fx.report.schema import Report, Side, TableFacts
from smcp_fx.texts import significant

_ARROW = "\N{RIGHTWARDS ARROW}"


@dataclass(frozen=True)
class SummaryRow:
    """One line of the comparison; ``spread`` holds the quartiles of dense and pruned, where known."""

    name: str
    dense: str
    pruned: str
    change: str
    spread: tuple[str, str] = ("", "")


def model_name(report: Report) -> str:
    """Return the model's name without its source: "resnet18" of "torchvision:resnet18"."""
    return (report.model or "the model").rsplit(":", 1)[-1]


def cost_word(report: Report) -> str:
    """Return the name of the cost that the target limits: "latency", "FLOPs" or "parameters"."""
    return "latency" if report.cost == "ms" else report.cost


def measure_word(report: Report) -> str:
    """Return the name of the quality measured: accuracy or agreement."""
    return "agreement with the dense network" if report.agreement else "accuracy"


def headline(report: Report) -> str:
    """Return the run's result in one sentence, from the available figures."""
    dense, pruned = _sides(report)
    asked = f"asked: {percent(report.target_fraction, trim=True)}"
    times = number(pruned.latency_ms), number(dense.latency_ms)
    runs = (
        f"runs in {milliseconds(times[0])} instead of {milliseconds(times[1])}" if None not in times else ""
    )
    predicted = percent(report.predicted_fraction)
    if cost_word(report) != "latency":
        saving = f"keeps {predicted} of its {cost_word(report)} ({asked})"
        sentence = f"{saving} and {runs}" if runs else saving
    elif runs:
        sentence = f"{runs}: {percent(report.measured_fraction)} of the dense latency ({asked})"
    elif predicted == MISSING:
        sentence = "has not been measured"
    else:
        sentence = f"is predicted to take {predicted} of the dense latency ({asked}), not yet measured"
    accuracies = dense.accuracy, pruned.accuracy
    if all(number(value) is not None for value in accuracies):
        word = "agreement" if report.agreement else "accuracy"
        sentence += f", {word} {percent(accuracies[0])} {_ARROW} {percent(accuracies[1])}"
    return f"{model_name(report)} {sentence}"


def comparison(report: Report) -> list[SummaryRow]:
    """Return the lines of the table: dense, pruned, change."""
    dense, pruned = _sides(report)
    accuracy = number(dense.accuracy), number(pruned.accuracy)
    points = ""
    if accuracy[0] is not None and accuracy[1] is not None:
        points = f"{signed(100 * (accuracy[1] - accuracy[0]))} points"
    name = measure_word(report)
    rows = [SummaryRow(name, percent(accuracy[0]), percent(accuracy[1]), points), *_in_float(report, name)]
    for name, key in (
        ("latency, predicted by the table", "predicted_ms"),
        ("latency, measured", "latency_ms"),
    ):
        before, after = getattr(dense, key), getattr(pruned, key)
        if key == "predicted_ms" and cost_word(report) != "latency" and before is after is None:
            continue  # a target of FLOPs needs no table
        spread = (_quartiles(dense), _quartiles(pruned)) if key == "latency_ms" else ("", "")
        rows.append(
            SummaryRow(
                name, milliseconds(before), milliseconds(after), relative_change(before, after), spread
            )
        )
    times = number(dense.latency_ms), number(pruned.latency_ms)
    faster = f"{significant(times[0] / times[1])}×" if times[0] and times[1] else MISSING
    rows.append(SummaryRow("speed-up", "1×", faster, ""))
    for name, key in (("parameters", "params"), ("FLOPs (multiply-adds) per input", "flops")):
        before, after = getattr(dense, key), getattr(pruned, key)
        rows.append(SummaryRow(name, count(before), count(after), relative_change(before, after)))
    return rows


def _in_float(report: Report, name: str) -> list[SummaryRow]:
    """Return the networks' accuracies in float32, and latencies as shares of the dense one's in float32."""
    facts = report.precision
    if facts is None:
        return []
    dense, pruned = facts.dense_accuracy, facts.pruned_accuracy
    points = "" if dense is None or pruned is None else f"{signed(100 * (pruned - dense))} points"
    before, plain = report.dense.latency_ms, facts.dense_ms
    share = None if before is None or not plain else before / plain
    return [
        SummaryRow(f"{name}, in float32", percent(dense), percent(pruned), points),
        SummaryRow(
            "latency over the dense network's in float32", percent(share), percent(facts.fraction), ""
        ),
    ]


def target_line(report: Report) -> str:
    """Return the target, the predicted and measured fractions, and the measured device, in one line.

    With a table of another device, the prediction is for that device, and the measurement for this one.
    """
    table = report.table or TableFacts()
    device = table.fingerprint.get("device") or "another device"
    there = f" for {device}" if table.foreign else ""
    fractions = [
        f"target {percent(report.target_fraction, trim=True)} of the dense {cost_word(report)}",
        f"predicted {percent(report.predicted_fraction)}{there}",
        f"measured{' here' if there else ''}{'' if cost_word(report) == 'latency' else ' latency'} "
        f"{percent(report.measured_fraction)}".replace(f"measured {MISSING}", MISSING)
        + _how_sure(report),
    ]
    return ", ".join(fractions) + f"; {backend_line(report)}"


def _how_sure(report: Report) -> str:
    """Return the standard error of the measured fraction and the quartiles of its rounds, if known."""
    measured, error = number(report.measured_fraction), number(report.measured_fraction_error)
    low, high = report.measured_fraction_q1, report.measured_fraction_q3
    if measured is None or error is None:
        return ""
    rounds = report.measured_rounds
    return f" ± {100 * error:.1f} points (quartiles of {rounds} rounds: {percent(low)} to {percent(high)})"


def backend_line(report: Report) -> str:
    """Return runtime, version, precision, threads, device and batch in one line."""
    backend = report.backend
    threads = backend.get("threads")
    runtime = (
        f"{backend.get('runtime') or backend.get('backend') or 'no runtime'} {backend.get('version') or ''}"
    )
    parts = [
        runtime.strip(),
        backend.get("precision"),
        f"{threads} thread{'s' * (threads != 1)}" if threads else None,
        f"batch {report.batch}" if report.batch else None,
        backend.get("device"),
    ]
    return ", ".join(str(part) for part in parts if part)


def described(fingerprint: Mapping[str, Any]) -> str:
    """Return runtime, version and device of a fingerprint in one line."""
    parts = (fingerprint.get(key) for key in ("runtime", "version", "device"))
    return ", ".join(str(part) for part in parts if part)


def unsteady_line(report: Report) -> str | None:
    """Say which timings other work disturbed, and what to do; None if all timings are stable."""
    sides = zip(("dense", "pruned"), _sides(report), strict=True)
    names = " and ".join(name for name, side in sides if side.latency_stable is False)
    if not names:
        return None
    return f"Other work disturbed the timings of {names}: measure again when the machine is idle."


def summary_table(report: Report) -> Table:
    """Return the comparison as a `rich` table; its caption holds the target and the backend."""
    table = Table(title=f"{model_name(report)} on {report.data or 'its data'}", box=box.SIMPLE_HEAD)
    table.title = Text(str(table.title))  # plain text: names may look like rich markup
    table.add_column("")
    for name in ("dense", "pruned", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison(report):
        cells = (row.dense, row.pruned, row.change)
        table.add_row(Text(row.name), *(Text(cell) for cell in cells))
        if any(row.spread):
            table.add_row(
                Text("  quartiles", style="dim"), *(Text(cell, style="dim") for cell in row.spread), ""
            )
    lines = (target_line(report), unsteady_line(report))
    table.caption = Text("\n".join(line for line in lines if line))
    return table


def _sides(report: Report) -> tuple[Side, Side]:
    return report.dense, report.pruned


def _quartiles(side: Side) -> str:
    low, high = number(side.latency_q1_ms), number(side.latency_q3_ms)
    return "" if low is None or high is None else f"{significant(low)} to {significant(high)} ms"
