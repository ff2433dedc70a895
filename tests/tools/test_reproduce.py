"""The paper's tables: their figures, and that ours come from complete records alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smcp_fx.errors import InputError
from smcp_fx.recipes.recipe import load_recipe, recipe_names
from smcp_fx.recipes.record import Record, read_records, write_record

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from paper import TABLES  # noqa: E402
from reproduce import main, our_figures  # noqa: E402

sys.path[:] = _PATH

#: The paper's own rows, typed again: FLOPs, Top-1, Top-5 or None where the table has no such column, FPS, speed-up.
SMCP = {
    ("resnet50", "No pruning"): (4.1, 76.2, 92.87, 1019, 1),
    ("resnet50", "SMCP-80%"): (3.0, 77.1, 93.43, 1292, 1.27),
    ("resnet50", "SMCP-55%"): (2.0, 76.8, 93.22, 1673, 1.64),
    ("resnet50", "SMCP-30%"): (1.0, 74.6, 92.00, 2947, 2.89),
    ("resnet50-eagleeye", "No pruning"): (4.1, 77.2, 93.70, 1019, 1),
    ("resnet50-eagleeye", "SMCP-80%"): (3.1, 77.6, 93.61, 1263, 1.23),
    ("resnet50-eagleeye", "SMCP-50%"): (1.9, 76.6, 93.17, 1706, 1.67),
    ("resnet50-eagleeye", "SMCP-30%"): (1.1, 75.1, 92.29, 2589, 2.51),
    ("resnet50-eagleeye", "SMCP-25%"): (0.9, 74.4, 91.98, 3102, 3.01),
    ("resnet101", "No pruning"): (7.8, 77.4, None, 620, 1),
    ("resnet101", "SMCP-60%"): (4.0, 78.1, None, 951, 1.53),
    ("resnet101", "SMCP-50%"): (3.6, 77.8, None, 1016, 1.64),
    ("resnet101", "SMCP-30%"): (2.6, 77.3, None, 1273, 2.05),
    ("resnet101", "SMCP-25%"): (2.0, 76.8, None, 1535, 2.48),
    ("mobilenet-v1", "No pruning"): (569, 72.6, None, 3415, 1),
    ("mobilenet-v1", "SMCP-60%"): (356, 71.0, None, 5870, 1.72),
    ("mobilenet-v1", "SMCP-40%"): (208, 68.3, None, 8163, 2.39),
}


def test_the_tables_hold_the_papers_rows() -> None:
    for (name, method), figures in SMCP.items():
        rows = [row for row in TABLES[name].rows if row.method == method]
        assert [row.figures for row in rows] == [tuple(f for f in figures if f is not None)], (name, method)
    assert {name: len(table.rows) for name, table in TABLES.items()} == {
        "resnet50": 22, "resnet50-eagleeye": 11, "resnet101": 11, "mobilenet-v1": 11, "voc": 1, "knapsack": 6,
    }  # fmt: skip
    for table in TABLES.values():
        assert all(len(row.figures) == len(table.columns) for row in table.rows)


def test_speedups_are_those_of_the_printed_fps() -> None:
    for name in ("resnet50", "resnet101", "mobilenet-v1"):
        table = TABLES[name]
        fps, speedup = (table.columns.index(column) for column in ("fps", "speedup"))
        full = table.rows[0].figures[fps]
        for row in table.rows:
            if row.method.startswith("SMCP"):
                assert row.figures[fps] / full == pytest.approx(row.figures[speedup], abs=0.01), row


def test_every_recipe_has_its_row() -> None:
    rows = {f"{name}/{row.method}" for name, table in TABLES.items() for row in table.rows}
    recipes = {load_recipe(name).row for name in recipe_names()}
    assert recipes - rows == {"voc/SSD300-RN50"}  # what the figures of voc are against
    assert {row for row in rows if "SMCP" in row} == recipes - {"voc/SSD300-RN50"}


WHOLE = Record(
    row="resnet50/SMCP-30%",
    complete=True,
    values={"flops": 1.2e9, "top1": 71.5, "top5": 90.25, "fps": 150.0},
    dense={"flops": 4.1e9, "top1": 76.1, "fps": 60.0},
)


def test_without_records_nothing_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--records", str(tmp_path / "nothing")]) == 0
    said = capsys.readouterr().out
    columns = sum(len(table.columns) * len(table.rows) for table in TABLES.values())
    assert said.count("not run") == columns


def test_ours_come_from_complete_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = TABLES["resnet50"]
    rows = {row.method: row for row in table.rows}
    small = replace(WHOLE, complete=False, row="resnet50/SMCP-55%")
    for index, record in enumerate((WHOLE, small)):
        write_record(record, tmp_path / f"{index}.json")
    (tmp_path / "other.json").write_text('{"something": "else"}')
    records = read_records(tmp_path)
    assert len(records) == 2
    ours = our_figures("resnet50", table, rows["SMCP-30%"], records)
    assert ours == {"flops": 1.2, "top1": 71.5, "top5": 90.25, "fps": 150.0, "speedup": 2.5}
    assert our_figures("resnet50", table, rows["SMCP-55%"], records) == {}
    assert our_figures("resnet50", table, rows["HALP-30%"], records) == {}
    assert our_figures("resnet50", table, rows["No pruning"], records)["top1"] == 76.1
    assert our_figures("resnet50-eagleeye", table, rows["SMCP-30%"], records) == {}
    assert main(["resnet50", "--records", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1 records of scaled-down or changed runs are left out" in said
    line = next(line for line in said.splitlines() if line.startswith("SMCP-30%"))
    assert line.split()[1:] == ["1.0", "74.6", "92.00", "2947", "2.89", "1.2", "71.5", "90.25", "150", "2.50"]


def test_voc_is_held_against_its_rival() -> None:
    table = TABLES["voc"]
    pruned = Record("voc/SMCP-25%", True, {"mAP": 77.0, "fps": 90.0}, {"mAP": 76.0, "fps": 30.0})
    rival = Record("voc/SSD300-RN50", True, {"mAP": 74.5, "fps": 75.0}, device="another")
    assert our_figures("voc", table, table.rows[0], [pruned]) == {"speedup": 3.0}
    assert our_figures("voc", table, table.rows[0], [pruned, rival]) == {"mAP_gain": 2.5, "speedup": 3.0}
    beside = replace(rival, device=pruned.device)
    assert our_figures("voc", table, table.rows[0], [pruned, beside])["fps_gain"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "another version"),
        ({"values": {"top1": "high"}}, "damaged"),
        ({"speed": 1}, "damaged"),
    ],
)
def test_damaged_records_are_named(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(WHOLE, tmp_path / "record.json")
    content = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(InputError, match=message):
        read_records(tmp_path)
    assert main(["voc", "--records", str(tmp_path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
