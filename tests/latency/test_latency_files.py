"""Tables in files that others hold or half wrote: what is read changes nothing, and is what it says."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from table_rows import read, row, table

from smcp_fx.errors import TableError
from smcp_fx.latency import file as latency_file
from smcp_fx.latency.exchange import check, merge
from smcp_fx.latency.store import LatencyStore


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_foreign_database_is_left_as_it_is(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "mine.sqlite") as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = files_of(tmp_path)
    for command in (check, lambda path: merge(tmp_path / "all.sqlite", [path]), LatencyStore):
        with pytest.raises(TableError, match="is a database, but no latency table"):
            command(tmp_path / "mine.sqlite")
    assert files_of(tmp_path) == before


def test_a_table_is_read_from_a_medium_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where changes lie beside it, too: SQLite must write to read these."""
    path = table(tmp_path / "t.sqlite", row(8))
    assert check(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["t.sqlite"]
    store = LatencyStore(path)
    store.insert([row(16)])
    for name in ("t.sqlite", "t.sqlite-wal"):  # as of a process that was killed
        (tmp_path / "medium").mkdir(exist_ok=True)
        shutil.copy(tmp_path / name, tmp_path / "medium" / name)
    store.close()
    before = files_of(tmp_path / "medium")
    original = latency_file._connect

    def refusing(where: Path, how: str) -> sqlite3.Connection:
        """As on such a medium, whoever asks: the superuser of a test may write everywhere."""
        if where.parent.name == "medium" and how != "immutable=1":
            return original(tmp_path / "nowhere" / where.name, how)
        return original(where, how)

    monkeypatch.setattr(latency_file, "_connect", refusing)
    store = LatencyStore(tmp_path / "medium" / "t.sqlite", read_only=True)
    assert [found.widths[0] for found in store.rows()] == [8, 16]
    store.close()
    assert files_of(tmp_path / "medium") == before


@pytest.mark.parametrize("which", ["another", "an old copy", "the same"])
def test_a_table_copied_over_one_with_changes_beside_it_is_told(tmp_path: Path, which: str) -> None:
    path = table(tmp_path / "t.sqlite", row(8))
    old = shutil.copy(path, tmp_path / "old.sqlite")
    other = table(tmp_path / "other.sqlite", row(8), row(24))
    store = LatencyStore(path)
    store.insert([row(16)])
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("t.sqlite", "t.sqlite-wal"):
        shutil.copy(tmp_path / name, killed / name)
    store.close()
    if which == "the same":
        assert sorted(widths[0] for widths in read(killed / "t.sqlite")) == [8, 16]
        return
    shutil.copy(other if which == "another" else old, killed / "t.sqlite")
    before = files_of(killed)
    for open_it in (check, LatencyStore):
        with pytest.raises(
            TableError, match=r"t\.sqlite-wal beside it are of two tables: another file was copied"
        ):
            open_it(killed / "t.sqlite")
    assert {name: files_of(killed)[name] for name in before} == before
    for name in ("t.sqlite-wal", "t.sqlite-shm"):
        (killed / name).unlink(missing_ok=True)
    assert [f.what for f in check(killed / "t.sqlite")] == []


@pytest.mark.parametrize("pages", [0, 1, 2, 4, 9])
def test_changes_that_were_half_written_into_the_file_are_not_lost(tmp_path: Path, pages: int) -> None:
    """The disk was full, or the process killed, meanwhile: SQLite begins again. Another table's half is damage."""
    path = table(tmp_path / "t.sqlite", row(8))
    store = LatencyStore(path)
    store.insert([row(8 * n) for n in range(2, 80)])
    before, changes = path.read_bytes(), (tmp_path / "t.sqlite-wal").read_bytes()
    store.close()
    half = path.read_bytes()[: 4096 * pages] + before[4096 * pages :]
    for read_only in (True, False):
        path.write_bytes(half)
        (tmp_path / "t.sqlite-wal").write_bytes(changes)
        store = LatencyStore(path, read_only=read_only)
        assert len(store.rows()) == 79
        assert store.damage() == []
        store.close()


def test_half_a_table_is_damage(tmp_path: Path) -> None:
    """Changes beside it that do not make it whole are no excuse."""
    path = table(tmp_path / "t.sqlite", *(row(8 * n) for n in range(1, 80)))
    other = LatencyStore(tmp_path / "other.sqlite")
    other.insert([row(8)])
    changes = (tmp_path / "other.sqlite-wal").read_bytes()
    other.close()
    for wal in (changes, b"x" * 5000):
        path.write_bytes(path.read_bytes()[: 2 * 4096])
        (tmp_path / "t.sqlite-wal").write_bytes(wal)
        for read_only in (True, False):
            with pytest.raises(TableError, match="damaged"):
                LatencyStore(path, read_only=read_only)


def test_tables_of_before_marks_are_read_and_get_one_when_they_are_written_to(tmp_path: Path) -> None:
    path = table(tmp_path / "t.sqlite", row(8))
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE mark")
    database.close()
    assert check(path) == []
    assert sorted(read(table(path, row(16)))) == [(8, 8), (16, 8)]


def test_several_processes_have_a_table_open_and_none_takes_it_for_two(tmp_path: Path) -> None:
    stores = [LatencyStore(tmp_path / "t.sqlite") for _ in range(3)]
    for number in range(12):
        stores[number % 3].insert([row(8 * number + 8)])
        if number % 4 == 3:
            stores[number % 3].close()
            stores[number % 3] = LatencyStore(tmp_path / "t.sqlite")
        assert len(list(LatencyStore(tmp_path / "t.sqlite", read_only=True).looked_through())) == number + 1
    for store in stores:
        store.close()
