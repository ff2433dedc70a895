"""Opens a latency table's SQLite file, and checks it before changing anything in it or beside it.

SQLite keeps the last changes in a second file (-wal) until every process has closed the table. A killed
process leaves that file behind. If another table is then copied over the first, SQLite would read a mixture
of both. So a table carries a mark. Every writing process renews the mark, and every change includes it: the
marks of the file and of the changes beside it must agree.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from smcp_fx.errors import TableError
from smcp_fx.storage.files import check_replaceable

_APPLICATION_ID = 0x534D4350  # "SMCP"
FORMAT_VERSION = 1
_BUSY_SECONDS = 30.0
#: A table counts as a mixture of two if the marks differ in this many reads. Chosen, not measured.
_LOOKS = 4

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
#: Tables of earlier versions lack the mark; the next write adds it.
_MARK = """
CREATE TABLE IF NOT EXISTS mark (id INTEGER PRIMARY KEY CHECK (id = 1), now TEXT, before TEXT, changes INTEGER);
INSERT OR IGNORE INTO mark VALUES (1, NULL, NULL, 0);
"""


@dataclass(frozen=True)
class _Seen:
    """The identity of a database, alone or with the changes in the file beside it."""

    application: int
    version: int
    objects: frozenset[tuple[str, str | None]]  # names, and the SQL that made them
    mark: tuple[Any, Any] | None


class TableFile:
    """A table's open file. ``run`` executes a statement; `TableError` if it is not a table of this format.

    ``read_only``: nothing is written to it or beside it, so it may lie on a read-only medium.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._mark: str | None = None  # None: not made yet; empty: others have the table open
        if not read_only:
            try:
                check_replaceable(path)
            except OSError as error:
                raise TableError(f"{path} can be no latency table: {error.strerror}") from error
        was_there = path.exists()
        exists = was_there and path.stat().st_size > 0
        if exists or read_only:
            self._database = self._connect_to_read()
        if not read_only:
            if exists:
                self._database.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = _connect(path, "mode=rwc")
        try:
            if not read_only:
                self._create()
            self._refuse(_seen(self._database))
        except BaseException:
            self.close()
            if not was_there and path.exists() and path.stat().st_size == 0:  # the disk may be full
                path.unlink(missing_ok=True)
            raise

    @property
    def run(self) -> Callable[..., sqlite3.Cursor]:
        """Executes a statement and returns its cursor."""
        return self._database.execute

    def close(self) -> None:
        """Close it."""
        self._database.close()
        if self._copy is not None:
            self._copy.cleanup()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Run statements in one transaction, all or none."""
        if self._mark is None:
            self._mark = self._new_mark()
        self.run("BEGIN IMMEDIATE")
        try:
            yield self.run
            for statement in _MARK.split(";"):
                self.run(statement)
            # The file itself has this mark by now: a file with the previous mark is another table.
            before = "CASE now WHEN ? THEN now ELSE before END"
            self.run(f"UPDATE mark SET changes = changes + 1, before = {before}", (self._mark,))
            self.run("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite rolls back by itself if the disk is full
                self.run("ROLLBACK")
            raise

    def _new_mark(self) -> str:
        """Write a new mark into the file itself, and return it; "" while other processes use the table."""
        mark = uuid.uuid4().hex
        self.run("PRAGMA busy_timeout = 0")
        try:
            if not self._all_in_file():
                return ""
            self.run("BEGIN IMMEDIATE")
            for statement in _MARK.split(";"):
                self.run(statement)
            self.run("UPDATE mark SET before = now, now = ?", (mark,))
            self.run("COMMIT")
            return mark if self._all_in_file() else ""
        except sqlite3.OperationalError as error:
            if self._database.in_transaction:
                self.run("ROLLBACK")
            if "locked" not in str(error) and "busy" not in str(error):
                raise
            return ""
        finally:
            self.run(f"PRAGMA busy_timeout = {round(1000 * _BUSY_SECONDS)}")

    def _all_in_file(self) -> bool:
        """Move the changes beside the file into it; return whether all of them could be moved."""
        return bool(self.run("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)

    def _connect_to_read(self) -> sqlite3.Connection:
        """Return a connection that changes nothing; refuse a file that is no table or a mixture of two."""
        database = _connect(self.path, "immutable=1")
        beside = self.path.with_name(f"{self.path.name}-wal")
        try:
            changed = beside.exists() and beside.stat().st_size > 0
            alone = self._alone(database, changed)
            if not changed:
                return database
        except BaseException:
            database.close()
            raise
        database.close()
        database = self._with_changes(beside)
        try:
            if alone is None:
                if [row[0] for row in database.execute("PRAGMA integrity_check")] != ["ok"]:
                    raise sqlite3.DatabaseError("the changes beside it do not make it whole")
                return database
            for attempt in range(_LOOKS):  # other processes may write marks between two reads
                seen = _seen(database)
                if alone.mark is None or seen.mark is None or alone.mark[0] in seen.mark:
                    return database
                time.sleep(0.05 * attempt)
                other = _connect(self.path, "immutable=1")
                alone = _seen(other)
                other.close()
            raise TableError(
                f"{self.path} and {beside.name} beside it are of two tables: another file was copied over a table "
                f"whose last changes lie there. Move {beside.name} and {self.path.name}-shm away to use the copied "
                "one"
            )
        except BaseException:
            database.close()
            raise

    def _alone(self, database: sqlite3.Connection, changed: bool) -> _Seen | None:
        """Return the file's identity without the changes beside it; refuse a file that is no table.

        None if the file is half written: the disk was full, or the process was killed, while SQLite wrote the
        changes beside it into the file. SQLite will write them again.
        """
        try:
            alone = _seen(database)
        except sqlite3.DatabaseError:
            if changed:
                return None
            raise
        if alone.objects or alone.application:  # else it is being created, and still lies beside
            self._refuse(alone)
        return alone

    def _with_changes(self, beside: Path) -> sqlite3.Connection:
        """Return a connection that also reads the changes beside the table."""
        with contextlib.ExitStack() as undo, contextlib.suppress(sqlite3.OperationalError):
            database = _connect(self.path, "mode=ro")
            undo.callback(database.close)
            _seen(database)
            undo.pop_all()
            return database
        # To read these changes SQLite must write beside the table. If it cannot, it reads a copy.
        if self._copy is None:
            self._copy = tempfile.TemporaryDirectory(prefix="smcp_fx-table-")
        copied = Path(self._copy.name) / "table.sqlite"
        shutil.copyfile(self.path, copied)
        shutil.copyfile(beside, copied.with_name(f"{copied.name}-wal"))
        return _connect(copied, "mode=rw")

    def _refuse(self, seen: _Seen) -> None:
        """Raise `TableError` if this is not a table of this format."""
        if not seen.objects and not seen.application:
            raise TableError(f"{self.path} is an empty database: measure a table first")
        if seen.application != _APPLICATION_ID:
            raise TableError(f"{self.path} is a database, but no latency table; choose another file")
        if seen.version != FORMAT_VERSION:
            raise TableError(
                f"{self.path} is a latency table of format {seen.version}, this version reads {FORMAT_VERSION}; "
                "measure into a new file"
            )
        # Foreign SQL (computed columns, checks) would run whenever a row is read.
        other = sorted({name for name, _ in seen.objects - _made()})
        missing = sorted({name for name, _ in _made() - seen.objects} - {"mark"})
        if missing or other:
            why = (
                f"it holds {', '.join(other)[:200]} of another make"
                if other
                else f"it lacks {', '.join(missing)}"
            )
            raise TableError(f"{self.path} is a damaged latency table: {why}; move it away and measure anew")

    def _create(self) -> None:
        """Create the tables if there are none."""
        self._keep_a_log()
        self.run("PRAGMA synchronous = NORMAL")
        if _seen(self._database).objects:
            return
        self.run("BEGIN IMMEDIATE")  # two processes may create the file at the same moment
        try:
            seen = _seen(self._database)
            if not seen.objects and not seen.application:
                for statement in (_SCHEMA + _MARK).split(";"):
                    self.run(statement)
                self.run(f"PRAGMA application_id = {_APPLICATION_ID}")
                self.run(f"PRAGMA user_version = {FORMAT_VERSION}")
            self.run("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self.run("ROLLBACK")
            raise

    def _keep_a_log(self) -> None:
        """Switch to a write-ahead log; retry, as SQLite does not wait if two processes switch at once."""
        until = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self.run("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
            time.sleep(0.01)


def _connect(path: Path, how: str) -> sqlite3.Connection:
    place = f"file:{quote(os.fsencode(path.absolute()))}?{how}"
    database = sqlite3.connect(place, timeout=_BUSY_SECONDS, isolation_level=None, uri=True)
    database.text_factory = _decoded
    return database


def _decoded(content: bytes) -> str:
    """Keep invalid text as it is, to be checked like any other value, instead of raising in the middle of a query."""
    return content.decode("utf-8", "surrogateescape")


@functools.cache
def _made() -> frozenset[tuple[str, str | None]]:
    """The tables of this format."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_SCHEMA + _MARK)
        return _objects(database)


def _objects(database: sqlite3.Connection) -> frozenset[tuple[str, str | None]]:
    """Names with the SQL that made them, as SQLite keeps it, without the indices that it makes for keys."""
    rows = database.execute("SELECT name, sql FROM sqlite_master WHERE type != 'index' OR sql IS NOT NULL")
    return frozenset((str(name), made) for name, made in rows)


def _seen(database: sqlite3.Connection) -> _Seen:
    run = database.execute
    application, version = (
        int(run(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
    )
    objects = _objects(database)
    mark: Any = None
    if any(name == "mark" for name, _ in objects & _made()):
        mark = run("SELECT now, before FROM mark").fetchone()
    return _Seen(application, version, objects, None if mark is None or mark[0] is None else mark)
