"""Blocks timed inside a network: their context, conversions, and what they take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from fake_blocks import ABlock
from onnx import numpy_helper
from tolerances import assert_close

from smcp_fx.backends import get_backend
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.context import add_context, random_feed
from smcp_fx.backends.onnxruntime import own_time
from smcp_fx.backends.onnxruntime.blocks import measure_block
from smcp_fx.backends.onnxruntime.own_time import block_ms
from smcp_fx.backends.onnxruntime.profile import NodeTime
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.blocks.feeding import ACTIVATION, MOVEMENT
from smcp_fx.errors import MachineBusyError

FAST = TimingConfig(min_repeats=2, max_repeats=3, budget_ms=1, attempts=1, warmup_ms=1)


def test_context_feeds_the_block_from_a_layer_and_images_directly():
    model = add_context(BlockModels().model(ABlock("conv"), (8, 16)))
    onnx.checker.check_model(model, full_check=True)
    assert [tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input] == [
        (2, 1, 8, 8),
        (2, 1, 8, 8),
    ]
    assert [n.op_type for n in model.graph.node] == [
        "Conv", "Relu", "Conv", "Relu", "Conv", "Add", "Relu", "GlobalAveragePool",
    ]  # fmt: skip
    image = BlockModels().model(ABlock("conv"), (3, 16))
    assert [d.dim_value for d in add_context(image).graph.input[0].type.tensor_type.shape.dim] == [2, 3, 8, 8]


def test_context_writes_inputs_as_the_network_does():
    model = add_context(BlockModels().model(ABlock("conv"), (8, 16)), (MOVEMENT, ACTIVATION))
    onnx.checker.check_model(model, full_check=True)
    assert [n.op_type for n in model.graph.node] == [
        "Abs", "Conv", "Sigmoid", "Mul", "Conv", "Add", "Relu", "GlobalAveragePool",
    ]  # fmt: skip
    assert all(n.name.startswith("smcp_context") for n in [*list(model.graph.node)[:4], model.graph.node[-1]])
    plain, blocked = ([d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input)
    assert (plain, blocked) == ([2, 8, 8, 8], [2, 1, 8, 8])
    # The block's second input is what SiLU wrote: the sum of a convolution of no weights and of it is the output.
    for tensor in model.graph.initializer:
        if not tensor.name.startswith("smcp_context"):
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = random_feed(model)
    weight = next(
        numpy_helper.to_array(t) for t in model.graph.initializer if t.name.startswith("smcp_context")
    )
    image = feed[session.get_inputs()[1].name] * weight[:, 0]
    silu = image / (1 + np.exp(-image))
    found, expected = session.run(None, feed)[0][..., 0, 0], np.maximum(silu, 0).mean((2, 3))
    assert_close(torch.from_numpy(found), torch.from_numpy(expected), "slicing")


def test_a_results_conversion_does_not_count_where_vectors_do_not_divide_its_channels(monkeypatch):
    counted = []

    def spy(nodes, results, profiler_ms=0.0, paid=0.0, copies=1):
        own = [n for n in nodes if not n.name.startswith("smcp_context")]
        computing = sum(n.ms for n in own if not n.operation.startswith("Reorder"))
        counted.append((len(own), block_ms(nodes, results, copies=copies), computing))
        return block_ms(nodes, results, profiler_ms, paid, copies)

    monkeypatch.setattr(own_time, "block_ms", spy)
    conversions = 0
    for channels in (20, 24, 64):
        counted.clear()
        measure_block(BlockModels().model(ABlock("conv"), (64, channels)))
        assert counted
        assert all(np.isclose(ms, computing) for _, ms, computing in counted), channels
        conversions += max(number for number, _, _ in counted) - 1
    if not conversions:
        pytest.skip("ONNX Runtime has no blocked layout on this processor")


def test_the_block_is_told_from_its_context():
    nodes = [
        NodeTime("smcp_context_x_nchwc", "Conv", ((2, 16, 8, 8),), 10.0),
        NodeTime("ReorderOutput", "ReorderOutput", ((2, 8, 8, 8),), 0.5),  # the block asks for this one
        NodeTime("relu_nchwc", "Conv", ((2, 32, 8, 8),), 3.0),
        NodeTime("ReorderOutput_token", "ReorderOutput", ((2, 32, 8, 8),), 0.25),  # the result's
    ]
    assert block_ms(nodes, [(2, 32, 8, 8)]) == 3.5
    # ... or that of the mean that the context takes of it.
    nodes[-1:] = [
        NodeTime("smcp_context_y_mean_nchwc", "GlobalAveragePool", ((2, 32, 1, 1),), 1.0),
        NodeTime("ReorderOutput_token", "ReorderOutput", ((2, 32, 1, 1),), 0.25),
    ]
    assert block_ms(nodes, [(2, 32, 8, 8)]) == 3.5


def test_a_gate_pays_for_its_input_though_its_twin_ran_in_turns():
    """The gate's result is plain, as the mean is: the one conversion is of its input, which has the same shape."""
    shape, mean = ((2, 20, 8, 8),), ((2, 20, 1, 1),)
    one = [
        NodeTime("smcp_context_x_nchwc", "Conv", ((2, 32, 8, 8),), 10.0),
        NodeTime("ReorderOutput", "ReorderOutput", shape, 0.5),
        NodeTime("gate", "Mul", shape, 3.0),
        NodeTime("smcp_context_y_mean", "GlobalAveragePool", mean, 1.0),
    ]
    two = [
        replace(node, name=f"{node.name}_smcp_twin") if "Reorder" not in node.name else node for node in one
    ]
    assert block_ms(one, [shape[0]]) == 3.5
    in_turns = [node for pair in zip(two, one, strict=True) for node in pair]
    assert block_ms(in_turns, [shape[0]], copies=2) == 7.0
    # A result that lies in the runtime's layout is converted for the mean, in both.
    read = NodeTime("ReorderOutput_7", "ReorderOutput", shape, 0.25)
    converted = [*in_turns[:-2], read, in_turns[-2], read, in_turns[-1]]
    assert block_ms(converted, [shape[0]], copies=2) == 7.0


def test_nodes_that_the_runtime_puts_around_context_are_context():
    cast = NodeTime("InsertedPrecisionFreeCast_smcp_context_x_image", "Cast", ((2, 20, 8, 8),), 9.0)
    assert block_ms([cast, NodeTime("conv", "Conv", ((2, 20, 8, 8),), 3.0)], [(2, 20, 8, 8)]) == 3.0


def test_block_latency_grows_with_the_work():
    backend = get_backend("onnxruntime")
    try:
        small, large = (
            backend.block_latency(ABlock("conv", size=16, batch=4), (width, width)) for width in (16, 256)
        )
    except MachineBusyError as error:
        pytest.skip(f"this machine cannot time a block now: {error}")
    assert large.hot.median_ms > 10 * small.hot.median_ms  # 256 times the multiplications
    assert large.cold is not None
    with_torch = get_backend("torch").block_latency(ABlock("conv"), (16, 16), FAST)
    assert with_torch.hot.median_ms > 0
    assert with_torch.cold is None
