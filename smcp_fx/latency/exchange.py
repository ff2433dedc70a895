"""Exchange of latency tables: merging, CSV and JSON, and checking a table.

JSON keeps every field. CSV is for devices that cannot run this library: write the rows that are needed, let the
device fill in the latencies, and read them back.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency import values
from smcp_fx.latency.store import LatencyStore, TableRow
from smcp_fx.latency.table import RUN_SIGNATURE
from smcp_fx.storage.files import brief, parse_json, read_json, write_texts

FORMAT = "smcp_fx latency table"
VERSION = 1
_MEASUREMENT = ("ms", "q1_ms", "q3_ms", "repeats", "stable")
_NEEDED = ("name", "widths", "hot_ms", "fingerprint", "signature")
_COLUMNS = (
    "name",
    "widths",
    *(f"hot_{name}" for name in _MEASUREMENT),
    *(f"cold_{name}" for name in _MEASUREMENT),
    "error",
    "measured_at",
    "fingerprint",
    "signature",
)


@dataclass(frozen=True)
class Exchanged:
    """The result of a merge or an import: how many rows were read, and how many of them were new or better."""

    read: int
    taken: int


def merge(target: Path, sources: Sequence[Path], fingerprint_key: str | None = None) -> Exchanged:
    """Merge tables into ``target`` (created if it does not exist), all rows or none.

    ``fingerprint_key``: take only this fingerprint's rows. Without it, `TableError` if the rows, those in
    ``target`` included, have several fingerprints. Of two measurements of a row the stable one stays.
    """
    rows: list[TableRow] = []
    for source in sources:
        if source.resolve() == target.resolve():
            raise TableError(f"{source} is the file to merge into; name it once")
        rows += rows_of(source)
    standing = rows_of(target) if target.exists() and target.stat().st_size else []
    if fingerprint_key is None:
        refuse_mixed([*standing, *rows], "pass --fingerprint KEY to merge the rows of one")
    else:
        rows = [row for row in rows if row.fingerprint.key() == fingerprint_key]
        if not rows:
            raise TableError(f"none of the tables has rows of fingerprint {fingerprint_key!r}")
    return _insert(target, rows)


def refuse_mixed(rows: Iterable[TableRow], advice: str) -> None:
    """Raise `TableError` if rows are of several devices, runtimes or settings."""
    by_key = {row.fingerprint.key(): row.fingerprint for row in rows}
    if len(by_key) > 1:
        listed = "; ".join(f"{key}: {fingerprint.describe()}" for key, fingerprint in by_key.items())
        raise TableError(
            f"latencies of {len(by_key)} fingerprints are not mixed ({listed}; they differ in "
            f"{differences(*list(by_key.values())[:2])}): {advice}"
        )


def differences(left: Fingerprint, right: Fingerprint) -> str:
    """Return how two fingerprints differ: "threads: 1 and 2"."""
    a, b = (_flat(fingerprint.as_dict()) for fingerprint in (left, right))
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    return ", ".join(f"{name}: {a.get(name, 'not set')} and {b.get(name, 'not set')}" for name in names)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, **values["settings"], "settings": ""}


def export_rows(rows: Sequence[TableRow], path: Path) -> None:
    """Write rows as ``.json`` or ``.csv``; the file is complete or absent."""
    kind = _kind(path)
    write_texts({path: _as_json(rows) if kind == "json" else _as_csv(rows)}, "the rows")


def import_rows(path: Path, target: Path) -> Exchanged:
    """Read a file that `export_rows` wrote (a device may have filled in latencies) into a table, all or none.

    Rows with neither a latency nor an error are skipped. `TableError` names the faulty line.
    """
    kind = _kind(path)
    if not path.exists():
        raise TableError(f"there is no file {path}")
    rows, prints = list[TableRow](), dict[str, Fingerprint]()
    for place, record in _from_json(path) if kind == "json" else _from_csv(path):
        row = _row(record, f"{path}, {place}", prints)
        if row is not None:
            rows.append(row)
    if not rows:
        raise TableError(f"{path} has no row with a latency; fill in hot_ms (and cold_ms where it is known)")
    return _insert(target, rows)


def wanted_rows(
    missing: Iterable[tuple[str, str, tuple[int, ...]]], fingerprint: Fingerprint
) -> list[TableRow]:
    """Return rows without latencies for ``missing`` (name, signature, widths), for another device to fill in."""
    return [
        TableRow(name, signature, widths, fingerprint, None, None, 0.0) for name, signature, widths in missing
    ]


# ---- checking ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something to know about a table; ``bad`` if its numbers should not be used as they are."""

    what: str
    bad: bool


