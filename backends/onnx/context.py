"""The context of a block that is timed: nodes that write its inputs as a network would, and read its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.base import Array
from smcp_fx.backends.onnx.blocks import random_values
from smcp_fx.blocks.feeding import ACTIVATION, CONVOLUTION, MOVEMENT

#: Prefix of these nodes' names.
CONTEXT = "smcp_context"
#: Up to this many channels an input is the network's own (an image), and is fed as it is. Chosen, not measured.
IMAGE_CHANNELS = 4
_FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.DOUBLE: np.float64}


def add_context(model: onnx.ModelProto, fed_by: Sequence[str] = ()) -> onnx.ModelProto:
    """Add, in place, nodes before a block that write its inputs as in the network, and means of its results.

    ``fed_by`` says how the network writes each input (`smcp_fx.blocks.feeding`): a 1x1 convolution with ReLU stands
    for a convolution, one with SiLU for an activation that is not fused, an elementwise node for a plain layout.
    Images are fed as they are. Every result of four axes is followed by the mean of each channel.
    """
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    for position, value in enumerate(graph.input):
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if len(shape) != 4 or shape[1] <= IMAGE_CHANNELS or kind.elem_type not in _FLOATS:
            continue
        inner, name = value.name, f"{CONTEXT}_{value.name}"
        how = fed_by[position] if position < len(fed_by) else CONVOLUTION
        nodes += _written(name, how)
        if how != MOVEMENT:
            weight = random_values((shape[1], 1, 1, 1), _FLOATS[kind.elem_type], name)
            graph.initializer.append(numpy_helper.from_array(weight, f"{name}_weight"))
            kind.shape.dim[1].dim_value = 1
        for node in graph.node:
            for place, source in enumerate(node.input):
                if source == inner:
                    node.input[place] = name
        value.name = f"{name}_image"
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *own, *_read_results(graph)])
    return model


def _written(name: str, how: str) -> list[onnx.NodeProto]:
    """Return the nodes that write an input as ``how`` says."""
    node: Callable[..., onnx.NodeProto] = helper.make_node
    image, conv, gate = f"{name}_image", f"{name}_conv", f"{name}_gate"
    if how == MOVEMENT:
        return [node("Abs", [image], [name], f"{name}_plain")]  # the runtime does not fuse it
    first = node("Conv", [image, f"{name}_weight"], [conv], conv)
    if how == ACTIVATION:
        return [
            first,
            node("Sigmoid", [conv], [gate], gate),
            node("Mul", [conv, gate], [name], f"{name}_silu"),
        ]
    return [first, node("Relu", [conv], [name], f"{name}_relu")]


def _read_results(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nodes that read the results as later layers would, and make their means the outputs, in place.

    An output of the graph gets memory of its own. A result that is read within the graph reuses that of earlier ones,
    as in a network.
    """
    nodes = []
    for value in graph.output:
        kind = value.type.tensor_type
        if len(kind.shape.dim) != 4 or kind.elem_type not in _FLOATS:
            continue
        name = f"{CONTEXT}_{value.name}"
        nodes.append(helper.make_node("GlobalAveragePool", [value.name], [f"{name}_mean"], f"{name}_mean"))
        value.name = f"{name}_mean"
        for dim in kind.shape.dim[2:]:
            dim.dim_value = 1
    return nodes


def share_of_channels(model: onnx.ModelProto, positions: Collection[int]) -> float:
    """Return the share of the inputs' channels that these inputs have."""
    if not positions:
        return 0.0
    shapes = [value.type.tensor_type.shape.dim for value in model.graph.input]
    channels = [shape[1].dim_value if len(shape) > 1 else 1 for shape in shapes]
    return sum(count for position, count in enumerate(channels) if position in positions) / sum(channels)


def random_feed(model: onnx.ModelProto) -> dict[str, Array]:
    """Return random inputs for a model whose shapes are fixed, by name."""
    return {value.name: _example(value) for value in model.graph.input}


def _example(value: onnx.ValueInfoProto) -> Array:
    kind = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in kind.shape.dim)
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if kind.elem_type in _FLOATS:
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return np.zeros(shape, dtype)
