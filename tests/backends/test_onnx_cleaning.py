"""What is taken out of ONNX files: operations that do nothing; what has an effect stays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from smcp_fx.backends.onnx.clean import clean_model
from smcp_fx.backends.onnx.export import export_model_proto, export_onnx


def littered() -> onnx.ModelProto:
    shape = [2, 3, 4, 4]
    nodes = [
        helper.make_node("Identity", ["x"], ["a"], "identity"),
        helper.make_node("Cast", ["a"], ["b"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["b"], ["c"], "there", perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["c"], ["d"], "back", perm=[0, 3, 1, 2]),
        helper.make_node("Relu", ["d"], ["e"], "relu"),
        helper.make_node("Transpose", ["e"], ["f"], "kept", perm=[0, 2, 3, 1]),
        helper.make_node("Identity", ["f"], ["y"], "last"),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "abd"]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4, 4, 3])],
        value_info=values,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_what_does_nothing_goes_and_what_does_something_stays():
    model, before = littered(), littered()
    assert clean_model(model)
    assert [(n.name, n.op_type) for n in model.graph.node] == [("relu", "Relu"), ("kept", "Transpose")]
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    results = [ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0] for m in (model, before)]
    assert np.array_equal(*results)
    assert not clean_model(model)


def test_casts_and_identities_with_an_effect_stay():
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["a"], "narrow", to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["a"], ["y"], "widen", to=TensorProto.FLOAT),
            helper.make_node("Identity", ["x"], ["z"], "copy"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "yz"],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert not clean_model(model)
    assert len(model.graph.node) == 3


class ByDefault(nn.Module):
    """The exporter writes no value where none is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("pad", "pool", "precision", "opset"),
    [
        (nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), "fp32", 20),
        (nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), "fp16", 17),
        (nn.ConstantPad2d(1, 0.0), nn.AvgPool2d(3, 2, count_include_pad=False), "fp32", 20),
        (ByDefault(), nn.MaxPool2d(3, 2), "fp32", 20),
        (ByDefault(), nn.MaxPool2d(3, 2), "fp16", 17),
    ],
)
def test_zeros_padded_in_front_of_a_pooling_count(pad, pool, precision, opset, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), pad, pool).eval()
    nn.init.constant_(model[0].bias, -5.0)  # less than the zeros, so that it shows where they are left out
    path = export_onnx(model, torch.randn(1, 3, 8, 8), tmp_path / "m.onnx", opset=opset, precision=precision)
    assert "Pad" in [node.op_type for node in onnx.load(path).graph.node]


def test_only_the_mean_over_the_whole_image_becomes_global_pooling():
    class Means(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.mean((2, 3), keepdim=True), x.mean((1, 2), keepdim=True), x.mean((2, 3))

    proto = export_model_proto(Means(), torch.randn(2, 3, 4, 4))
    assert Counter(n.op_type for n in proto.graph.node) == {"GlobalAveragePool": 1, "ReduceMean": 2}
