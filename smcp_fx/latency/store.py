"""The latency table's file: SQLite, with a row for each block, widths and fingerprint, committed as it is measured.

A row is *claimed* before it is measured, so that two processes never measure the same one; a claim is void once its
process is gone. `kill -9` therefore loses the row being measured and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.errors import TableError
from smcp_fx.latency import values
from smcp_fx.latency.claims import is_alive, process_name
from smcp_fx.latency.file import TableFile
from smcp_fx.latency.surface import Point
from smcp_fx.storage.files import brief, parse_json

#: A row whose process died this often while measuring it is marked as failed. Chosen, not measured.
MAX_ATTEMPTS = 3

_HOT = "hot_ms, hot_q1_ms, hot_q3_ms, hot_repeats, hot_stable"
_COLD = _HOT.replace("hot", "cold")
_FINGERPRINTS = "SELECT id, key, fields FROM fingerprint ORDER BY id"
_BLOCKS = "SELECT id, name, signature FROM block ORDER BY id"


@dataclass(frozen=True)
class TableRow:
    """One row of the table. If the measurement failed, ``latency`` is None and ``error`` says why."""

    name: str
    signature: str
    widths: Point
    fingerprint: Fingerprint
    latency: BlockLatency | None
    error: str | None
    measured_at: float


class LatencyStore:
    """The SQLite file of a latency table. Errors are `TableError`s, which name the file and the damaged row.

    ``read_only``: open an existing table, and write nothing to it or beside it.
    """

    def __init__(self, path: Path | str, *, create: bool = True, read_only: bool = False) -> None:
        self.path = Path(path)
        self._owner = process_name(os.getpid())
        with self._reported():
            existed = self.path.exists() and self.path.stat().st_size > 0
            if not existed and (read_only or not create):
                raise TableError(f"there is no latency table {self.path}: measure one first")
            self._file = TableFile(self.path, read_only=read_only)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def fingerprints(self) -> list[Fingerprint]:
        """Return the devices and runtimes that the table has rows for."""
        with self._reported():
            used = {number for (number,) in self._file.run("SELECT DISTINCT fingerprint FROM latency")}
            return [self._fingerprint(*row) for row in self._file.run(_FINGERPRINTS) if row[0] in used]

    def measured(
        self, signature: str, fingerprint: Fingerprint, as_of: float = math.inf
    ) -> dict[Point, BlockLatency]:
        """Return the rows of one block that were measured up to a time (seconds), by widths."""
        latencies: dict[Point, BlockLatency] = {}
        with self._reported():
            columns = f"widths, {_HOT}, {_COLD}"
            for row in self._of_block(columns, "measured", signature, fingerprint, as_of):
                with self._placed(signature, row[0]):
                    point = values.widths_of_text(row[0])
                    latencies[point] = values.latency(row[1:])
                    values.as_many(point, len(next(iter(latencies))))
        return latencies

    def failures(self, signature: str, fingerprint: Fingerprint, as_of: float = math.inf) -> dict[Point, str]:
        """Return the errors of one block's measurements that failed up to a time, by widths."""
        errors: dict[Point, str] = {}
        with self._reported():
            for row in self._of_block("widths, error", "failed", signature, fingerprint, as_of):
                with self._placed(signature, row[0]):
                    errors[values.widths_of_text(row[0])] = values.text(row[1], "the error")
        return errors

    def times(self, signature: str, fingerprint: Fingerprint) -> dict[Point, float]:
        """Return when the rows of one block were measured or failed (seconds), by widths."""
        times: dict[Point, float] = {}
        with self._reported():
            for state in ("measured", "failed"):
                for row in self._of_block("widths, changed", state, signature, fingerprint):
                    with self._placed(signature, row[0]):
                        times[values.widths_of_text(row[0])] = values.moment(row[1], "its time")
        return times

    def rows(self, fingerprint: Fingerprint | None = None) -> list[TableRow]:
        """Return all measured and failed rows, or those of one fingerprint."""
        rows = []
        for row in self.looked_through():
            if isinstance(row, TableError):
                raise row
            if fingerprint is None or row.fingerprint == fingerprint:
                rows.append(row)
        return rows

    def looked_through(self) -> Iterator[TableRow | TableError]:
        """Yield every measured or failed row, or for a damaged row its `TableError`."""
        with self._reported():
            prints: dict[int, Fingerprint | TableError] = {}
            for row in self._file.run(_FINGERPRINTS):
                try:
                    prints[row[0]] = self._fingerprint(*row)
                except TableError as error:
                    prints[row[0]] = error
            blocks = {number: (name, signature) for number, name, signature in self._file.run(_BLOCKS)}
            rows = self._file.run(
                f"SELECT fingerprint, block, widths, state, error, changed, owner, attempts, {_HOT}, {_COLD} "
                "FROM latency ORDER BY block, changed"
            )
            dimensions: dict[int, int] = {}
            for row in rows:
                here = prints.get(row[0])
                if here is None or row[1] not in blocks:
                    continue  # a dangling reference, which `damage` reports
                try:
                    if isinstance(here, TableError):
                        raise here
                    with self._placed(blocks[row[1]][0], row[2]):
                        entry = _row(here, *blocks[row[1]], *row[2:])
                        if entry is not None:
                            values.as_many(entry.widths, dimensions.setdefault(row[1], len(entry.widths)))
                except TableError as error:
                    yield error
                else:
                    if entry is not None:
                        yield entry

    def claim(
        self, name: str, signature: str, fingerprint: Fingerprint, points: Sequence[Point]
    ) -> Point | None:
        """Claim the first of ``points`` that is neither known nor claimed, and return it; None if all are."""
        with self._transaction() as run:
            key = (self._fingerprint_id(fingerprint), self._block_id(name, signature))
            taken = {}
            for widths, state, owner, attempts, changed in run(
                "SELECT widths, state, owner, attempts, changed FROM latency WHERE fingerprint = ? AND block = ?",
                key,
            ):
                with self._placed(name, widths):
                    tried = values.whole(attempts, "the number of attempts", 0)
                    taken[widths] = state, owner, tried, values.moment(changed, "its time")
            for point in points:
                widths = json.dumps(point)
                state, owner, attempts, changed = taken.get(widths, ("free", "", 0, 0.0))
                if state in ("measured", "failed") or (
                    state == "claimed" and is_alive(owner, changed, self._owner)
                ):
                    continue
                if attempts >= MAX_ATTEMPTS:
                    run(
                        "UPDATE latency SET state = 'failed', error = ?, changed = ? "
                        "WHERE fingerprint = ? AND block = ? AND widths = ?",
                        (f"the process died {attempts} times measuring it", time.time(), *key, widths),
                    )
                    continue
                run(
                    "INSERT OR REPLACE INTO latency "
                    "(fingerprint, block, widths, state, owner, attempts, changed) "
                    "VALUES (?, ?, ?, 'claimed', ?, ?, ?)",
                    (*key, widths, self._owner, attempts + 1, time.time()),
                )
                return point
        return None

    def write(
        self, signature: str, fingerprint: Fingerprint, results: Mapping[Point, BlockLatency | str]
    ) -> None:
        """Write the results of claimed rows, all or none: each a latency, or the error of its measurement."""
        columns = [f"{name} = ?" for name in f"{_HOT}, {_COLD}".split(", ")]
        with self._transaction() as run:
            for point, result in results.items():
                times: list[float | int | None] = [None] * 10
                if isinstance(result, BlockLatency):
                    times = [*_columns(result.hot), *_columns(result.cold)]
                run(
                    f"UPDATE latency SET state = ?, error = ?, changed = ?, {', '.join(columns)} "
                    "WHERE fingerprint = (SELECT id FROM fingerprint WHERE key = ?) "
                    "AND block = (SELECT id FROM block WHERE signature = ?) AND widths = ?",
                    (
                        "measured" if isinstance(result, BlockLatency) else "failed",
                        None if isinstance(result, BlockLatency) else result,
                        time.time(),
                        *times,
                        fingerprint.key(),
                        signature,
                        json.dumps(point),
                    ),
                )

    def insert(self, rows: Sequence[TableRow]) -> int:
        """Add rows measured elsewhere, all or none; return how many were new or better than the stored ones.

        A measured row is better than a failed or claimed one, and a stable one is better than an unstable one.
        """
        taken = 0
        with self._transaction() as run:
            for row in rows:
                key = (self._fingerprint_id(row.fingerprint), self._block_id(row.name, row.signature))
                (other,) = run("SELECT max(widths) FROM latency WHERE block = ?", key[1:]).fetchone()
                with self._placed(row.name, json.dumps(row.widths)):
                    values.as_many(
                        row.widths, len(values.widths_of_text(other)) if other else len(row.widths)
                    )
                stored = run(
                    "SELECT state, hot_stable, cold_stable FROM latency "
                    "WHERE fingerprint = ? AND block = ? AND widths = ?",
                    (*key, json.dumps(row.widths)),
                ).fetchone()
                standing = -1 if stored is None else _rank(stored[0] == "measured", stored[1:])
                latency = row.latency
                columns = [*_columns(latency.hot), *_columns(latency.cold)] if latency else [None] * 10
                if _rank(latency is not None, (columns[4], columns[9])) <= standing:
                    continue
                run(
                    f"INSERT OR REPLACE INTO latency (fingerprint, block, widths, state, owner, attempts, changed, "
                    f"{_HOT}, {_COLD}, error) VALUES ({', '.join('?' * 18)})",
                    (
                        *key,
                        json.dumps(row.widths),
                        "measured" if latency else "failed",
                        "elsewhere",
                        1,
                        row.measured_at,
                        *columns,
                        row.error,
                    ),
                )
                taken += 1
        return taken

    def claimed(self) -> tuple[int, int]:
        """Return how many rows running processes have claimed, and how many processes that are gone."""
        with self._reported():
            owners = self._file.run("SELECT owner, changed FROM latency WHERE state = 'claimed'").fetchall()
        alive = sum(is_alive(owner, changed, self._owner) for owner, changed in owners)
        return alive, len(owners) - alive

    def damage(self) -> list[str]:
        """Return the faults that SQLite finds in the file, one line each."""
        with self._reported():
            lines = [row[0] for row in self._file.run("PRAGMA integrity_check").fetchall()]
            orphans = self._file.run("PRAGMA foreign_key_check").fetchall()
        return [str(line) for line in lines if line != "ok"] + [
            f"a row of table {row[0]} refers to nothing" for row in orphans
        ]

    def release(self, signature: str, fingerprint: Fingerprint, points: Sequence[Point]) -> None:
        """Give up claims, so that any process can claim the rows at once."""
        with self._transaction() as run:
            for point in points:
                run(
                    "DELETE FROM latency WHERE state = 'claimed' AND owner = ? AND widths = ? "
                    "AND fingerprint = (SELECT id FROM fingerprint WHERE key = ?) "
                    "AND block = (SELECT id FROM block WHERE signature = ?)",
                    (self._owner, json.dumps(point), fingerprint.key(), signature),
                )

    def forget_failures(self, signature: str, fingerprint: Fingerprint) -> int:
        """Drop the failed rows of one block, so that they are measured again; return how many."""
        with self._transaction() as run:
            return run(
                "DELETE FROM latency WHERE state = 'failed' "
                "AND fingerprint = (SELECT id FROM fingerprint WHERE key = ?) "
                "AND block = (SELECT id FROM block WHERE signature = ?)",
                (fingerprint.key(), signature),
            ).rowcount

    def _of_block(
        self, columns: str, state: str, signature: str, fingerprint: Fingerprint, as_of: float = math.inf
    ) -> Iterator[tuple[Any, ...]]:
        limit = "" if as_of == math.inf else f" AND changed <= {as_of!r}"  # unlimited: damaged times too
        return self._file.run(
            f"SELECT {columns} FROM latency JOIN block ON block.id = block JOIN fingerprint f ON f.id = fingerprint "
            f"WHERE signature = ? AND key = ? AND state = ?{limit}",
            (signature, fingerprint.key(), state),
        )

    def _fingerprint(self, number: int, key: Any, fields: Any) -> Fingerprint:
        with self._placed("fingerprint", number):
            fingerprint = values.fingerprint(parse_json(values.text(fields, "its fields")))
            if fingerprint.key() != key:
                raise ValueError(f"its key is {brief(key)}, its fields have {fingerprint.key()}")
        return fingerprint

    @contextmanager
    def _placed(self, name: Any, at: Any) -> Iterator[None]:
        """Name the row of the file in errors about its values."""
        try:
            yield
        except ValueError as error:
            raise TableError(
                f"{self.path} is damaged: {brief(name)} at {brief(at)}: {error}. Measure into another table, or take "
                "a sound copy"
            ) from error

    def _fingerprint_id(self, fingerprint: Fingerprint) -> int:
        self._file.run(
            "INSERT OR IGNORE INTO fingerprint (key, fields) VALUES (?, ?)",
            (fingerprint.key(), json.dumps(fingerprint.as_dict(), sort_keys=True)),
        )
        rows = self._file.run("SELECT id FROM fingerprint WHERE key = ?", (fingerprint.key(),))
        return int(rows.fetchone()[0])

    def _block_id(self, name: str, signature: str) -> int:
        self._file.run("INSERT OR IGNORE INTO block (signature, name) VALUES (?, ?)", (signature, name))
        rows = self._file.run("SELECT id FROM block WHERE signature = ?", (signature,))
        return int(rows.fetchone()[0])

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            full = any(word in str(error) for word in ("full", "disk I/O error"))  # for a full disk
            advice = "; free space, or measure into another folder" if full else ""
            raise TableError(f"the latency table {self.path} cannot be used: {error}{advice}") from error
        except (
            sqlite3.DatabaseError,
            UnicodeDecodeError,
        ) as error:  # SQLite's message may quote damaged text
            raise TableError(
                f"{self.path} is no latency table, or a damaged one ({error}); move it away and measure anew"
            ) from error
        except OSError as error:
            raise TableError(
                f"cannot open the latency table {self.path}: {error.strerror or error}"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        with self._reported(), self._file.transaction() as run:
            yield run


def _columns(measurement: Measurement | None) -> list[float | int | None]:
    if measurement is None:
        return [None] * 5
    m = measurement
    return [m.median_ms, m.q1_ms, m.q3_ms, m.repeats, int(m.stable)]


def _rank(measured: bool, stable: Sequence[Any]) -> int:
    """Return how good a row is: measured before failed, stable before unstable."""
    return (1 + all(flag != 0 for flag in stable)) if measured else 0


def _row(
    fingerprint: Fingerprint,
    name: Any,
    signature: Any,
    widths: Any,
    state: Any,
    error: Any,
    changed: Any,
    owner: Any,
    attempts: Any,
    *times: Any,
) -> TableRow | None:
    """Return a row of the file, checked; None for a claimed one. `ValueError` says what is wrong with it."""
    point = values.widths_of_text(widths)
    name, signature = values.text(name, "the block's name"), values.text(signature, "the block's signature")
    at = values.moment(changed, "its time")
    values.text(owner, "its owner")
    values.whole(attempts, "the number of attempts", 0)
    if state == "claimed":
        return None
    if state == "measured":
        return TableRow(name, signature, point, fingerprint, values.latency(times), None, at)
    if state != "failed":
        raise ValueError(f"its state is {brief(state)}, not claimed, measured or failed")
    return TableRow(name, signature, point, fingerprint, None, values.text(error, "the error"), at)