def check(path: Path) -> list[Finding]:
    """Check a table's file: damage, failed, unstable, impossible and abandoned rows, mixed fingerprints.

    `TableError` for files that are missing, foreign, of another version, or too damaged to be read.
    """
    store = LatencyStore(path, read_only=True)
    findings, prints = list[Finding](), set[str]()
    try:
        findings += [Finding(f"damaged: {line}", True) for line in store.damage()]
        for row in store.looked_through():
            if isinstance(row, TableError):
                findings.append(Finding(str(row), True))
            else:
                findings += _of_row(row)
                prints.add(row.fingerprint.key())
        alive, left = store.claimed()
    finally:
        store.close()
    if len(prints) > 1:
        findings.append(Finding(f"rows of {len(prints)} fingerprints, each used by itself", False))
    if left:
        findings.append(
            Finding(f"{left} rows left unfinished; they are measured again when asked for", False)
        )
    if alive:
        findings.append(Finding(f"{alive} rows are being measured now", False))
    return findings


def _of_row(row: TableRow) -> list[Finding]:
    """Return a row's faults: it failed, was not steady, or took no time (the clock was too coarse)."""
    where = f"{row.name} at {_join(row.widths) or 'its only size'}"
    if row.latency is None:
        return [Finding(f"failed: {where}: {row.error}", True)]
    findings = []
    for state, one in (("hot", row.latency.hot), ("cold", row.latency.cold)):
        if one is None:
            continue
        if one.median_ms <= 0 and row.signature != RUN_SIGNATURE:
            findings.append(Finding(f"impossible: {where}: {state} {one.median_ms:g} ms", True))
        elif not one.stable:
            text = f"unstable: {where}: {state} {one.median_ms:.4g} ms, spread {one.spread:.0%}"
            findings.append(Finding(text, True))
    return findings


# ---- files ------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[TableRow]:
    """Return the rows of a table's file."""
    store = LatencyStore(path, read_only=True)
    try:
        return store.rows()
    finally:
        store.close()


def _insert(target: Path, rows: Sequence[TableRow]) -> Exchanged:
    new = not target.exists()
    store = LatencyStore(target)
    try:
        taken = store.insert(rows)
    except BaseException:
        store.close()
        if new:
            target.unlink(missing_ok=True)
        raise
    store.close()
    return Exchanged(len(rows), taken)


