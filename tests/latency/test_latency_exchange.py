"""Tables as files that travel: merging, CSV and JSON, checking; bad files are named and nothing is half done."""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from table_rows import HERE, read, row, table

from smcp_fx.backends.base import BlockLatency
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.exchange import check, differences, export_rows, import_rows, merge, wanted_rows
from smcp_fx.latency.store import LatencyStore, TableRow


def test_merge_joins_and_keeps_the_better_of_two(tmp_path: Path) -> None:
    one = table(tmp_path / "1.sqlite", row(8, 1.0), row(16, None), row(24, 3.0, stable=False))
    two = table(tmp_path / "2.sqlite", row(8, 7.0), row(16, 2.0), row(24, 3.5), row(32, 4.0))
    done = merge(tmp_path / "all.sqlite", [one, two])
    assert (done.read, done.taken) == (7, 6)
    found = {
        widths[0]: r.latency.hot.median_ms for widths, r in read(tmp_path / "all.sqlite").items() if r.latency
    }
    assert found == {8: 1.0, 16: 2.0, 24: 3.5, 32: 4.0}
    assert merge(tmp_path / "all.sqlite", [one, two]).taken == 0
    with pytest.raises(TableError, match="name it once"):
        merge(one, [one])


def test_merge_refuses_mixed_fingerprints_and_leaves_no_file(tmp_path: Path) -> None:
    other = replace(HERE, threads=2)
    one = table(tmp_path / "1.sqlite", row(8))
    two = table(tmp_path / "2.sqlite", row(8, on=other), row(16, on=other))
    with pytest.raises(TableError, match=r"2 fingerprints are not mixed .*threads: 1 and 2.*--fingerprint"):
        merge(tmp_path / "all.sqlite", [one, two])
    assert not (tmp_path / "all.sqlite").exists()
    with pytest.raises(TableError, match="2 fingerprints"):
        merge(one, [two])
    assert merge(tmp_path / "all.sqlite", [one, two], other.key()).taken == 2
    with pytest.raises(TableError, match="none of the tables has rows of fingerprint 'abc'"):
        merge(tmp_path / "all.sqlite", [one], "abc")
    with pytest.raises(TableError, match="there is no latency table"):
        merge(tmp_path / "new.sqlite", [tmp_path / "absent.sqlite"])
    assert differences(HERE, replace(HERE, settings=(("mode", "x"),))) == "mode: formula and x"


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_rows_go_out_and_come_back_unchanged(tmp_path: Path, kind: str) -> None:
    rows = [row(8, 0.1 + 0.2), row(16, None), row(24, 3.0, stable=False)]
    rows.append(
        TableRow(
            'gate, "odd"\nname',
            '{"op": "a,b"}',
            (),
            HERE,
            BlockLatency(Measurement(1, 1, 1, 3, True)),
            None,
            5.0,
        )
    )
    file = tmp_path / f"rows.{kind}"
    export_rows(rows, file)
    done = import_rows(file, tmp_path / "t.sqlite")
    assert (done.read, done.taken) == (4, 4)
    assert read(tmp_path / "t.sqlite") == {r.widths: r for r in rows}


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_another_device_fills_in_what_is_wanted(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"todo.{kind}"
    export_rows(wanted_rows([("conv", "{}", (8, 16)), ("conv", "{}", (8, 24))], HERE), file)
    with pytest.raises(TableError, match="no row with a latency"):
        import_rows(file, tmp_path / "t.sqlite")
    assert not (tmp_path / "t.sqlite").exists()
    text = file.read_text()
    filled = (
        text.replace("conv,8x16,", "conv,8x16,0.25")
        if kind == "csv"
        else text.replace('"hot_ms": null', '"hot_ms": 0.25', 1)
    )
    assert filled != text
    file.write_text(filled)
    assert import_rows(file, tmp_path / "t.sqlite").taken == 1
    (found,) = read(tmp_path / "t.sqlite").values()
    assert found.latency == BlockLatency(Measurement(0.25, 0.25, 0.25, 1, True))
    assert found.widths == (8, 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: text.replace("smcp_fx latency table", "something"), "no exported latency table"),
        (lambda text: text.replace('"version": 1,', '"version": 9,'), "version 9"),
        (lambda text: text.replace('"hot_ms": 1.0', '"hot_ms": -1.0'), "row 1: .*positive"),
        (lambda text: text.replace('"hot_ms": 1.0', '"hot_ms": "soon"'), "row 1: .*soon"),
        (lambda text: text.replace('"threads"', '"cores"'), "row 1: .*fingerprint"),
        (lambda text: text.replace(f'"fingerprint": "{HERE.key()}"', '"fingerprint": "x"'), "row 1: .*'x'"),
    ],
)
def test_bad_json_is_named_by_row_and_nothing_is_taken(tmp_path: Path, change, said: str) -> None:
    file = tmp_path / "rows.json"
    export_rows([row(8), row(16)], file)
    changed = change(file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(TableError, match=said):
        import_rows(file, tmp_path / "t.sqlite")
    assert not (tmp_path / "t.sqlite").exists()


def test_bad_csv_is_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    export_rows([row(8), row(16)], file)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], lines[2][: len(lines[2]) // 2]]))
    with pytest.raises(TableError, match=r"line 3: .*cut off"):
        import_rows(file, tmp_path / "t.sqlite")
    file.write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match="no columns name, widths"):
        import_rows(file, tmp_path / "t.sqlite")
    with pytest.raises(TableError, match="there is no file"):
        import_rows(tmp_path / "none.csv", tmp_path / "t.sqlite")
    with pytest.raises(InputError, match=r"\.json or \.csv"):
        import_rows(tmp_path / "none.txt", tmp_path / "t.sqlite")


