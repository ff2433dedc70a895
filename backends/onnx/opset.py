"""ONNX opset 17, which the exporter does not write: undoes the changes of 18.

    ReduceMean(x, axes)        ->  ReduceMean(x), axes an attribute
    Split(x), num_outputs      ->  Split(x, sizes)
    Pad(x, pads, value, axes)  ->  Pad(x, pads of all axes, value)
    Resize, new attributes     ->  dropped if they hold their defaults

(onnx's own converter refuses Split and Pad; TensorRT 8 reads nothing newer than 17.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from smcp_fx.backends.onnx.clean import constant_tensors, tensor_types
from smcp_fx.errors import BackendError, first_line

FROM, TO = 18, 17


def lower_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model of opset 18 in opset 17; `BackendError` names an operation that 17 lacks."""
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    for node in lowered.graph.node:
        if node.domain in ("", "ai.onnx"):
            _lower_node(node, lowered.graph)
    _drop_unused(lowered.graph)
    for entry in lowered.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = TO
    lowered.ir_version = min(lowered.ir_version, 8)
    try:
        onnx.checker.check_model(lowered, full_check=True)
    except Exception as error:
        raise _refused(first_line(error).rstrip(".")) from error
    return lowered


def _lower_node(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
    rule = _lower_reduction if node.op_type.startswith("Reduce") else _RULES.get(node.op_type)
    if rule is not None:
        rule(node, graph)
        return
    try:
        same = _since(node.op_type, FROM) == _since(node.op_type, TO)
    except onnx.defs.SchemaError as error:
        raise _refused(f"{node.name or node.op_type!r}: the operation {node.op_type} came later") from error
    if not same:
        raise _refused(f"{node.name or node.op_type!r}: {node.op_type} changed in {FROM}")


def _since(operation: str, opset: int) -> int:
    return int(onnx.defs.get_schema(operation, opset).since_version)


def _lower_reduction(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
    if node.op_type == "ReduceSum":  # its axes have been an input since 13
        return
    inputs = [name for name in node.input[1:] if name]
    noop = _attribute(node, "noop_with_empty_axes")
    _drop_attributes(node, "noop_with_empty_axes")
    if inputs:
        axes = _constant(node, graph, inputs[0])
        node.attribute.append(helper.make_attribute("axes", [int(axis) for axis in axes.reshape(-1)]))
        del node.input[1:]
    elif noop:
        node.op_type = "Identity"
        del node.attribute[:]


def _lower_split(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
    parts = _attribute(node, "num_outputs")
    _drop_attributes(node, "num_outputs")
    if parts is None or (len(node.input) > 1 and node.input[1]):
        return
    axis = _attribute(node, "axis") or 0
    source = tensor_types(graph).get(node.input[0])
    size = source.shape.dim[axis].dim_value if source is not None and len(source.shape.dim) else 0
    if not size:
        raise _refused(f"{node.name!r}: Split of an axis of unknown size")
    each = -(-size // parts)  # equal parts; the last may be smaller
    sizes = [min(each, size - each * index) for index in range(parts)]
    node.input.append(_add_constant(graph, f"{node.output[0]}_sizes", sizes))


def _lower_pad(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
    if len(node.input) < 4 or not node.input[3]:
        return
    source = tensor_types(graph).get(node.input[0])
    if source is None or not len(source.shape.dim):
        raise _refused(f"{node.name!r}: Pad of a tensor of unknown rank")
    rank = len(source.shape.dim)
    axes = [int(axis) % rank for axis in _constant(node, graph, node.input[3]).reshape(-1)]
    amounts = _constant(node, graph, node.input[1]).reshape(2, -1)
    pads = np.zeros((2, rank), np.int64)
    pads[:, axes] = amounts
    node.input[1] = _add_constant(graph, f"{node.output[0]}_pads", [int(pad) for pad in pads.reshape(-1)])
    del node.input[3:]


def _lower_resize(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
    policy = next((a.s for a in node.attribute if a.name == "keep_aspect_ratio_policy"), b"stretch")
    if _attribute(node, "antialias") or policy != b"stretch":
        raise _refused(f"{node.name!r}: Resize with antialias, or keeping the aspect ratio")
    if any(a.name == "axes" for a in node.attribute):
        raise _refused(f"{node.name!r}: Resize of some axes")
    _drop_attributes(node, "antialias", "keep_aspect_ratio_policy")


_RULES: dict[str, Callable[[onnx.NodeProto, onnx.GraphProto], None]] = {
    "Split": _lower_split,
    "Pad": _lower_pad,
    "Resize": _lower_resize,
}


def _attribute(node: onnx.NodeProto, name: str) -> int | None:
    return next((int(a.i) for a in node.attribute if a.name == name), None)


def _drop_attributes(node: onnx.NodeProto, *names: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def _constant(
    node: onnx.NodeProto, graph: onnx.GraphProto, name: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    tensor = constant_tensors(graph).get(name)
    if tensor is None:
        raise _refused(f"{node.name!r}: {node.op_type} with computed axes or sizes")
    return np.asarray(numpy_helper.to_array(tensor), dtype=np.int64)


def _add_constant(graph: onnx.GraphProto, name: str, values: list[int]) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
    return name


def _drop_unused(graph: onnx.GraphProto) -> None:
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for tensor in [t for t in graph.initializer if t.name not in used]:
        graph.initializer.remove(tensor)
    for node in [n for n in graph.node if n.op_type == "Constant" and not used & set(n.output)]:
        graph.node.remove(node)


def _refused(why: str) -> BackendError:
    return BackendError(f"the network cannot be written in ONNX opset {TO}: {why}")
