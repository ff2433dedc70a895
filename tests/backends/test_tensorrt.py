"""The TensorRT backend and its table rows, on a stand-in for TensorRT; the same on a GPU where there is one."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fake_tensorrt import pretend
from torch import nn

from smcp_fx.backends import get_backend
from smcp_fx.backends.layers import blocks_beside_layers
from smcp_fx.backends.tensorrt import backend as tensorrt_backend
from smcp_fx.backends.tensorrt.backend import TOLERANCES
from smcp_fx.backends.tensorrt.worker.client import InProcess, WorkerProcess
from smcp_fx.backends.tensorrt.worker.problems import WorkerError
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import build
from smcp_fx.cli.table import main
from smcp_fx.errors import BackendError, InputError
from smcp_fx.latency.store import LatencyStore
from smcp_fx.latency.table import LatencyTable
from smcp_fx.tracing.tracer import trace

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
"""


@pytest.fixture(scope="module")
def exports() -> dict[str, onnx.ModelProto]:
    """What was exported already, by network and shapes: the networks here are the same every time."""
    return {}


@pytest.fixture(autouse=True)
def export_once(exports: dict[str, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch) -> None:
    export = tensorrt_backend.export_model_proto

    @functools.wraps(export)
    def once(module: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> onnx.ModelProto:
        key = f"{module} {[tuple(x.shape) for x in inputs]} {options}"
        if key not in exports:
            exports[key] = export(module, inputs, **options)
        return exports[key]

    monkeypatch.setattr(tensorrt_backend, "export_model_proto", once)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
    return nn.Sequential(*layers).eval()


def blocks_of(module: nn.Module, x: torch.Tensor) -> list[Any]:
    traced = trace(module, (x,))
    return cut(traced, build(traced.module, traced.values, multiple=8))


@pytest.mark.parametrize(("version", "precision"), [("8.5.3.1", "fp16"), ("11.4.0.106", "fp32")])
def test_a_network_is_built_compared_and_timed(
    version: str, precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, version)
    backend = get_backend("tensorrt", precision=precision, in_process=True, folder=tmp_path)
    fingerprint = backend.fingerprint()
    assert (fingerprint.version, fingerprint.precision, fingerprint.device) == (
        version,
        precision,
        "Pretend GPU",
    )
    assert dict(fingerprint.settings)["tf32"] == "off"
    module, x = network(), torch.randn(2, 8, 6, 6)
    with backend.compile(module, (x,), tmp_path / "net.onnx") as engine:
        assert all(file.exists() for file in backend.files(tmp_path / "net.onnx"))
        proto = onnx.load(tmp_path / "net.onnx")
        assert [entry.version for entry in proto.opset_import if not entry.domain] == [17]
        with torch.no_grad():
            expected = module(x).numpy()
        found = engine.run([x.numpy()])[0]
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() <= TOLERANCES[precision] * np.abs(expected).max()
        weights = 8 * 16 * 9 + 16 + 16 * 16 + 16
        work = 3e-3 + 1e-7 * weights
        assert engine.latency().median_ms == pytest.approx(work + 2e-3)
        assert sum(layer["ms"] for layer in engine.layers()) == pytest.approx(work)
        blocks = blocks_of(module, x)
        beside = blocks_beside_layers(blocks, {"0": 1.0, "3": 2.0}, engine.layers())
    assert [(row["name"], row["layers"]) for row in beside["blocks"]] == [("0", ["0"]), ("3", ["3"])]
    assert [layer["name"] for layer in beside["other_layers"]] == ["node_relu"]
    first = backend.block_latency(blocks[0], blocks[0].full_widths)
    assert first.cold is None
    assert first.hot.median_ms == pytest.approx(2e-3 + 1e-7 * (8 * 16 * 9 + 16) + 2e-3 / 50)
    assert backend.run_overhead_ms() == pytest.approx(2e-3 * (1 - 1 / 50))
    assert backend.cache_bytes() == 4 << 20
    backend.close()


def test_outputs_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    backend = get_backend("tensorrt", precision="fp16", in_process=True, folder=tmp_path)
    monkeypatch.setitem(TOLERANCES, "fp16", 1e-9)
    with pytest.raises(BackendError, match=r"TensorRT computes .* where PyTorch computes"):
        backend.compile(network(), (torch.randn(2, 8, 6, 6),))


def test_a_dead_worker_fails_one_row_and_engines_come_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, FAKE_FAULT="crash:3")
    backend = get_backend("tensorrt", precision="fp32", builders=2, folder=tmp_path)
    x = torch.randn(2, 8, 6, 6)
    blocks = blocks_of(network(), x)
    good = backend.compile(network()[:3].eval(), (x,))
    before = good.run([x.numpy()])[0]
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure(blocks, backend)
        assert {name for name, _, _ in report.failed} == {"3"}
        assert all("killed by SIGKILL" in why for _, _, why in report.failed)
        price = table.surface(blocks[0], backend.fingerprint())
        assert float(price(*map(np.array, blocks[0].full_widths))) > 0
    assert np.array_equal(good.run([x.numpy()])[0], before)  # loaded again in the next process
    backend.close()


def test_an_interrupt_is_not_kept_waiting_by_builders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    backend = get_backend("tensorrt", precision="fp32", builders=2, check=False, folder=tmp_path)
    built = list[str]()
    interrupted = threading.Event()

    class Stub:
        def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
            built.append(op)
            if len(built) == 1:
                interrupted.set()
                raise KeyboardInterrupt
            interrupted.wait(10)
            time.sleep(0.3)
            return {}

        def close(self) -> None: ...

    monkeypatch.setattr(backend, "_workers", [Stub(), Stub()])
    monkeypatch.setattr(backend, "_written", lambda model: tmp_path / "m.onnx")
    monkeypatch.setattr(backend._models, "model", lambda block, point: None)
    monkeypatch.setattr(tensorrt_backend, "_AHEAD", 20)
    rows: Any = [(SimpleNamespace(signature="s"), (width,)) for width in range(8, 328, 8)]
    backend.prepare_rows(rows)
    with pytest.raises(KeyboardInterrupt):
        backend.block_latency(*rows[0])
    assert len(built) < 20  # of forty, a third of a second each
    backend.close()


def test_rows_are_measured_while_others_are_not_built_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupted run keeps what it measured, and has built only a few rows ahead."""
    pretend(monkeypatch)
    backend = get_backend("tensorrt", precision="fp32", builders=2, folder=tmp_path)
    monkeypatch.setattr(tensorrt_backend, "_AHEAD", 1)
    blocks = blocks_of(network(), torch.randn(2, 8, 6, 6))
    built = list[str]()

    def note(self: WorkerProcess, op: str, **arguments: Any) -> dict[str, Any]:
        built.extend([op] if op == "build" and "engine" in arguments else [])
        return ask(self, op, **arguments)

    def stop(state: Any) -> None:
        if state.measured == 2:
            raise KeyboardInterrupt

    ask = WorkerProcess.ask
    monkeypatch.setattr(WorkerProcess, "ask", note)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(KeyboardInterrupt):
            table.measure(blocks, backend, stop)
        assert len(table.rows()) == 3  # one of them tells what a run costs
        assert len(built) == 2  # one for each builder
        table.measure(blocks, backend)
        assert len(built) == len(table.rows()) - 1
    backend.close()


def test_a_row_that_cannot_be_exported_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    backend = get_backend("tensorrt", precision="fp32", builders=2, folder=tmp_path)
    (block, other) = blocks_of(network(), torch.randn(2, 8, 6, 6))
    model = backend._models.model

    def exported(block: Any, point: tuple[int, ...]) -> Any:
        if block is other:
            raise RuntimeError("cannot be exported")
        return model(block, point)

    monkeypatch.setattr(backend._models, "model", exported)
    backend.prepare_rows([(block, block.full_widths), (other, other.full_widths)])
    assert backend.block_latency(block, block.full_widths).hot.median_ms > 0
    with pytest.raises(RuntimeError, match="cannot be exported"):
        backend.block_latency(other, other.full_widths)
    backend.close()


def test_an_engine_that_cannot_be_measured_leaves_no_memory_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    backend = get_backend("tensorrt", precision="fp32", in_process=True, folder=tmp_path)
    asked, ask = list[str](), InProcess.ask

    def measures_nothing(self: InProcess, op: str, **arguments: Any) -> dict[str, Any]:
        asked.append(op)
        if op == "measure":
            raise WorkerError("no")
        return ask(self, op, **arguments)

    monkeypatch.setattr(InProcess, "ask", measures_nothing)
    with pytest.raises(BackendError, match="no"):
        backend.run_overhead_ms()
    assert asked == ["build", "measure", "unload"]


def test_missing_packages_and_wrong_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="precision 'fp8'"):
        get_backend("tensorrt", precision="fp8")
    with pytest.raises(BackendError, match="cannot start the TensorRT worker with 'no-such-python'"):
        get_backend("tensorrt", worker_python="no-such-python")
    if importlib.util.find_spec("tensorrt") is None:
        with pytest.raises(
            BackendError, match=r"tensorrt is not installed for .*: pip install tensorrt cuda-bindings"
        ):
            get_backend("tensorrt")


# ---- requests and answers ---------------------------------------------------------------------------------------


def rows(table: Path) -> list[Any]:
    store = LatencyStore(table, create=False)
    found = store.rows()
    store.close()
    return found


def answer_off(todo: Path) -> None:
    command = [sys.executable, str(todo / "worker.pyz"), str(todo)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)


def test_a_table_is_filled_on_another_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    todo, table = tmp_path / "todo", tmp_path / "t.sqlite"
    asking = [
        "measure",
        f"{tmp_path}/net.py:build",
        "--backend",
        "tensorrt",
        "--input-size",
        "8x6x6",
        "--table",
        str(table),
    ]
    assert main([*asking, "--emit-requests", str(todo)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "rows to measure. On the device: python3 todo/worker.pyz todo." in told
    pretend(monkeypatch)
    for _ in range(4):
        answer_off(todo)
        assert main([*asking, "--emit-requests", str(todo), "--read-answers", str(todo)]) == 0
        if "complete for 2 blocks" in capsys.readouterr().out:
            break
    found = rows(table)
    assert {row.name for row in found} == {"0", "2", "one run"}
    first = next(row for row in found if row.name == "0" and row.widths == (16,))
    assert first.fingerprint.device == "Pretend GPU" and first.fingerprint.precision == "fp16"
    assert first.latency.hot.median_ms == pytest.approx(2e-3 + 1e-7 * (8 * 16 * 9 + 16) + 2e-3 / 50)
    # the same rows as this machine would have measured
    assert main(asking) == 0
    assert "0 rows measured" in capsys.readouterr().out
    # a row that failed there is asked for again, under a name that the device has not answered
    answer = next(f for f in (todo / "answers").glob("*.json") if not f.stem.startswith("run"))
    whole = json.loads(answer.read_text())
    answer.write_text(json.dumps({k: whole[k] for k in ("id", "about", "finished")} | {"error": "no kernel"}))
    table.unlink()
    again = [*asking, "--read-answers", str(todo), "--emit-requests", str(todo)]
    assert main(again) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "1 failed, 0 requests have no answer" in told and "nothing to measure" in told
    assert main([*again, "--retry-failed"]) == 1
    assert "1 rows to measure" in " ".join(capsys.readouterr().out.split())
    answer_off(todo)
    assert (todo / "answers" / f"{answer.stem}-2.json").exists()
    assert main(again) == 0
    assert "complete for 2 blocks" in capsys.readouterr().out
    assert {row.widths: row.latency for row in rows(table)} == {row.widths: row.latency for row in found}
    answer = todo / "answers" / f"{answer.stem}-2.json"
    answer.write_text(answer.read_text()[:40])
    assert main([*asking, "--read-answers", str(todo)]) == 2
    assert f"{answer.name} is no answer, or was cut off" in " ".join(capsys.readouterr().err.split())
    assert main([*asking, "--emit-requests", str(todo), "--precision", "fp32"]) == 2
    assert "requests with other options" in " ".join(capsys.readouterr().err.split())


def test_requests_are_for_tensorrt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["measure", "torchvision:resnet18", "--emit-requests", str(tmp_path)]) == 2
    assert "are for --backend tensorrt" in " ".join(capsys.readouterr().err.split())


# ---- files for older and for strongly typed versions ------------------------------------------------------------


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    python = os.environ.get("TRT_PYTHON")
    try:
        backend = get_backend(
            "tensorrt", worker_python=python, tactic_sources_off=("CUBLAS", "CUBLAS_LT", "CUDNN")
        )
    except BackendError as error:
        pytest.skip(str(error))
    x = torch.randn(8, 8, 32, 32)
    with backend.compile(network(), (x,), tmp_path / "net.onnx") as engine:  # compares with PyTorch
        assert engine.build["types"] == {"fp16": 2}
        assert engine.latency().median_ms > 0
        layers = engine.layers()
        assert {node for layer in layers for node in layer["nodes"]} >= {"0", "3"}
    for block in blocks_of(network(), x):
        assert backend.block_latency(block, block.full_widths).hot.median_ms > 0
    backend.close()
