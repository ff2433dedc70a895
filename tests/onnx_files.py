"""Small ONNX files for tests, written node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

IMAGE = ("batch", 4, "height", "width")
_RANDOM = np.random.default_rng(0)


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights by name."""
    return {name: _RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    folder: Path,
    nodes: list[onnx.NodeProto],
    held: dict[str, Any] | None = None,
    shape: tuple[int | str, ...] = IMAGE,
    opset: int = 17,
    kind: int = TensorProto.FLOAT,
    outputs: int | None = TensorProto.FLOAT,
) -> Path:
    """Write a network from "x" to "y"."""
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", outputs, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (held or {}).items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def n(kind: str, inputs: str = "x", result: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node, named after its result."""
    return helper.make_node(
        kind, inputs.split(), result.split(), name=f"the_{result.split()[0]}", **attributes
    )


W = weights(w=(6, 4, 3, 3), wt=(4, 6, 2, 2), b=(6,), m=(16, 5), v=(4,))
W["var"] = np.abs(W["v"]) + 0.5
