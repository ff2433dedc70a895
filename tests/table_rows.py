"""Rows of latency tables that were never measured, and tables made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.latency.store import LatencyStore, TableRow

HERE = Fingerprint("fake", "here", "none", "1", 1, "float32", (("mode", "formula"),))


def row(width: int, ms: float | None = 1.0, *, stable: bool = True, on: Fingerprint = HERE) -> TableRow:
    hot = None if ms is None else Measurement(ms, 0.9 * ms, 1.1 * ms, 5, stable)
    latency = None if hot is None else BlockLatency(hot, replace(hot, median_ms=3 * hot.median_ms))
    return TableRow(
        "conv", '{"op": "conv"}', (width, 8), on, latency, "it crashed" if ms is None else None, 1e9 + width
    )


def table(path: Path, *rows: TableRow) -> Path:
    store = LatencyStore(path)
    store.insert(rows)
    store.close()
    return path


def read(path: Path) -> dict[tuple[int, ...], TableRow]:
    store = LatencyStore(path, create=False)
    rows = {r.widths: r for r in store.rows()}
    store.close()
    return rows
