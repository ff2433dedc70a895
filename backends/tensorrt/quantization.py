"""INT8 files for TensorRT: explicit quantisation, symmetric in activations and weights, biases in float.

Every reader of a quantised tensor or weight has a quantising and a dequantising node of its own. Layers write
float, so that TensorRT fuses the operations behind them. One branch of a sum comes in bytes; the layer that
writes the other adds it. TensorRT's parser refuses zero points other than 0, and integer biases. Source:
NVIDIA's guide, "Explicit Quantization".
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.onnx.context import IMAGE_CHANNELS
from smcp_fx.backends.onnx.scheme import Scheme

_READERS = ("AveragePool", "Conv", "ConvTranspose", "Gemm", "GlobalAveragePool", "MatMul")
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"


def shortcuts(graph: onnx.GraphProto) -> list[str]:
    """Return the tensors that sums take in bytes: of two computed operands, the earlier one."""
    written = {name: place for place, node in enumerate(graph.node) for name in node.output}
    written |= {value.name: -1 for value in graph.input}
    sums = [tuple(node.input) for node in graph.node if node.op_type == "Add"]
    return [min(pair, key=written.__getitem__) for pair in sums if set(pair) <= set(written)]


def separate_pairs(graph: onnx.GraphProto) -> None:
    """Give every reader of a quantised tensor its own quantising and dequantising nodes, in place."""
    quantising = {node.output[0]: node for node in graph.node if node.op_type == _Q}
    pairs = {
        node.output[0]: (quantising[node.input[0]], node)
        for node in graph.node
        if node.op_type == _DQ and node.input[0] in quantising
    }
    nodes, seen = list[onnx.NodeProto](), set[str]()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in seen:
                copies = [onnx.NodeProto() for _ in range(2)]
                for copy, like in zip(copies, pairs[name], strict=True):
                    copy.CopyFrom(like)
                    copy.name, copy.output[0] = (
                        f"{text}_{node.name}_{place}" for text in (like.name, like.output[0])
                    )
                copies[1].input[0] = copies[0].output[0]
                node.input[place] = copies[1].output[0]
                nodes += copies
            elif name in pairs:
                seen.add(name)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


TENSORRT = Scheme(
    "explicit qdq, s8s8, weights per channel",
    True,
    _READERS,
    frozenset({"Add", "Clip", "MaxPool", "Relu"}),
    {
        "ActivationSymmetric": True,
        "WeightSymmetric": True,
        "AddQDQPairToWeight": True,
        "QuantizeBias": False,
        "OpTypesToExcludeOutputQuantization": list(_READERS),
    },
    shortcuts,
    separate_pairs,
)


def block_in_bytes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a block's model in INT8 that reads and writes bytes, as it does inside a network.

    Inputs are bytes if every reader quantises them, results of four axes are if the block has a quantised
    layer. Images come in float.
    """
    from smcp_fx.backends.onnx.quantization import quantised_block

    found = quantised_block(model, TENSORRT)
    graph = found.graph
    if not any(node.op_type == _Q for node in graph.node):
        return found
    for value in graph.input:
        readers = [node for node in graph.node if value.name in node.input]
        image = 0 < value.type.tensor_type.shape.dim[1].dim_value <= IMAGE_CHANNELS
        if readers and not image and all(node.op_type == _Q for node in readers):
            outputs = {node.output[0] for node in readers}
            for node in graph.node:
                if node.op_type == _DQ and node.input[0] in outputs:
                    node.input[0] = value.name
            for node in readers:
                graph.node.remove(node)
            value.type.tensor_type.elem_type = TensorProto.INT8
    scale, zero = "smcp_result_scale", "smcp_result_zero"
    graph.initializer.append(numpy_helper.from_array(np.array(1 / 127, np.float32), scale))
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int8), zero))
    for value in graph.output:
        kind = value.type.tensor_type
        if len(kind.shape.dim) == 4 and kind.elem_type == TensorProto.FLOAT:
            name = f"{value.name}_bytes"
            graph.node.append(helper.make_node(_Q, [value.name, scale, zero], [name], name))
            value.name, kind.elem_type = name, TensorProto.INT8
    return found
