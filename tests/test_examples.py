"""Every script of examples/ runs, and prunes what it says."""

from __future__ import annotations

import importlib
import importlib.util
import math
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import ranks

import smcp_fx
from smcp_fx.backends import BlockLatency, Measurement
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeBackend
from smcp_fx.cli.table import main as table
from smcp_fx.latency.table import LatencyTable

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Scripts and what they need; the Accelerate one is tested beside its precisions.
SCRIPTS = {"plain_training": None, "mixed_precision_training": None, "without_training": None,
           "latency_target": None, "lightning_training": "lightning"}  # fmt: skip


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("toy")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("default")  # the frameworks have warnings of their own
def test_an_example(name: str, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if needed := SCRIPTS[name]:
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)  # benchmarks have the same names
    spec.loader.exec_module(script)
    if name == "latency_target":  # no test judges a latency: rows are by formula, and files not compared
        monkeypatch.setattr(
            OnnxRuntimeBackend, "block_latency", lambda self, block, widths, _: priced(widths)
        )
        script.compare = lambda *engines: "not compared"
    smaller = script.main(tmp_path) if name == "latency_target" else script.main()
    dense = sum(p.numel() for p in toy.network().parameters())
    assert sum(p.numel() for p in smaller.parameters()) < dense
    assert smaller.eval()(torch.randn(3, 1, 12, 12)).shape == (3, 2)
    assert toy.accuracy(smaller) > 0.9


def priced(widths: tuple[int, ...]) -> BlockLatency:
    ms = 0.01 + 1e-4 * math.prod(widths)
    row = Measurement(ms, ms, ms, 1, True)
    return BlockLatency(row, row)


def as_script(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def test_the_example_on_two_processes(tmp_path: Path) -> None:
    ended = ranks(tmp_path, 2, as_script, EXAMPLES / "ddp_training.py")
    assert [code for code, _ in ended] == [0, 0], ended
    assert "accuracy" in ended[0][1]


def test_a_table_for_a_phone(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round until nothing is wanted; then the table prices the network."""
    script: Any = importlib.import_module("time_onnx_files")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "milliseconds", lambda path, *_: path.stat().st_size / 1e5)
    layers = "nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 1)"
    factory = f"def build():\n    return nn.Sequential({layers})\n"
    (tmp_path / "net.py").write_text(f"from torch import nn\n\n\n{factory}")
    network = ["--model", "net.py:build", "--input-size", "16", "--batch", "1"]
    rounds: list[int] = []
    for _ in range(20):
        export = ["export", "phone.sqlite", "todo.csv", "--wanted", *network, "--device", "my-phone"]
        assert table([*export, "--onnx", "todo"]) == 0
        todo, done = tmp_path / "todo.csv", tmp_path / "done.csv"  # the same names in every round
        lines = todo.read_text().splitlines(keepends=True)
        rounds.append(len(lines) - 1)  # beside the columns' names
        if not rounds[-1]:
            break
        assert len(list((tmp_path / "todo").glob("*.onnx"))) == rounds[-1]
        asked = rounds[-1] if len(rounds) > 1 else rounds[-1] // 2  # stopped halfway the first time
        todo.write_text("".join(lines[: 1 + asked]))
        assert script.answer(todo, tmp_path / "todo", done) == asked
        assert script.answer(todo, tmp_path / "todo", done) == 0  # all are there
        assert table(["import", done.name, "phone.sqlite"]) == 0
    assert len(rounds) == 3 and len(LatencyTable(tmp_path / "phone.sqlite").rows()) == rounds[0]


def test_files_are_timed(tmp_path: Path, toy: Any) -> None:
    script: Any = importlib.import_module("time_onnx_files")
    smcp_fx.export_onnx(toy.network().eval(), torch.randn(1, 1, 12, 12), tmp_path / "net.onnx")
    assert script.milliseconds(tmp_path / "net.onnx", 1, seconds=0.0, least=3) > 0


#: Libraries that the tests do not install: one is under the AGPL, the other large.
ELSEWHERE = {"transformers_training", "ultralytics_training"}


def test_every_script_is_run() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there == {*SCRIPTS, *ELSEWHERE, "toy", "accelerate_training", "ddp_training", "time_onnx_files"}
