"""A block's twin runs before it, and the two are told apart."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tolerances import assert_close

from smcp_fx.backends.onnx import twin as onnx_twin
from smcp_fx.backends.onnx.context import add_context
from smcp_fx.backends.onnx.twin import add_twin
from smcp_fx.backends.onnxruntime.blocks import measure_block
from smcp_fx.backends.onnxruntime.profile import NodeTime
from smcp_fx.backends.onnxruntime.twin import halves


def a_model(channels: int = 8) -> onnx.ModelProto:
    """A 1x1 convolution, and its gate."""
    weight = np.random.default_rng(0).standard_normal((channels, channels, 1, 1)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], "conv"),
            helper.make_node("Clip", ["a", "", "high"], ["b"], "clip"),
            helper.make_node("Mul", ["b", "x"], ["y"], "gate"),
        ],
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, channels, 5, 5])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32(6.0), "high")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_the_twin_has_equal_nodes_weights_of_its_own_and_the_same_result() -> None:
    model = a_model()
    assert add_twin(model)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == 2 * ["Conv", "Clip", "Mul"]
    assert [node.name for node in model.graph.node[3:]] == ["conv", "clip", "gate"]
    names = [tensor.name for tensor in model.graph.initializer]
    assert len(set(names)) == 4
    session = ort.InferenceSession(model.SerializeToString())
    image = np.random.default_rng(1).standard_normal((1, 8, 5, 5)).astype(np.float32)
    results = session.run(None, {value.name: image for value in session.get_inputs()})
    assert len(results) == 2
    np.testing.assert_array_equal(*results)


def test_a_twins_weights_have_other_values() -> None:
    """Of equal weights a runtime may keep one copy, which is in cache when the second block reads it."""
    model = a_model(channels=16)
    assert add_twin(model)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    own, twins = values["w"], values["w_smcp_twin"]
    assert not (own == twins).any()
    np.testing.assert_array_equal(np.sort(own, axis=None), np.sort(twins, axis=None))
    assert values["high"] == values["high_smcp_twin"] == 6.0
    session = ort.InferenceSession(model.SerializeToString())
    image = np.random.default_rng(1).standard_normal((1, 16, 5, 5)).astype(np.float32)
    results = session.run(None, {value.name: image for value in session.get_inputs()})
    for result, weight in zip(results, (own, twins), strict=True):
        expected = np.minimum(np.einsum("oi,nihw->nohw", weight[..., 0, 0], image), 6.0) * image
        assert_close(torch.from_numpy(result), torch.from_numpy(expected), "slicing")


def test_large_weights_and_nested_graphs_have_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = a_model()
    branch = helper.make_graph([helper.make_node("Identity", ["a"], ["c"])], "branch", [], [])
    nested.graph.node[1].attribute.append(helper.make_attribute("then_branch", branch))
    monkeypatch.setattr(onnx_twin, "_MOST_BYTES", 4 * 8 * 8 + 4 - 1)
    for model in (nested, a_model()):
        before = model.SerializeToString()
        assert not add_twin(model)
        assert model.SerializeToString() == before
    monkeypatch.setattr(onnx_twin, "_MOST_BYTES", 4 * 8 * 8 + 4)
    assert add_twin(a_model())


def node(name: str, operation: str = "Conv", ms: float = 1.0) -> NodeTime:
    return NodeTime(name, operation, ((1, 8, 5, 5),), ms)


def test_twin_and_block_are_told_apart_by_their_order() -> None:
    first = [
        node("conv_smcp_twin_nchwc"),
        node("ReorderOutput_3", "ReorderOutput"),
        node("gate_smcp_twin", "Mul"),
    ]
    second = [node("ReorderOutput", "ReorderOutput"), node("conv_nchwc"), node("gate", "Mul")]
    assert halves([*first, *second]) == [first, second]
    assert halves([*second, *first]) == [second, first]
    assert halves([first[0], second[1], first[1], second[0], first[2], second[2]]) is None  # in turns
    assert halves([*first, *second[:2]]) is None
    assert halves([*first, *second[:2], node("gate", "Add")]) is None


def test_a_block_of_a_twin_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one measurement with a twin the block's nodes are half of those that the profiler told of."""
    from smcp_fx.backends.onnxruntime import own_time as module

    counted: list[int] = []
    block_ms = module.block_ms

    def counting(nodes: list[NodeTime], *rest: object) -> float:
        counted.append(sum(n.operation in ("Conv", "Clip", "Mul") and "context" not in n.name for n in nodes))
        return block_ms(nodes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "block_ms", counting)
    assert measure_block(a_model()).hot.median_ms > 0
    assert set(counted) <= {2, 3} and counted  # the runtime may fuse convolution and clip


def test_results_are_read_within_the_graph() -> None:
    model = add_context(a_model())
    assert [node.op_type for node in model.graph.node][-1] == "GlobalAveragePool"
    (output,) = model.graph.output
    assert [dim.dim_value for dim in output.type.tensor_type.shape.dim] == [1, 8, 1, 1]
    onnx.checker.check_model(model, full_check=True)