def test_check_tells_what_is_wrong(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.sqlite",
        row(8),
        row(16, None),
        row(24, 3.0, stable=False),
        row(8, on=replace(HERE, threads=2)),
    )
    store = LatencyStore(path)
    store._owner = f"{store._owner}0"  # a process that is gone
    store.claim("conv", '{"op": "conv"}', HERE, [(32, 8)])
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE latency SET hot_ms = 0.0 WHERE widths = '[8, 8]' AND fingerprint = 2")
    database.close()
    told = [(finding.what.split(":")[0], finding.bad) for finding in check(path)]
    assert sorted(told) == [
        ("1 rows left unfinished; they are measured again when asked for", False),
        ("failed", True),
        ("impossible", True),
        ("rows of 2 fingerprints, each used by itself", False),
        ("unstable", True),
        ("unstable", True),
    ]
    assert check(table(tmp_path / "sound.sqlite", row(8))) == []


def test_check_finds_rows_that_refer_to_nothing(tmp_path: Path) -> None:
    path = table(tmp_path / "t.sqlite", row(8))
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM block")
    database.close()
    assert [finding.what for finding in check(path)] == ["damaged: a row of table latency refers to nothing"]


def test_export_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot write the rows"):
        export_rows([row(8)], Path("/proc/nowhere/rows.json"))
    export_rows([row(8)], tmp_path / "rows.json")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["hot_ms"] == 1.0


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    """SQLite's own limit on pages stands for the disk's end: the same error, from the same place."""
    path = table(tmp_path / "t.sqlite", *(row(8 * n) for n in range(1, 20)))
    store = LatencyStore(path)
    store._file.run("PRAGMA max_page_count = 1")
    with pytest.raises(TableError, match=r"t\.sqlite cannot be used: database or disk is full; free space"):
        store.insert([row(8 * n) for n in range(20, 2000)])
    store.close()
    assert len(read(path)) == 19
    assert check(path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("hot_ms = 'nan'", r"'conv' at '\[8, 8\]': hot_ms is 'nan'"),
        ("hot_ms = 9e999", "hot_ms is inf"),
        ("hot_ms = -1", r"hot_ms is -1\.0"),
        ("hot_ms = NULL", "it is measured, and has no latency"),
        ("hot_q1_ms = 'soon'", "hot_q1_ms is 'soon'"),
        ("hot_repeats = 'null'", "hot_repeats is 'null'"),
        ("hot_repeats = 9223372036854775807", "hot_repeats is 9223372036854775807"),
        ("cold_stable = '[1]'", "cold_stable is '\\[1\\]'"),
        ("widths = '8x8'", "8x8"),
        ("widths = '[8,8]'", "not written as"),
        ("widths = '[-8, 8]'", "a width is -8"),
        ("widths = '[8]'", "1 widths, the block's other rows 2|2 widths, the block's other rows 1"),
        ("state = 'guessed'", "its state is 'guessed'"),
        ("changed = 1e300", "no time in seconds"),
        ("owner = x'ff'", "its owner is"),
        ("attempts = 'many'", "attempts is 'many'"),
    ],
)
def test_values_that_are_none_are_named_and_check_goes_on(tmp_path: Path, change: str, said: str) -> None:
    path = table(tmp_path / "t.sqlite", row(8), row(16, None), row(24))
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        database.execute(f"UPDATE latency SET {change} WHERE widths = '[8, 8]'")
    database.close()
    findings = [finding.what for finding in check(path)]
    assert len([what for what in findings if re.search(said, what)]) >= 1, findings
    assert any(what.startswith("failed: conv at 16x8") for what in findings) or "widths" in said
    with pytest.raises(TableError, match=rf"t\.sqlite is damaged: .*({said})"):
        read(path)


@pytest.mark.parametrize("kind", ["json", "csv"])
@pytest.mark.parametrize(
    ("cell", "said"),
    [("nan", "hot_ms is nan"), ("1e999", "hot_ms is inf"), ("-1", "hot_ms is -1"), ("0", "hot_ms is 0")],
)
def test_times_that_are_none_are_not_imported(tmp_path: Path, kind: str, cell: str, said: str) -> None:
    file = tmp_path / f"rows.{kind}"
    export_rows([row(8, 1.25)], file)
    file.write_text(
        file.read_text().replace("1.25", {"nan": "NaN"}.get(cell, cell) if kind == "json" else cell, 1)
    )
    with pytest.raises(TableError, match=said):
        import_rows(file, tmp_path / "t.sqlite")
    assert not (tmp_path / "t.sqlite").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 50_000,
        "[" + "[]," * 100_000 + "[]]",
        '{"format": "\\ud800"}',
        "\xff",
        "9" * 6000,
        "{}",
    ],
    ids=["lists", "objects", "nothing", "surrogate", "bytes", "digits", "empty"],
)
def test_json_that_would_hurt_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(TableError, match=r"rows\.json"):
        import_rows(file, tmp_path / "t.sqlite")
    assert not (tmp_path / "t.sqlite").exists()
