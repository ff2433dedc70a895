"""Casts a float32 ONNX model to float16 or bfloat16: weights, inputs, outputs and everything between.

Strongly typed runtimes compute in the types of the file.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from smcp_fx.errors import InputError

_TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
#: Inputs that stay float32 whatever the data is, by operation.
_FLOAT_INPUTS = {"Resize": (1, 2), "Upsample": (1,), "Range": (0, 1, 2)}


def cast_model(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    """Return a copy of ``model`` in "fp16" or "bf16", or itself for "fp32"; integers keep their type."""
    if precision == "fp32":
        return model
    if precision not in _TYPES:
        raise InputError(f"precision {precision!r}: fp32, {' or '.join(_TYPES)} can be written")
    kind = _TYPES[precision]
    cast = onnx.ModelProto()
    cast.CopyFrom(model)
    graph = cast.graph
    kept = {
        node.input[position]
        for node in graph.node
        for position in _FLOAT_INPUTS.get(node.op_type, ())
        if position < len(node.input)
    }
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _cast_tensor(tensor, kind)
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in kept:
            value.type.tensor_type.elem_type = kind
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = kind
            elif attribute.type == onnx.AttributeProto.TENSOR and not set(node.output) & kept:
                _cast_tensor(attribute.t, kind)
    return cast


def _cast_tensor(tensor: onnx.TensorProto, kind: int) -> None:
    if tensor.data_type != TensorProto.FLOAT:
        return
    values = np.ascontiguousarray(numpy_helper.to_array(tensor), np.float32)
    if kind == TensorProto.FLOAT16:
        raw = np.clip(values, -65504, 65504).astype(np.float16)
    else:  # bfloat16 is the upper half of a float32, rounded to even
        bits = values.view(np.uint32)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    name, dims = tensor.name, list(tensor.dims)
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.raw_data = name, kind, raw.tobytes()
    tensor.dims.extend(dims)
