"""smcp-table with real runtimes, real processes and real kills; and what it says to bad input."""

from __future__ import annotations

import math
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Running

from smcp_fx.backends import Measurement
from smcp_fx.backends.base import BlockLatency
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeBackend
from smcp_fx.backends.timing import quiet
from smcp_fx.backends.timing.pace import Pace
from smcp_fx.cli.networks import backend_of, blocks_of
from smcp_fx.cli.table import build_parser, main
from smcp_fx.compiler import CompileSettings
from smcp_fx.latency.exchange import check
from smcp_fx.latency.store import LatencyStore, TableRow
from smcp_fx.latency.table import LatencyTable

#: One table, measured once: tests that share it stay in one process.
pytestmark = pytest.mark.xdist_group("table command")

MODEL = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )

def wide():
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU(), nn.Conv2d(256, 256, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )

def unmeasurable():
    class Odd(nn.Module):
        def forward(self, x):
            return x.sort(dim=-1, stable=True).values
    model = build()
    model.insert(6, Odd())
    return model
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny_net.py"
    path.write_text(MODEL, encoding="utf-8")
    return f"{path}:build"


@pytest.fixture(scope="module")
def table(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "t.sqlite"
    assert main(measuring(model, path)) == 0
    return path


def measuring(model: str, table: Path, *more: str) -> list[str]:
    return ["measure", model, "--table", str(table), "--input-size", "16", *more]


Rows = dict[tuple[str, tuple[int, ...]], TableRow]


def rows(path: Path) -> Rows:
    if not path.exists() or not path.stat().st_size:  # SQLite makes the file before it writes
        return {}
    store = LatencyStore(path, create=False)
    found = {(row.signature, row.widths): row for row in store.rows()}
    store.close()
    return found


def assert_none_lost(before: Rows, after: Rows) -> None:
    """Every row of ``before`` is in ``after``, as it was or measured again: unsteady rows are, at the end."""
    assert before.keys() <= after.keys()
    for key, row in before.items():
        assert after[key] == row or after[key].measured_at > row.measured_at


def assert_complete(path: Path, model: str) -> None:
    """Nothing is damaged or missing; how steady these small blocks are depends on who else uses the machine."""
    findings = check(path)
    assert not [f.what for f in findings if f.bad and not f.what.startswith(("unstable: ", "impossible: "))]
    with LatencyTable(path, read_only=True) as table:
        options = build_parser().parse_args(["measure", model, "--input-size", "16"])
        assert not table.wanted(blocks_of(options), backend_of(options).fingerprint())


def said(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return " ".join((shown.out + shown.err).split())


def test_measure_fills_a_table_once(model: str, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = rows(table)
    assert len(before) > 10
    assert main(measuring(model, table)) == 0
    assert "0 rows measured" in said(capsys)
    assert rows(table) == before
    assert_complete(table, model)
    main(["check", str(table), "--model", model, "--input-size", "16"])
    assert "missing" not in said(capsys)


def test_check_names_the_holes(model: str, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(table), "--model", model, "--input-size", "32"]) == 1
    told = said(capsys)
    assert "missing: 3 at 16x64" in told and "rows at other image sizes do not count" in told
    assert main(["check", str(table), "--model", model, "--input-size", "16", "--batch", "2"]) == 1
    assert "rows at batch 1 do not count" in said(capsys)


def test_the_commands_time_single_images_unless_told_otherwise() -> None:
    assert build_parser().parse_args(["measure", "m"]).batch == CompileSettings().batch == 1


def test_check_asks_for_the_rows_of_a_device(
    model: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, asked = next(iter(rows(table).values())).fingerprint, ["--model", model, "--input-size", "16"]
    main(["check", str(table), *asked, "--device", here.device])
    assert "missing" not in said(capsys)
    assert main(["check", str(table), *asked, "--device", "my-phone"]) == 1
    told = said(capsys)
    assert f"my-phone; it has rows of {here.describe()}" in told and "missing" in told


def test_show_tells_on_what_and_when(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(table)]) == 0
    shown = said(capsys)
    fingerprint = next(iter(rows(table).values())).fingerprint
    for text in (
        fingerprint.key(),
        fingerprint.version,
        "1xcx8x8",
        "spinning on",
        "rows, measured 20",
        " UTC",
    ):
        assert text in shown
    assert main(["show", str(table), "--block", "3"]) == 0
    assert "16x64" in said(capsys)
    assert main(["show", str(table), "--block", "absent"]) == 2
    assert "no block 'absent'; it has one run, 0, 3" in said(capsys)


def test_show_marks_rows_that_are_unsteady_in_either_state(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "t.sqlite"
    shutil.copy(table, copy)
    with sqlite3.connect(copy) as database:
        database.execute("UPDATE latency SET hot_stable = 1, cold_stable = 1")
        database.execute(
            "UPDATE latency SET cold_ms = 2, cold_q1_ms = 1, cold_q3_ms = 5, cold_repeats = 6, cold_stable = 0 "
            "WHERE widths = '[16, 64]'"
        )
    database.close()
    assert main(["show", str(copy), "--block", "3"]) == 0
    shown = said(capsys)
    assert "0 failed, 1 unstable" in shown
    assert "2.0000 ms 200% unstable 6" in shown


def test_shards_are_disjoint_and_merge_to_the_whole(
    model: str, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Measurement(1.0, 1.0, 1.0, 3, stable=True)
    monkeypatch.setattr(OnnxRuntimeBackend, "block_latency", lambda *_: BlockLatency(row, row))
    parts = [tmp_path / "1.sqlite", tmp_path / "2.sqlite"]
    for number, part in enumerate(parts, 1):
        assert main(measuring(model, part, "--shard", f"{number}/2")) == 0
    blocks = [{row.signature for row in rows(part).values() if row.name != "one run"} for part in parts]
    assert all(blocks)
    assert not blocks[0] & blocks[1]
    assert blocks[0] | blocks[1] == {row.signature for row in rows(table).values() if row.name != "one run"}
    assert main(["merge", str(tmp_path / "all.sqlite"), *map(str, parts)]) == 0
    assert_complete(tmp_path / "all.sqlite", model)


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_export_and_import_give_the_same_rows(table: Path, tmp_path: Path, kind: str) -> None:
    file, copy = tmp_path / f"rows.{kind}", tmp_path / "copy.sqlite"
    assert main(["export", str(table), str(file)]) == 0
    assert main(["import", str(file), str(copy)]) == 0
    assert rows(copy) == rows(table)


def test_what_is_wanted_goes_out_with_its_networks(
    model: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "todo.csv", tmp_path / "onnx"
    flags = ["--wanted", "--model", model, "--input-size", "16", "--device", "another", "--onnx", str(folder)]
    assert main(["export", str(table), str(file), *flags]) == 0
    count = len(rows(table)) - 1  # but for a run's own cost
    assert f"{count} rows to measure" in said(capsys)
    lines = file.read_text().splitlines()
    assert len(lines) == count + 1
    assert all('""device"": ""another""' in line for line in lines[1:])
    numbers = sorted(int(p.name.split("_")[0]) for p in folder.iterdir())
    assert numbers == list(range(2, count + 2))
    # what prunings to a target rest on goes out in rounds, the first of few rows a block
    assert main(["export", str(table), str(file), *flags[:-2], "--targets", "0.5"]) == 0
    assert 4 <= len(file.read_text().splitlines()) - 1 < count


def test_measure_for_targets_asks_for_fewer_rows_and_ends(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timings are a stand-in's: how many rows unsteady ones ask for depends on who else uses the machine."""

    def linear(
        self: OnnxRuntimeBackend, block: object, widths: tuple[int, ...], config: object = None
    ) -> Any:
        ms = 0.1 + 0.001 * math.prod(widths)
        return BlockLatency(Measurement(ms, ms, ms, 9, True))

    monkeypatch.setattr(OnnxRuntimeBackend, "block_latency", linear)
    whole, few, model = tmp_path / "whole.sqlite", tmp_path / "few.sqlite", model.replace(":build", ":wide")
    assert main(measuring(model, whole)) == 0
    assert main(measuring(model, few, "--targets", "0.6,0.3")) == 0
    found = rows(few)
    assert 4 < len(found) < 0.7 * len(rows(whole))
    assert main(["check", str(few), "--model", model, "--input-size", "16"]) in (0, 1)
    assert "missing" not in said(capsys)
    assert main(measuring(model, few, "--targets", "0.6,0.3", "--shard", "1/2")) == 2
    assert "leave --shard out" in said(capsys)
    with pytest.raises(SystemExit):
        main(measuring(model, few, "--targets", "1.5"))


def quietly(arguments: list[str]) -> int:
    """``smcp-table`` on a machine that is taken for quiet, as it is in every test's own process."""
    quiet.core_share = lambda: 1.0
    Pace.await_usual = Pace.is_usual = lambda _: True
    return main(arguments)


def waiting(arguments: list[str], most: int) -> int:
    """The same, but that it gets no further than so many rows, however late somebody looks."""
    measure, measured = OnnxRuntimeBackend.block_latency, []

    def measure_or_wait(*given: Any, **options: Any) -> BlockLatency:
        measured.append(given)
        if len(measured) > most:
            time.sleep(600)
        return measure(*given, **options)

    OnnxRuntimeBackend.block_latency = measure_or_wait
    return quietly(arguments)


def _start(model: str, table: Path, number: int = 0) -> Running:
    return Running(table.with_name(f"told {number}"), quietly, measuring(model, table))


def _wait_for_rows(table: Path, count: int, process: Running) -> None:
    deadline = time.monotonic() + 120
    while len(rows(table)) < count:
        assert process.ended() is None, process.wait()
        assert time.monotonic() < deadline, "nothing was measured in two minutes"
        time.sleep(0.1)  # each look opens the table


@pytest.mark.slow
def test_kill_9_loses_at_most_the_row_under_way(model: str, table: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    for count in (2, 7):
        process = Running(tmp_path / "told", waiting, measuring(model, path), 8)
        _wait_for_rows(path, count, process)
        before = rows(path)
        assert process.kill() == -signal.SIGKILL
        after = rows(path)
        assert_none_lost(before, after)
        with sqlite3.connect(path) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (claimed,) = database.execute("SELECT count(*) FROM latency WHERE state = 'claimed'").fetchone()
        database.close()
        assert claimed <= 1
    assert main(measuring(model, path)) == 0
    final = rows(path)
    assert_none_lost(after, final)
    assert len({row.fingerprint for row in final.values()}) == 1
    assert {s for s, _ in final} == {s for s, _ in rows(table)}
    assert_complete(path, model)


@pytest.mark.slow
def test_two_processes_fill_one_table_without_double_work(model: str, tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    for code, told in [worker.wait() for worker in [_start(model, path, number) for number in range(2)]]:
        assert code == 0, told
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT state, attempts, owner FROM latency").fetchall()
    database.close()
    assert {state for state, _, _ in found} == {"measured"}
    assert {attempts for _, attempts, _ in found} == {1}
    assert_complete(path, model)


def test_a_block_that_cannot_be_measured_is_named_and_the_rest_goes_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, broken = Measurement(1.0, 1.0, 1.0, 3, stable=True), {(16, 64)}

    def crash(self, block, widths, config=None):
        if widths in broken:
            raise RuntimeError("the kernel crashed")
        return BlockLatency(row, row)

    monkeypatch.setattr(OnnxRuntimeBackend, "block_latency", crash)
    path = tmp_path / "t.sqlite"
    assert main(measuring(model, path)) == 1
    assert "failed: 3 at (16, 64): RuntimeError: the kernel crashed" in said(capsys)
    assert len(rows(path)) > 5
    assert main(["check", str(path)]) == 1
    assert "failed: 3 at 16x64" in said(capsys)
    broken.clear()
    assert main(measuring(model, path, "--retry-failed")) == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["show", "{dir}/absent.sqlite"], "there is no latency table"),
        (["check", "{dir}/absent.sqlite"], "there is no latency table"),
        (["show", "{dir}/text.sqlite"], "is no latency table, or a damaged one"),
        (["check", "{dir}/foreign.sqlite"], "is a database, but no latency table"),
        (["check", "{dir}/other.sqlite"], "is a latency table of format 99"),
        (["check", "{dir}/cut.sqlite"], "damaged"),
        (["measure", "{model}", "--table", "{dir}/text.sqlite"], "is no latency table"),
        (["measure", "{model}", "--table", "{dir}/text.sqlite/t.sqlite"], "cannot open the latency table"),
        (["measure", "torchvision:resnet181"], "no model 'resnet181'"),
        (["measure", "{model}", "--shard", "3/2"], "give I/N"),
        (["measure", "{model}", "--input-size", "tiny"], "--input-size 'tiny'"),
        (["measure", "{model}", "--batch", "0"], "--batch"),
        (["measure", "{model}", "--threads", "0"], "threads = 0"),
        (["merge", "{dir}/new.sqlite", "{dir}/absent.sqlite"], "there is no latency table"),
        (["export", "{dir}/good.sqlite", "{dir}/rows.txt"], "must end in .json or .csv"),
        (["export", "{dir}/good.sqlite", "{dir}/rows.csv", "--wanted"], "--wanted needs --model"),
        (["import", "{dir}/absent.csv", "{dir}/new.sqlite"], "there is no file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_paragraph(
    model: str,
    table: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "other", "cut"):
        shutil.copy(table, tmp_path / f"{name}.sqlite")
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to be taken for one\n" * 40)
    with sqlite3.connect(tmp_path / "foreign.sqlite") as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    whole = (tmp_path / "cut.sqlite").read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[: len(whole) // 2])
    given = [a.replace("{dir}", str(tmp_path)).replace("{model}", model) for a in arguments]
    code = main(given)
    assert what in said(capsys)
    assert code in ((1, 2) if "cut" in arguments[-1] else (2,))
    assert not (tmp_path / "new.sqlite").exists()
    assert not (tmp_path / "table.sqlite").exists()


def test_the_help_names_every_command() -> None:
    text = build_parser().format_help()
    for name in ("measure", "show", "merge", "export", "import", "check"):
        assert name in text
