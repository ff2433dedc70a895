"""The page's last part: what was measured where, when, with which versions, and how certain it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smcp_fx.report.curves import validation_pairs
from smcp_fx.report.formats import MISSING, count, duration, milliseconds, number, percent, relative_change
from smcp_fx.report.schema import Report, TableFacts
from smcp_fx.report.svg import Markup, element


def provenance(report: Report) -> Markup:
    """Return the section; parts that the report lacks are named as not measured or left out."""
    parts = [
        _facts("How sure", _certainty(report)),
        _facts("Measured on", _machine(report)),
        _facts("Run", _run(report)),
        _facts("Time", _times(report.seconds)),
        _facts("Versions", [(name, str(version)) for name, version in report.versions.items()]),
        _files(report.files),
    ]
    extra = []
    if report.notes:
        extra.append(
            element("div", element("h3", "Notes"), element("ul", *(element("li", n) for n in report.notes)))
        )
    if report.settings:
        rows = _flattened(report.settings)
        extra.append(element("details", element("summary", "Every setting"), _list(rows), class_="numbers"))
    grid = element("div", *(part for part in parts if part), class_="facts-grid")
    return element("section", element("h2", "Provenance"), grid, *extra, class_="provenance")


def _certainty(report: Report) -> list[tuple[str, str]]:
    rows = []
    for name, side in (("dense", report.dense), ("pruned", report.pruned)):
        low, high = side.latency_q1_ms, side.latency_q3_ms
        value = milliseconds(side.latency_ms)
        if number(side.latency_ms) is not None:
            if number(low) is not None and number(high) is not None:
                value += f", half of the runs from {milliseconds(low)} to {milliseconds(high)}"
            if side.latency_stable is not None:
                value += "; steady" if side.latency_stable else "; not steady"
        rows.append((f"{name}, median", value))
    table = report.table or TableFacts()
    points = number(table.held_out_points)
    rows.append(
        (
            "how far rows are from what others predict",
            f"median {percent(table.held_out_median)}, 95th percentile {percent(table.held_out_p95)}, "
            f"of {count(points)} points"
            if points
            else MISSING,
        )
    )
    pairs = validation_pairs(report.validation)
    if pairs:
        name, predicted, measured = pairs[-1]
        rows.append((f"measured over predicted, {name}", relative_change(predicted, measured) or MISSING))
    if table.foreign:
        rows.append(("table's rows are of another device or runtime", _described(table.fingerprint)))
    if table.unstable:
        rows.append(("rows in use that are unsteady", count(table.unstable)))
    correction = number(report.correction)
    if correction is not None:
        rows.append(("correction of the table by an engine, before masks were fixed", f"× {correction:.3f}"))
    return rows


def _rows_taken(table: TableFacts) -> str:
    """What measuring rows took, as far as it is known."""
    if number(table.seconds) is None:
        return ""
    return f" in {table.seconds:.0f} s: {count(table.for_solves)} for solves; {count(table.repeated)} repetitions"


def _described(fingerprint: Mapping[str, Any]) -> str:
    parts = (fingerprint.get(key) for key in ("runtime", "version", "device"))
    return ", ".join(str(part) for part in parts if part)


def _machine(report: Report) -> list[tuple[str, str]]:
    backend = report.backend
    rows = [
        (key, str(backend[key]))
        for key in ("backend", "runtime", "version", "device", "threads", "precision")
        if backend.get(key) not in (None, "")
    ]
    settings = backend.get("settings") or {}
    rows += [
        (str(key), str(value))
        for key, value in (settings.items() if isinstance(settings, dict) else settings)
    ]
    if report.batch is not None:
        rows.append(("batch", str(report.batch)))
    return rows


def _run(report: Report) -> list[tuple[str, str]]:
    names = ("model", "data", "target", "cost", "epochs", "seed", "created")
    rows = [(name, str(getattr(report, name))) for name in names if getattr(report, name) not in (None, "")]
    table = report.table
    if table is not None:
        rows.append(("latency table", table.path))
        rows.append(
            (
                "table's rows",
                f"{count(table.rows)}; this run measured {count(table.measured)} and reused {count(table.reused)}"
                + _rows_taken(table),
            )
        )
    return rows


def _times(seconds: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(str(name), duration(value)) for name, value in seconds.items()]
    known = [value for value in map(number, seconds.values()) if value is not None]
    return [*rows, ("all", duration(sum(known)))] if known else rows


def _flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flattened(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", "" if value is None else str(value)))
    return rows


def _files(files: Mapping[str, Any]) -> Markup | None:
    if not files:
        return None
    rows = []
    for name, path in files.items():
        relative = "://" not in str(path) and not str(path).lower().lstrip().startswith(
            ("javascript:", "data:")
        )
        link = element("a", str(path), href=f"./{path}") if relative else Markup(element("span", str(path)))
        rows += [element("dt", str(name)), element("dd", link)]
    return element("div", element("h3", "Files"), element("dl", *rows))


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> Markup | None:
    return element("div", element("h3", title), _list(rows)) if rows else None


def _list(rows: Sequence[tuple[str, str]]) -> Markup:
    cells = [cell for name, value in rows for cell in (element("dt", name), element("dd", value))]
    return element("dl", *cells)
