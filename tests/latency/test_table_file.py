"""The table's file: damage, claims, processes that are killed, and several that share it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_latencies import FakeBackend, conv, dense

from smcp_fx.errors import TableError
from smcp_fx.latency.file import TableFile
from smcp_fx.latency.store import LatencyStore
from smcp_fx.latency.table import LatencyTable


def test_a_missing_file_is_an_error_when_it_must_exist(tmp_path):
    with pytest.raises(TableError, match=r"there is no latency table"):
        LatencyTable(tmp_path / "none.sqlite", create=False)
    assert not (tmp_path / "none.sqlite").exists()


def test_foreign_and_damaged_files_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("this is no database at all, but long enough to be read as one\n" * 40)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = foreign.read_bytes()
    with pytest.raises(TableError, match=r"text\.sqlite is no latency table"):
        LatencyTable(text)
    with pytest.raises(TableError, match=r"no latency table"):
        LatencyTable(foreign)
    assert sqlite3.connect(foreign).execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    assert len(foreign.read_bytes()) == len(before)


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("error TEXT", "error TEXT AS (hex(zeroblob(300000000)))"),
        ("hot_ms REAL", "hot_ms REAL AS (attempts)"),
        ("owner TEXT NOT NULL", "owner TEXT NOT NULL CHECK (length(hex(zeroblob(300000000))) > 0)"),
        ("changed REAL NOT NULL", "changed REAL NOT NULL DEFAULT 1"),
    ],
)
def test_a_table_that_computes_is_refused(tmp_path: Path, column: str, other: str) -> None:
    """A few bytes of SQL in it would fill the memory when a row is read."""
    path = tmp_path / "t.sqlite"
    LatencyTable(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA writable_schema = 1")
        database.execute(
            "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = 'latency'", (column, other)
        )
    for read_only in (True, False):
        with pytest.raises(TableError, match="holds latency of another make"):
            LatencyStore(path, read_only=read_only)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "t.sqlite"
    with LatencyTable(path) as table:
        table.measure([conv()], FakeBackend())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TableError, match=r"damaged|cannot be used"), LatencyTable(path) as table:
        table.measure([conv()], FakeBackend())


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "t.sqlite"
    LatencyTable(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(TableError, match="format 99"):
        LatencyTable(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match="cannot open the latency table"):
        LatencyTable(tmp_path / "file" / "t.sqlite")


def test_a_row_is_claimed_once_and_a_dead_owner_frees_it(tmp_path, monkeypatch):
    store, fingerprint = LatencyStore(tmp_path / "t.sqlite"), FakeBackend().fingerprint()
    points = [(8,), (16,)]
    assert store.claim("b", "{}", fingerprint, points) == (8,)
    other = LatencyStore(tmp_path / "t.sqlite")
    other._owner = f"{other._owner}0"  # another process on this host
    # the claim's owner is alive, so the other process gets the next row, and then none
    assert other.claim("b", "{}", fingerprint, points) == (16,)
    assert other.claim("b", "{}", fingerprint, [(8,)]) is None
    # the owner of (16,) does not exist: its row is free for us
    assert store.claim("b", "{}", fingerprint, [(16,)]) == (16,)
    store.close()
    other.close()


def test_a_row_that_kills_its_process_is_given_up_after_three_attempts(tmp_path):
    store, fingerprint = LatencyStore(tmp_path / "t.sqlite"), FakeBackend().fingerprint()
    alive = store._owner
    for attempt in range(3):
        store._owner = f"{alive}{attempt}"
        assert store.claim("b", "{}", fingerprint, [(8,)]) == (8,)
    store._owner = alive
    assert store.claim("b", "{}", fingerprint, [(8,)]) is None
    assert store.failures("{}", fingerprint) == {(8,): "the process died 3 times measuring it"}
    store.close()


def test_an_interrupt_frees_the_row_under_way(tmp_path):
    class Interrupted(FakeBackend):
        def block_latency(self, block, widths, config=None):
            raise KeyboardInterrupt

    block = conv()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(KeyboardInterrupt):
            table.measure([block], Interrupted())
        assert table.store.claim(block.name, block.signature, FakeBackend().fingerprint(), [(256, 256)])


def _measure_in_process(path: Path, pause: float, log: Path) -> None:
    class Logged(FakeBackend):
        def block_latency(self, block, widths, config=None):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {json.dumps(widths)}\n")
            return super().block_latency(block, widths, config)

    with LatencyTable(path) as table:
        table.measure([conv()], Logged(pause=pause))


def test_kill_9_loses_only_the_row_under_way(tmp_path):
    path, log = tmp_path / "t.sqlite", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_measure_in_process, args=(path, 0.02, log))
    process.start()
    while not log.exists() or len(log.read_text().splitlines()) < 12:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    started = [tuple(json.loads(line.split(" ", 1)[1])) for line in log.read_text().splitlines()]
    backend = FakeBackend()
    with LatencyTable(path) as table:
        kept = {row.widths for row in table.rows()}
        assert set(started[:-1]) <= kept
        table.measure([conv()], backend)
        assert not {widths for _, widths in backend.log} & kept
        assert np.isfinite(dense(table.surface(conv(), backend.fingerprint()), conv())).all()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_processes_share_a_table_without_double_work(tmp_path):
    path, log = tmp_path / "t.sqlite", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_measure_in_process, args=(path, 0.01, log)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert len({widths for _, widths in lines}) == len(lines)
    assert {pid for pid, _ in lines} == {str(worker.pid) for worker in workers}
    alone = FakeBackend()
    with LatencyTable(tmp_path / "alone.sqlite") as table:
        table.measure([conv()], alone)
    assert sorted(widths for _, widths in lines) == sorted(json.dumps(widths) for _, widths in alone.log)


def test_a_new_file_may_be_opened_by_many_at_the_same_moment(tmp_path):
    """As ranks do: SQLite itself gives up where two switch a new file to a write-ahead log."""
    for number in range(30):
        path, together = tmp_path / f"{number}.sqlite", threading.Barrier(8)

        def opened(_: int, path: Path = path, together: threading.Barrier = together) -> None:
            together.wait()
            TableFile(path).close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(opened, range(8)))
