"""ONNX files for runtimes of an older opset, and for strongly typed ones: they compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fake_tensorrt import small_model
from onnx import helper, numpy_helper

from smcp_fx.backends.onnx.opset import lower_opset
from smcp_fx.backends.onnx.precision import cast_model
from smcp_fx.errors import BackendError

FLOAT = onnx.TensorProto.FLOAT


def in_opset_18(node: onnx.NodeProto, outputs: int, *constants: onnx.TensorProto) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", FLOAT, [2, 7, 4, 5])
    outs = [helper.make_tensor_value_info(f"y{index}", FLOAT, None) for index in range(outputs)]
    graph = helper.make_graph([node], "one", [x], outs, list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def ints(name: str, values: list[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


@pytest.mark.parametrize(
    "model",
    [
        in_opset_18(helper.make_node("Split", ["x"], ["y0", "y1", "y2"], axis=1, num_outputs=3), 3),
        in_opset_18(helper.make_node("Split", ["x", "s"], ["y0", "y1"], axis=1), 2, ints("s", [3, 4])),
        in_opset_18(
            helper.make_node("Pad", ["x", "p", "", "a"], ["y0"]),
            1,
            ints("p", [1, 2, 3, 4]),
            ints("a", [3, -2]),
        ),
        in_opset_18(helper.make_node("ReduceMean", ["x", "a"], ["y0"], keepdims=0), 1, ints("a", [2, 3])),
        in_opset_18(helper.make_node("ReduceMax", ["x", "a"], ["y0"]), 1, ints("a", [-1])),
        in_opset_18(helper.make_node("ReduceSum", ["x", "a"], ["y0"]), 1, ints("a", [1])),
        in_opset_18(helper.make_node("ReduceMean", ["x"], ["y0"], noop_with_empty_axes=1), 1),
        in_opset_18(helper.make_node("ReduceMean", ["x"], ["y0"]), 1),
        in_opset_18(helper.make_node("Resize", ["x", "", "", "z"], ["y0"]), 1, ints("z", [2, 7, 8, 10])),
    ],
    ids=lambda model: model.graph.node[0].op_type,
)
def test_opset_17_computes_the_same(model: onnx.ModelProto) -> None:
    lowered = lower_opset(model)
    assert lowered.opset_import[0].version == 17
    x = {"x": np.random.default_rng(0).normal(size=(2, 7, 4, 5)).astype(np.float32)}
    for a, b in zip(
        *(onnxruntime.InferenceSession(m.SerializeToString()).run(None, x) for m in (model, lowered)),
        strict=True,
    ):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (helper.make_node("Mish", ["x"], ["y0"], "act"), "'act': the operation Mish came later"),
        (
            helper.make_node("Resize", ["x", "", "", "z"], ["y0"], "up", antialias=1, mode="linear"),
            "'up': Resize with anti",
        ),
        (helper.make_node("ReduceMean", ["x", "q"], ["y0"], "mean"), "'mean': ReduceMean with computed axes"),
    ],
    ids=["Mish", "Resize", "ReduceMean"],
)
def test_what_opset_17_has_not_is_named(node: onnx.NodeProto, told: str) -> None:
    with pytest.raises(BackendError, match=f"opset 17: {told}"):
        lower_opset(in_opset_18(node, 1, ints("z", [2, 7, 8, 10])))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_model_is_cast_as_a_whole(precision: str, tmp_path: Path) -> None:
    model = onnx.load(small_model(tmp_path / "m.onnx"))
    cast = cast_model(model, precision)
    kind = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}[precision]
    assert {t.data_type for t in cast.graph.initializer} == {kind}
    assert {v.type.tensor_type.elem_type for v in (*cast.graph.input, *cast.graph.output)} == {kind}
    for a, b in zip(cast.graph.initializer, model.graph.initializer, strict=True):
        exact = torch.from_numpy(numpy_helper.to_array(b).copy())
        rounded = exact.to(
            torch.float16 if precision == "fp16" else torch.bfloat16
        )  # PyTorch rounds to even, too
        assert a.raw_data == rounded.view(torch.int16).numpy().tobytes()
    assert cast_model(model, "fp32") is model
