"""smcp-compile with TensorRT's stand-in in another Python than this one: files, engines, layers, latencies."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fake_tensorrt import FAKE
from torch import nn

from smcp_fx.backends.onnx import blocks as onnx_blocks
from smcp_fx.backends.tensorrt.backend import TensorRTBackend
from smcp_fx.cli.compile import main
from smcp_fx.compiler.measuring import Corrector
from smcp_fx.latency.store import LatencyStore

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, 16, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 160, 2), nn.Flatten(),
    )
"""


def interrupted_at(name: str) -> Any:
    """TensorRTBackend.compile, interrupted where it comes to the file of this name."""
    compiled = TensorRTBackend.compile

    def stopped(self: TensorRTBackend, module: nn.Module, inputs: Any, path: Any = None) -> Any:
        if path is not None and Path(path).name == name:
            raise KeyboardInterrupt
        return compiled(self, module, inputs, path)

    return stopped


def work_ms(file: Path) -> float:
    """The stand-in's ms for an ONNX file: 1e-7 a weight, and 1e-3 a node that is not fused with the next."""
    graph = onnx.load(file).graph
    sizes = {weight.name: float(np.prod(weight.dims)) for weight in graph.initializer}
    fused = ("QuantizeLinear", "DequantizeLinear")
    return sum(
        1e-3 * (node.op_type not in fused) + 1e-7 * sum(sizes.get(name, 0.0) for name in node.input)
        for node in graph.node
    )


@pytest.fixture(scope="module")
def templates() -> dict[str, onnx.ModelProto]:
    """What blocks were exported as: the same in both runs, which only give them other weights and widths."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("version", "precision", "interrupted"), [("11.4.0.106", "int8", True)])
def test_a_run_leaves_engines_and_what_their_layers_take(
    version: str,
    precision: str,
    interrupted: bool,
    templates: dict[str, onnx.ModelProto],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Corrector, "fit", lambda self: None)  # its networks are tested elsewhere
    (tmp_path / "net.py").write_text(MODEL)
    out = tmp_path / "out"
    python = f"env FAKE_TENSORRT={version} PYTHONPATH={FAKE} {sys.executable}"
    flags = [
        "--model", f"{tmp_path}/net.py:build", "--out", str(out), "--backend", "tensorrt", "--precision", precision,
        "--worker-python", python, "--target", "0.8", "--multiple", "32", "--batch", "64", "--dense-epochs", "0",
        "--epochs", "1", "--version-compatible",
    ]  # fmt: skip
    export = onnx_blocks.export_model_proto

    def once(module: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> onnx.ModelProto:
        key = f"{module} {[tuple(x.shape) for x in inputs]}"
        if key not in templates:
            templates[key] = export(module, inputs, **options)
        return templates[key]

    monkeypatch.setattr(onnx_blocks, "export_model_proto", once)
    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(TensorRTBackend, "compile", interrupted_at("pruned.onnx"))
            assert main(flags) == 130
        assert (out / "dense.engine").exists() and not (out / "pruned.engine").exists()
        rows = LatencyStore(tmp_path / "table.sqlite", create=False)
        before = [row.measured_at for row in rows.rows()]
        flags.append("--resume")
    assert main(flags) == 0, capsys.readouterr().err
    if interrupted:
        assert before and [row.measured_at for row in rows.rows()] == before  # nothing was measured again
        rows.close()

    report = json.loads((out / "report.json").read_text())
    assert all((out / file).is_file() for file in report["files"].values())
    assert {"dense.engine", "dense.engine.json", "pruned.engine", "pruned.engine.json"} <= {
        *report["files"].values()
    }
    assert report["backend"]["version"] == version and report["backend"]["precision"] == precision
    for side in ("dense", "pruned"):
        told = json.loads((out / f"{side}.engine.json").read_text())
        assert told["types"] == {precision: 2}
        assert told["onnx_sha256"] == hashlib.sha256((out / f"{side}.onnx").read_bytes()).hexdigest()
        assert told["options"]["version_compatible"] is True
        assert report[side]["latency_ms"] == pytest.approx(work_ms(out / f"{side}.onnx") + 2e-3)
        header = json.loads((out / f"{side}.engine").read_bytes().partition(b"\0")[0])
        assert "VERSION_COMPATIBLE" in header["flags"]
    assert report["measured_fraction"] == pytest.approx(
        report["pruned"]["latency_ms"] / report["dense"]["latency_ms"]
    )
    assert report["measured_fraction"] == pytest.approx(0.8, abs=0.01)
    layers = report["engine_layers"]
    assert [block["layers"] for block in layers["blocks"] if block["measured_ms"]] == [["0"], ["3"]]
    told_ms = [block["measured_ms"] or 0.0 for block in layers["blocks"]]
    assert sum(told_ms) + sum(layer["ms"] for layer in layers["other_layers"]) == pytest.approx(
        work_ms(out / "pruned.onnx")
    )
    assert not list((out / "state").glob("candidate*"))
