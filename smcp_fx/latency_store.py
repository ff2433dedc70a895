"""The latency table's file: SQLite, one row a block, widths and fingerprint, committed as it is measured.

A row is *claimed* before it is measured, so that two processes never measure the same one; a claim whose
process is gone is free again. `kill -9` therefore loses the row under way and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.timing import Measurement
from smcp_fx.errors import TableError
from smcp_fx.latency_surface import Point

_APPLICATION_ID = 0x534D4350  # "SMCP"
FORMAT_VERSION = 1
#: A claim from another machine, whose process cannot be looked up, is given up after this long.
_REMOTE_CLAIM_SECONDS = 600.0
#: A row that took its process down this often is marked as failed.
MAX_ATTEMPTS = 3

_SCHEMA = """
CREATE TABLE fingerprint (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, fields TEXT NOT NULL);
CREATE TABLE block (id INTEGER PRIMARY KEY, signature TEXT UNIQUE NOT NULL, name TEXT NOT NULL);
CREATE TABLE latency (
  fingerprint INTEGER NOT NULL REFERENCES fingerprint (id),
  block INTEGER NOT NULL REFERENCES block (id),
  widths TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('claimed', 'measured', 'failed')),
  owner TEXT NOT NULL,
  attempts INTEGER NOT NULL,
  changed REAL NOT NULL,
  hot_ms REAL, hot_q1_ms REAL, hot_q3_ms REAL, hot_repeats INTEGER, hot_stable INTEGER,
  cold_ms REAL, cold_q1_ms REAL, cold_q3_ms REAL, cold_repeats INTEGER, cold_stable INTEGER,
  error TEXT,
  PRIMARY KEY (fingerprint, block, widths)
) WITHOUT ROWID;
"""
_HOT = "hot_ms, hot_q1_ms, hot_q3_ms, hot_repeats, hot_stable"
_COLD = _HOT.replace("hot", "cold")


@dataclass(frozen=True)
class Row:
    """One row of the table. ``latency`` is None and ``error`` says why where the measurement failed."""

    name: str
    signature: str
    widths: Point
    fingerprint: Fingerprint
    latency: BlockLatency | None
    error: str | None
    measured_at: float


class LatencyStore:
    """The SQLite file of a latency table. Errors: `TableError`, which names the file."""

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        self.path = Path(path)
        existed = self.path.exists() and self.path.stat().st_size > 0
        if not existed and not create:
            raise TableError(f"there is no latency table {self.path}: measure one first")
        self._owner = _process_name(os.getpid())
        with self._reported():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def fingerprints(self) -> list[Fingerprint]:
        """Return the devices and runtimes that the table has rows of."""
        with self._reported():
            found = self._database.execute(
                "SELECT fields FROM fingerprint WHERE id IN (SELECT fingerprint FROM latency) ORDER BY id"
            ).fetchall()
        return [Fingerprint.from_dict(json.loads(fields)) for (fields,) in found]

    def measured(self, signature: str, fingerprint: Fingerprint) -> dict[Point, BlockLatency]:
        """Return what is measured of one block, by widths."""
        with self._reported():
            found = self._database.execute(
                f"SELECT widths, {_HOT}, {_COLD} FROM latency JOIN block ON block.id = block "
                "JOIN fingerprint f ON f.id = fingerprint "
                "WHERE signature = ? AND key = ? AND state = 'measured'",
                (signature, fingerprint.key()),
            ).fetchall()
        return {_widths(row[0]): _latency(row[1:]) for row in found}

    def failures(self, signature: str, fingerprint: Fingerprint) -> dict[Point, str]:
        """Return the errors of the measurements that failed of one block, by widths."""
        with self._reported():
            found = self._database.execute(
                "SELECT widths, error FROM latency JOIN block ON block.id = block "
                "JOIN fingerprint f ON f.id = fingerprint "
                "WHERE signature = ? AND key = ? AND state = 'failed'",
                (signature, fingerprint.key()),
            ).fetchall()
        return {_widths(widths): str(error) for widths, error in found}

    def rows(self, fingerprint: Fingerprint | None = None) -> list[Row]:
        """Return all rows that are measured or failed, or those of one fingerprint."""
        with self._reported():
            found = self._database.execute(
                f"SELECT name, signature, widths, fields, key, error, changed, state, {_HOT}, {_COLD} "
                "FROM latency JOIN block ON block.id = block JOIN fingerprint f ON f.id = fingerprint "
                "WHERE state != 'claimed' ORDER BY block.id, changed"
            ).fetchall()
        return [
            Row(
                name,
                signature,
                _widths(widths),
                Fingerprint.from_dict(json.loads(fields)),
                _latency(values) if state == "measured" else None,
                error,
                changed,
            )
            for name, signature, widths, fields, key, error, changed, state, *values in found
            if fingerprint is None or key == fingerprint.key()
        ]

    def claim(
        self, name: str, signature: str, fingerprint: Fingerprint, points: Sequence[Point]
    ) -> Point | None:
        """Claim the first of ``points`` that is neither known nor claimed; None when there is none."""
        with self._transaction() as run:
            key = (self._fingerprint_id(fingerprint), self._block_id(name, signature))
            taken = {
                widths: (state, owner, attempts, changed)
                for widths, state, owner, attempts, changed in run(
                    "SELECT widths, state, owner, attempts, changed FROM latency "
                    "WHERE fingerprint = ? AND block = ?",
                    key,
                )
            }
            for point in points:
                widths = json.dumps(point)
                state, owner, attempts, changed = taken.get(widths, ("free", "", 0, 0.0))
                if state in ("measured", "failed") or (state == "claimed" and self._alive(owner, changed)):
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
        """Write rows that were claimed before, all or none: their latencies, or the errors that prevented them."""
        columns = [f"{name} = ?" for name in f"{_HOT}, {_COLD}".split(", ")]
        with self._transaction() as run:
            for point, result in results.items():
                values: list[float | int | None] = [None] * 10
                if isinstance(result, BlockLatency):
                    values = [*_columns(result.hot), *_columns(result.cold)]
                run(
                    f"UPDATE latency SET state = ?, error = ?, changed = ?, {', '.join(columns)} "
                    "WHERE fingerprint = (SELECT id FROM fingerprint WHERE key = ?) "
                    "AND block = (SELECT id FROM block WHERE signature = ?) AND widths = ?",
                    (
                        "measured" if isinstance(result, BlockLatency) else "failed",
                        None if isinstance(result, BlockLatency) else result,
                        time.time(),
                        *values,
                        fingerprint.key(),
                        signature,
                        json.dumps(point),
                    ),
                )

    def insert(self, rows: Sequence[Row]) -> int:
        """Add rows that were measured elsewhere, all or none; return how many were new or better than what stood.

        A measured row is better than a failed or claimed one, and a stable one than an unstable one.
        """
        taken = 0
        with self._transaction() as run:
            for row in rows:
                key = (self._fingerprint_id(row.fingerprint), self._block_id(row.name, row.signature))
                found = run(
                    "SELECT state, hot_stable, cold_stable FROM latency "
                    "WHERE fingerprint = ? AND block = ? AND widths = ?",
                    (*key, json.dumps(row.widths)),
                ).fetchone()
                standing = -1 if found is None else _rank(found[0] == "measured", found[1:])
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
        """Return how many rows are under way: claimed by processes that live, and left by those that do not."""
        with self._reported():
            owners = self._database.execute(
                "SELECT owner, changed FROM latency WHERE state = 'claimed'"
            ).fetchall()
        alive = sum(self._alive(owner, changed) for owner, changed in owners)
        return alive, len(owners) - alive

    def damage(self) -> list[str]:
        """Return what SQLite finds wrong with the file; nothing for a sound one."""
        with self._reported():
            found = [row[0] for row in self._database.execute("PRAGMA integrity_check").fetchall()]
            orphans = self._database.execute("PRAGMA foreign_key_check").fetchall()
        return [str(line) for line in found if line != "ok"] + [
            f"a row of table {row[0]} refers to nothing" for row in orphans
        ]

    def release(self, signature: str, fingerprint: Fingerprint, points: Sequence[Point]) -> None:
        """Give up claims, so that they can be taken again at once."""
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

    def _open(self) -> None:
        run = self._database.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("BEGIN IMMEDIATE")  # two processes may create the file at the same moment
        try:
            application = run("PRAGMA application_id").fetchone()[0]
            version = run("PRAGMA user_version").fetchone()[0]
            empty = run("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            if empty and application == 0:
                for statement in _SCHEMA.split(";"):
                    run(statement)
                run(f"PRAGMA application_id = {_APPLICATION_ID}")
                run(f"PRAGMA user_version = {FORMAT_VERSION}")
                application, version = _APPLICATION_ID, FORMAT_VERSION
            run("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                run("ROLLBACK")
            raise
        if application != _APPLICATION_ID:
            raise TableError(f"{self.path} is a database, but no latency table; choose another file")
        if version != FORMAT_VERSION:
            raise TableError(
                f"{self.path} is a latency table of format {version}, this version reads {FORMAT_VERSION}; "
                "measure into a new file"
            )

    def _fingerprint_id(self, fingerprint: Fingerprint) -> int:
        self._database.execute(
            "INSERT OR IGNORE INTO fingerprint (key, fields) VALUES (?, ?)",
            (fingerprint.key(), json.dumps(fingerprint.as_dict(), sort_keys=True)),
        )
        found = self._database.execute("SELECT id FROM fingerprint WHERE key = ?", (fingerprint.key(),))
        return int(found.fetchone()[0])

    def _block_id(self, name: str, signature: str) -> int:
        self._database.execute(
            "INSERT OR IGNORE INTO block (signature, name) VALUES (?, ?)", (signature, name)
        )
        found = self._database.execute("SELECT id FROM block WHERE signature = ?", (signature,))
        return int(found.fetchone()[0])

    def _alive(self, owner: str, claimed: float) -> bool:
        """Whether the process that claimed a row is still there; this process's own old claims are not."""
        host, pid, _ = owner.rsplit("/", 2)
        if host != socket.gethostname():
            return time.time() - claimed < _REMOTE_CLAIM_SECONDS
        return owner != self._owner and _process_name(int(pid)) == owner

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            advice = "; free space, or measure into another folder" if "full" in str(error) else ""
            raise TableError(f"the latency table {self.path} cannot be used: {error}{advice}") from error
        except sqlite3.DatabaseError as error:
            raise TableError(
                f"{self.path} is no latency table, or a damaged one ({error}); move it away and measure anew"
            ) from error
        except OSError as error:
            raise TableError(
                f"cannot open the latency table {self.path}: {error.strerror or error}"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        with self._reported():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database.execute
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite rolls back by itself where the disk is full
                    self._database.execute("ROLLBACK")
                raise


def _process_name(pid: int) -> str:
    """Return host/pid/start, so that a reused pid is not taken for the process; start 0 if it is gone."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "0"
    return f"{socket.gethostname()}/{pid}/{started}"


def _widths(text: str) -> Point:
    return tuple(int(w) for w in json.loads(text))


def _columns(measurement: Measurement | None) -> list[float | int | None]:
    if measurement is None:
        return [None] * 5
    m = measurement
    return [m.median_ms, m.q1_ms, m.q3_ms, m.repeats, int(m.stable)]


def _rank(measured: bool, stable: Sequence[Any]) -> int:
    """Return how good a row is: measured before failed, stable before unstable."""
    return (1 + all(flag != 0 for flag in stable)) if measured else 0


def _latency(values: Sequence[float]) -> BlockLatency:
    def measurement(columns: Sequence[float]) -> Measurement:
        return Measurement(columns[0], columns[1], columns[2], int(columns[3]), bool(columns[4]))

    return BlockLatency(measurement(values[:5]), measurement(values[5:]) if values[5] is not None else None)
