"""Every file that the tools read, damaged by bytes and by structure: a typed error that names it, or success.

A few cases a format; ``SMCP_FX_FUZZ=5000`` for as many as one has the time for.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import torch
from torch import nn

import smcp_fx
from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.tensorrt.worker.building import BuildOptions
from smcp_fx.backends.tensorrt.worker.main import FORMAT, work_off
from smcp_fx.backends.tensorrt.worker.problems import WorkerError
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.cli import compile as compile_cli
from smcp_fx.cli.table import main as table_main
from smcp_fx.compiler import CompileSettings
from smcp_fx.compiler.measuring import Corrector
from smcp_fx.compiler.settings import as_record
from smcp_fx.config import PruningConfig
from smcp_fx.errors import SmcpError
from smcp_fx.latency.exchange import export_rows
from smcp_fx.latency.store import LatencyStore, TableRow
from smcp_fx.latency.tensorrt_requests import device_fingerprint, read_answers
from smcp_fx.recipes.recipe import load_recipe
from smcp_fx.recipes.record import Record, read_records, write_record
from smcp_fx.zoo.weights import load_weights, read_weights

sys.path.append(str(Path(__file__).parents[2] / "tools"))

HERE = Fingerprint("fake", "here", "none", "1", 1, "float32", (("mode", "formula"),))
ABOUT = {"device": "D", "tensorrt": "8.6.1", "driver": "1", "compute_capability": "9.0", "protocol": 1}
MEASURED = {"median_ms": 1.0, "q1_ms": 1.0, "q3_ms": 1.0, "repeats": 9, "stable": True}
JOB = {
    "id": "a", "onnx": "a.onnx", "options": {"precision": "fp16", "block": True}, "signature": "s", "block": "b",
    "widths": [8], "name": "b 8", "timing": {"repeated": True},
}  # fmt: skip
#: What is damaged: its content, how, and what reads it; errors are told, or raised as they are.
Case = tuple[bytes, tuple[fuzzing.Mutator, ...], Callable[[bytes], None]]


def rows() -> list[TableRow]:
    hot = Measurement(1.5, 1.0, 2.0, 9, True)
    found = [
        TableRow("conv", '{"op": 1}', (8 * n, 8), HERE, BlockLatency(hot, hot), None, 1e9)
        for n in range(1, 9)
    ]
    return [*found, TableRow("odd", '{"op": 2}', (8,), HERE, None, "it crashed", 1e9)]


@pytest.fixture(scope="module")
def table_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("table") / "t.sqlite"
    store = LatencyStore(path)
    store.insert(rows())
    store.claim("conv", '{"op": 1}', HERE, [(80, 8)])
    store.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:  # the same every time
        database.execute("UPDATE latency SET changed = 1e9, owner = 'a/1/2'")
        with contextlib.suppress(sqlite3.OperationalError):
            database.execute("UPDATE mark SET now = 'm', before = 'm'")
    return path.read_bytes()


def refused(code: int) -> None:
    """A command that ends with 2 has told a typed error."""
    if code == 2:
        raise SmcpError("told")
    assert code in (0, 1)


def table(folder: Path, content: bytes) -> Case:
    path, copy = folder / "t.sqlite", folder / "copy.sqlite"

    def read(changed: bytes) -> None:
        path.write_bytes(changed)
        checked, shown = table_main(["check", str(path)]), table_main(["show", str(path)])
        assert table_main(["export", str(path), str(folder / "rows.json")]) == shown, "export is not as show"
        assert not (checked == 0 and shown == 2), "check finds nothing where show fails"
        assert path.read_bytes() == changed, "reading changed the table"
        assert not list(folder.glob("t.sqlite-*")), "reading left files beside"
        shutil.copy(path, copy)
        store = LatencyStore(copy)
        try:
            store.measured('{"op": 1}', HERE)
            store.failures('{"op": 2}', HERE)
            store.claim("conv", '{"op": 1}', HERE, [(88, 8)])
        finally:
            store.close()
        refused(shown)

    return content, (fuzzing.of_bytes, fuzzing.of_table(folder)), read


def exported(kind: str) -> Callable[[Path, bytes], Case]:
    def made(folder: Path, _: bytes) -> Case:
        file, target = folder / f"rows.{kind}", folder / "into.sqlite"
        export_rows(rows(), file)

        def read(changed: bytes) -> None:
            file.write_bytes(changed)
            target.unlink(missing_ok=True)
            taken = table_main(["import", str(file), str(target)])
            assert target.exists() == (taken == 0)
            if taken == 0:
                assert table_main(["check", str(target)]) in (0, 1)
                assert table_main(["show", str(target)]) == 0
            refused(taken)

        return (
            file.read_bytes(),
            (fuzzing.of_bytes, fuzzing.of_csv if kind == "csv" else fuzzing.of_json),
            read,
        )

    return made


def checkpoint(folder: Path, _: bytes) -> Case:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = smcp_fx.save_checkpoint(folder / "c.safetensors", model, optimizer, extras={"epoch": 3})
    whole = path.read_bytes()

    def read(changed: bytes) -> None:
        path.write_bytes(changed)
        smcp_fx.load_checkpoint(path, model, optimizer)
        assert changed == whole, "damage was not noticed"

    return whole, (fuzzing.of_bytes,), read


def signed_checkpoint(folder: Path, _: bytes) -> Case:
    """A manifest of another hand, with the checksum that it must have."""
    import hashlib

    import safetensors.torch

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = smcp_fx.save_checkpoint(folder / "c.safetensors", model, optimizer, extras={"epoch": 3})
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["smcp_fx.checkpoint"])
    generators = manifest.pop("generators")  # of thousands of numbers, which would be all that is changed
    del manifest["sha256"]

    def read(changed: bytes) -> None:
        none = "0" * 64
        text = changed.decode("utf-8", "replace").lstrip()[1:]
        text = f'{{"sha256": "{none}", "generators": {json.dumps(generators)}, {text}'
        whole = safetensors.torch.save(tensors, {"smcp_fx.checkpoint": text})
        path.write_bytes(whole.replace(none.encode(), hashlib.sha256(whole).hexdigest().encode(), 1))
        smcp_fx.load_checkpoint(path, model, optimizer)

    return json.dumps(manifest).encode(), (fuzzing.of_json, fuzzing.of_json, fuzzing.of_bytes), read


def weights(folder: Path, _: bytes) -> Case:
    from safetensors.torch import save_file

    model, path = nn.Linear(3, 2), folder / "w.safetensors"
    save_file(model.state_dict(), path)

    def read(changed: bytes) -> None:
        path.write_bytes(changed)
        load_weights(model, read_weights(path))

    return path.read_bytes(), (fuzzing.of_bytes,), read


def json_file(folder: Path, name: str, content: Any, use: Callable[[], None]) -> Case:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)

    def read(changed: bytes) -> None:
        path.write_bytes(changed)
        use()

    return json.dumps(content).encode(), (fuzzing.of_bytes, fuzzing.of_json, fuzzing.of_json), read


class Canned:
    """A worker that answers everything, and refuses nothing."""

    generation = 0

    def ask(self, op: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        json.dumps(arguments).encode()
        return {"ok": True, "build": {"options": arguments.get("options")}, "measured": MEASURED, "clocks": {},
                "layers": []}  # fmt: skip

    def close(self) -> None:
        pass


def requests(folder: Path, _: bytes) -> Case:
    inside = folder / "todo"
    content = {"format": FORMAT, "version": 1, "options": JOB["options"], "jobs": [JOB, {**JOB, "id": "c"}]}

    def use() -> None:
        before = sorted(folder.iterdir())
        shutil.rmtree(inside / "answers", ignore_errors=True)
        work_off(inside, [Canned()], ABOUT, lambda told: print(told))  # type: ignore[list-item]
        assert sorted(folder.iterdir()) == before, "something was written outside"
        read_answers(inside)

    return json_file(folder, "todo/requests.json", content, use)


def answers(folder: Path, _: bytes) -> Case:
    content = {"format": FORMAT, "version": 1, "options": JOB["options"], "jobs": [JOB]}
    (folder / "requests.json").write_text(json.dumps(content))
    answer = {
        "id": "a",
        "about": ABOUT,
        "measured": MEASURED,
        "finished": 1.0,
        "build": {"options": JOB["options"]},
    }
    target = folder / "t.sqlite"

    def use() -> None:
        found = read_answers(folder)
        target.unlink(missing_ok=True)
        store = LatencyStore(target)
        store.insert(found.rows)
        store.close()
        if found.rows:
            assert table_main(["show", str(target)]) == 0

    return json_file(folder, "answers/a.json", answer, use)


def device(folder: Path, _: bytes) -> Case:
    (folder / "requests.json").write_text(json.dumps({"format": FORMAT, "version": 1, "jobs": []}))
    return json_file(folder, "device.json", ABOUT, lambda: _device(folder))


def _device(folder: Path) -> None:
    found = device_fingerprint(folder, BuildOptions(precision="fp16"))
    assert found is not None
    print(found.describe(), found.key())
    work_off(folder, [], ABOUT, lambda told: print(told))


def settings(folder: Path, _: bytes) -> Case:
    asked = CompileSettings(data="nowhere.py:x", cost="flops")
    flags = ["--data", asked.data, "--cost", "flops", "--out", str(folder), "--resume"]
    record = as_record(asked, PruningConfig())
    return json_file(folder, "state/settings.json", record, lambda: refused(compile_cli.main(flags)))


def comparisons(folder: Path, _: bytes) -> Case:
    one = {**MEASURED, "median_ms": 2.0}
    latency = {
        "dense": one,
        "pruned": MEASURED,
        "fraction": 0.5,
        "q1": 0.5,
        "q3": 0.5,
        "error": 0.0,
        "rounds": 3,
    }
    corrector = object.__new__(Corrector)
    corrector.file = folder / "comparisons.json"

    def use() -> None:
        corrector.resume(10)
        for found in corrector.comparisons:
            print(found.measured.fraction + found.measured.pruned.median_ms, f"{found.step:d} {found.name}")

    content = [{"name": "first", "predicted_ms": 1.0, "measured": latency, "step": 5}] * 2
    return json_file(folder, "comparisons.json", content, use)


def record(folder: Path, _: bytes) -> Case:
    from paper import TABLES
    from reproduce import print_table
    from rich.console import Console

    name = next(iter(TABLES))
    row = f"{name}/{TABLES[name].rows[-1].method}"
    made = Record(row, True, {"flops": 1e9, "top1": 70.0, "fps": 100.0}, {"flops": 2e9, "fps": 50.0}, device="D",
                  environment={"torch": "2"})  # fmt: skip
    write_record(made, folder / "r.json")
    content = json.loads((folder / "r.json").read_text())
    return json_file(folder, "r.json", content, lambda: print_table(name, read_records(folder), Console()))


def recipe(folder: Path, _: bytes) -> Case:
    from smcp_fx.recipes import recipe as module

    base = (module._CATALOGUE / "bases" / "imagenet.toml").read_text(encoding="utf-8")
    own = 'row = "x"\nnetwork = "torchvision:resnet50"\nweights = "none"\n'
    whole = (own + base.replace("[pruning]\n", "[pruning]\ntarget = 0.3\n")).encode()
    path = folder / "own.toml"

    def read(changed: bytes) -> None:
        path.write_bytes(changed)
        load_recipe(str(path))

    return whole, (fuzzing.of_bytes, fuzzing.of_toml, fuzzing.of_toml), read


FORMATS: dict[str, Callable[[Path, bytes], Case]] = {
    "table": table,
    "json": exported("json"),
    "csv": exported("csv"),
    "checkpoint": checkpoint,
    "signed checkpoint": signed_checkpoint,
    "weights": weights,
    "requests": requests,
    "answers": answers,
    "device": device,
    "settings": settings,
    "comparisons": comparisons,
    "record": record,
    "recipe": recipe,
}
#: So many of each in a run of all tests; a table costs six commands.
FEW = {"table": 60, "settings": 75}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_damage_is_told_or_harmless(
    name: str,
    tmp_path: Path,
    table_bytes: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, mutators, read = FORMATS[name](tmp_path, table_bytes)
    monkeypatch.setattr(sys, "argv", ["smcp"])
    failed, held = fuzzing.kinds_of_failure(
        content, mutators, read, (SmcpError, WorkerError), fuzzing.cases(FEW.get(name, 150))
    )
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    with capsys.disabled():
        if fuzzing.cases(0):
            print(
                f"\n{name}: {dict(held)}, failed {sum(failed.values())}", *failed.most_common(40), sep="\n  "
            )
    assert not failed
    assert held["refused"] > 10
