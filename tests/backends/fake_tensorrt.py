"""Putting the stand-ins for TensorRT and CUDA in place of the real bindings, in this process or a worker's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

FAKE = Path(__file__).parent / "fake_gpu"
RECORD = json.loads((Path(__file__).parent / "tensorrt_names.json").read_text(encoding="utf-8"))
#: One of each generation of the API.
VERSIONS = ("8.5.3.1", "8.6.1", "10.16.1.11", "11.4.0.106")


def pretend(monkeypatch: pytest.MonkeyPatch, version: str = VERSIONS[0], **environment: str) -> None:
    """Let `import tensorrt` find the stand-in of ``version``; ``environment`` sets its FAKE_ variables."""
    for name, value in {"FAKE_TENSORRT": version, "PYTHONPATH": str(FAKE), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(FAKE))
    for name in [n for n in sys.modules if n.split(".")[0] in ("tensorrt", "tensorrt_lean", "cuda")]:
        monkeypatch.delitem(sys.modules, name)


def small_model(
    path: Path, precision: int = onnx.TensorProto.FLOAT, batch: int = 2, first: str = "conv1"
) -> Path:
    """Write conv, relu, conv over ``batch`` images of 8 channels; 0 leaves the batch open."""
    kind = helper.tensor_dtype_to_np_dtype(precision)
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(
            generator.normal(size=(8, 8, 3, 3)).astype(kind) / kind.type(9), f"{name}.weight"
        )
        for name in (first, "conv2")
    ]
    nodes = [
        helper.make_node("Conv", ["x", f"{first}.weight"], ["a"], first, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "conv2.weight"], ["y"], "conv2", pads=[1, 1, 1, 1]),
    ]
    shape = [batch or "batch", 8, 6, 6]
    ends = [helper.make_tensor_value_info(name, precision, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def built(worker: Any, onnx_file: Path, engine: Path | None = None, **options: Any) -> dict[str, Any]:
    """Ask a worker for an engine, loaded as "e", with the timing cache beside the ONNX file; return what it tells."""
    told: dict[str, Any] = worker.ask(
        "build",
        onnx=str(onnx_file),
        options=options,
        engine=engine and str(engine),
        key="e",
        cache=str(onnx_file.parent),
    )["build"]
    return told