def _kind(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("json", "csv"):
        raise InputError(f"{path} must end in .json or .csv")
    return kind


def _record(row: TableRow) -> dict[str, Any]:
    record: dict[str, Any] = {"name": row.name, "widths": list(row.widths)}
    for state in ("hot", "cold"):
        measured: Measurement | None = getattr(row.latency, state) if row.latency else None
        values = [None] * 5 if measured is None else [
            measured.median_ms, measured.q1_ms, measured.q3_ms, measured.repeats, measured.stable
        ]  # fmt: skip
        record.update(zip((f"{state}_{name}" for name in _MEASUREMENT), values, strict=True))
    return {
        **record,
        "error": row.error,
        "measured_at": row.measured_at or None,
        "fingerprint": row.fingerprint.as_dict(),
        "signature": row.signature,
    }


def _as_json(rows: Sequence[TableRow]) -> str:
    prints = {row.fingerprint.key(): row.fingerprint.as_dict() for row in rows}
    records = [{**_record(row), "fingerprint": row.fingerprint.key()} for row in rows]
    whole = {"format": FORMAT, "version": VERSION, "fingerprints": prints, "rows": records}
    return json.dumps(whole, indent=1) + "\n"


def _as_csv(rows: Sequence[TableRow]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        record = _record(row)
        record["widths"] = _join(row.widths)
        record["fingerprint"] = json.dumps(record["fingerprint"], sort_keys=True)
        writer.writerow({key: _cell(value) for key, value in record.items()})
    return out.getvalue()


def _cell(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else int(value) if isinstance(value, bool) else value


def _join(widths: tuple[int, ...]) -> str:
    return "x".join(map(str, widths))


def _from_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = read_json(path, TableError, "export it again")
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise TableError(f"{path} is no exported latency table (its format is not {FORMAT!r})")
    if whole.get("version") != VERSION:
        raise TableError(f"{path} is of version {brief(whole.get('version'))}, this library reads {VERSION}")
    rows, prints = whole.get("rows") or [], whole.get("fingerprints") or {}
    if not isinstance(rows, list) or not isinstance(prints, dict):
        raise TableError(f"{path} is no exported latency table: rows must be a list, fingerprints an object")
    for number, record in enumerate(rows, 1):
        key = record.get("fingerprint") if isinstance(record, dict) else None
        if not isinstance(key, str) or key not in prints:
            raise TableError(f"{path}, row {number}: its fingerprint {brief(key)} is not in the file")
        yield f"row {number}", {**record, "fingerprint": prints[key]}


def _from_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a CSV file, with their numbers parsed; empty cells are None."""
    line = 0
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            columns = next(reader, [])
            missing = [name for name in _NEEDED if name not in columns]
            if missing:
                raise TableError(
                    f"{path} is no exported latency table: it has no columns {', '.join(missing)}"
                )
            for cells in reader:
                line = reader.line_num
                if not cells:
                    continue
                if len(cells) != len(columns):
                    raise ValueError(f"{len(cells)} cells in a file of {len(columns)} columns")
                record = dict(zip(columns, (cell or None for cell in cells), strict=True))
                yield f"line {line}", {name: _of_cell(name, cell) for name, cell in record.items()}
    except (OSError, ValueError, csv.Error) as error:
        raise TableError(f"{path}, line {line or 1}: {error}; was the file cut off?") from error


def _of_cell(column: str, cell: str | None) -> Any:
    """Return a cell's value, parsed by its column."""
    if column == "widths":
        return [int(width) for width in (cell or "").split("x") if width]
    if column == "fingerprint":
        return cell or ""
    if cell is None or column in ("name", "signature", "error"):
        return cell
    if column.endswith("_stable"):
        return {"1": True, "true": True, "0": False, "false": False}.get(cell.lower(), cell)
    if column.endswith("_repeats"):
        return int(cell)
    return float(cell) if column in _COLUMNS else cell


def _row(record: Mapping[str, Any], where: str, prints: dict[str, Fingerprint]) -> TableRow | None:
    """Return the row of a record; None if it holds neither a latency nor an error.

    ``prints``: the fingerprints parsed so far, by their text; a file has many rows but few fingerprints.
    """
    try:
        hot, cold = (_measurement(record, state) for state in ("hot", "cold"))
        error = record.get("error")
        if hot is None and not error:
            return None
        written = record["fingerprint"]
        key = written if isinstance(written, str) else json.dumps(written)
        if key not in prints:
            prints[key] = values.fingerprint(parse_json(key))
        measured_at = record.get("measured_at")
        return TableRow(
            values.text(record["name"], "name"),
            values.text(record["signature"], "signature"),
            values.widths(record["widths"]),
            prints[key],
            BlockLatency(hot, cold) if hot is not None else None,
            None if hot is not None else values.text(error, "error"),
            values.moment(measured_at, "measured_at") if measured_at else time.time(),
        )
    except KeyError as error:
        raise TableError(f"{where}: it has no {error}") from error
    except ValueError as error:
        raise TableError(f"{where}: {error}") from error


def _measurement(record: Mapping[str, Any], state: str) -> Measurement | None:
    """Return a state's measurement; missing quartiles are taken to be the median, and missing repeats to be 1."""
    median, q1, q3, repeats, stable = (record.get(f"{state}_{name}") for name in _MEASUREMENT)
    if median is None:
        return None
    low, high = (median if quartile is None else quartile for quartile in (q1, q3))
    steady = 1 if stable is None else int(stable) if isinstance(stable, bool) else stable
    measured = values.measurement((median, low, high, 1 if repeats is None else repeats, steady), state)
    if measured is not None and measured.median_ms == 0 and record.get("signature") != RUN_SIGNATURE:
        raise ValueError(f"{state}_ms is 0; a latency is a positive number of ms")
    return measured
