"""A chain of small convolutions: the difference between two lengths gives the cost of a node."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.base import Array

#: Channels of its convolutions: one vector.
CHANNELS = 16
#: The prefix of its nodes' names; the shape of its result.
CHAIN = "smcp_reference"
CHAIN_SHAPE = (1, CHANNELS, 2, 3)


def chain_feed() -> dict[str, Array]:
    """Return the chain's input, by name."""
    return {f"{CHAIN}_image": np.zeros((1, 1, *CHAIN_SHAPE[2:]), np.float32)}


def chain(
    length: int,
) -> tuple[list[onnx.NodeProto], list[TensorProto], onnx.ValueInfoProto, onnx.ValueInfoProto]:
    """Return nodes, weights, input and output of a chain of 1x1 convolutions that the runtime fuses with nothing.

    The first reads an image of one channel, which needs no conversion to the runtime's layout. The others
    have a bias, as most convolutions in a network do: the profiler writes down the shapes of all inputs, so
    more inputs take longer.
    """
    node: Callable[..., onnx.NodeProto] = helper.make_node
    first, weight, bias, image = (f"{CHAIN}_{name}" for name in ("first", "weight", "bias", "image"))
    links = [f"{CHAIN}_link{i}" for i in range(length)]
    nodes = [node("Conv", [image, f"{first}_weight"], [first], first)]
    nodes += [node("Conv", [a, weight, bias], [b], b) for a, b in itertools.pairwise([first, *links])]
    eye = np.eye(CHANNELS, dtype=np.float32)
    weights = [
        numpy_helper.from_array(eye[:, :1, None, None], f"{first}_weight"),
        numpy_helper.from_array(eye[:, :, None, None], weight),
        numpy_helper.from_array(eye[0], bias),
    ]
    height, width = CHAIN_SHAPE[2:]
    return (
        nodes,
        weights,
        helper.make_tensor_value_info(image, TensorProto.FLOAT, [1, 1, height, width]),
        helper.make_tensor_value_info(links[-1], TensorProto.FLOAT, list(CHAIN_SHAPE)),
    )


def chain_model(length: int) -> bytes:
    """Return a chain of ``length`` links as a serialised model."""
    nodes, weights, image, result = chain(length)
    graph = helper.make_graph(nodes, "chain", [image], [result], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
