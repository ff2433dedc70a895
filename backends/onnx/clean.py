"""Removes the exporter's leftovers from an ONNX model.

ReduceMean over the image axes  ->  GlobalAveragePool   (runtimes have a fast kernel for it)
Identity, Cast to the same type, Transpose pairs that cancel  ->  nothing
zeros padded before a pooling that counts padding differently  ->  negative zeros, which runtimes do not fuse
nodes named after the module whose weight they hold; traces of the exporting machine dropped
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def clean_model(model: onnx.ModelProto) -> bool:
    """Clean ``model`` in place and return whether anything changed; a second call changes nothing."""
    changed = False
    steps = (_drop_traces, _pool_globally, _drop_no_ops, _guard_padding, _drop_unused_initializers,
             _name_after_modules)  # fmt: skip
    for step in steps:
        changed = step(model) or changed
    return changed


def _drop_traces(model: onnx.ModelProto) -> bool:
    """Drop stack traces and the like: they name paths of the exporting machine and fill the file."""
    graph, changed = model.graph, False
    for owner in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer, graph):
        if owner.metadata_props:
            del owner.metadata_props[:]
            changed = True
    return changed


def constant_tensors(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the tensors that are constant, by name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            tensors.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return tensors


def tensor_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto.Tensor]:
    """Return the types and shapes that are recorded, by name."""
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: value.type.tensor_type for value in values}


def _pool_globally(model: onnx.ModelProto) -> bool:
    """ReduceMean over axes 2 and 3 of a 4-D tensor, dimensions kept, is GlobalAveragePool."""
    graph = model.graph
    constants, types, changed = constant_tensors(graph), tensor_types(graph), False
    for node in graph.node:
        if node.op_type != "ReduceMean" or len(node.input) != 2 or node.input[1] not in constants:
            continue
        attributes = {a.name: a.i for a in node.attribute}
        source = types.get(node.input[0])
        if source is None or len(source.shape.dim) != 4 or not attributes.get("keepdims", 1):
            continue
        axes = {int(axis) % 4 for axis in numpy_helper.to_array(constants[node.input[1]])}
        if axes == {2, 3}:
            node.op_type = "GlobalAveragePool"
            del node.attribute[:]
            del node.input[1:]
            changed = True
    return changed


def _guard_padding(model: onnx.ModelProto) -> bool:
    """Pad with -0.0 instead of 0 before a pooling whose own padding means something else.

    Max pooling counts zeros that were padded before it but ignores its own padding; so does average pooling that
    excludes its padding. ONNX Runtime (1.31) fuses Pad and pooling all the same, if the constant's bytes are zero.
    """
    graph, changed = model.graph, False
    constants, types = constant_tensors(graph), tensor_types(graph)
    pooled = {node.input[0] for node in graph.node if _ignores_its_padding(node)}
    for node in graph.node:
        mode = next((a.s for a in node.attribute if a.name == "mode"), b"constant")
        if node.op_type != "Pad" or mode != b"constant" or pooled.isdisjoint(node.output):
            continue
        value = node.input[2] if len(node.input) > 2 else ""
        if value:
            zero = numpy_helper.to_array(constants[value]) if value in constants else None
        else:
            info = types.get(node.output[0]) or types.get(node.input[0])
            zero = None if info is None else np.zeros((), helper.tensor_dtype_to_np_dtype(info.elem_type))
        if zero is None or zero.dtype.kind != "f" or any(zero.tobytes()):
            continue
        name = f"{node.output[0]}.zero"
        graph.initializer.append(numpy_helper.from_array(-zero, name))
        node.input[2:3] = [name]
        changed = True
    return changed


def _ignores_its_padding(node: onnx.NodeProto) -> bool:
    counted = any(a.name == "count_include_pad" and a.i for a in node.attribute)
    return node.op_type == "MaxPool" or (node.op_type == "AveragePool" and not counted)


def _drop_no_ops(model: onnx.ModelProto) -> bool:
    """Drop Identity, Cast to the type the input has, and pairs of Transpose that cancel."""
    graph, changed = model.graph, False
    while True:
        producer = {name: node for node in graph.node for name in node.output}
        types = tensor_types(graph)
        for node in graph.node:
            source = _no_op_source(node, producer, types)
            if source is not None and _bypass(graph, node, source):
                changed = True
                break
        else:
            return changed


def _no_op_source(
    node: onnx.NodeProto, producer: dict[str, onnx.NodeProto], types: dict[str, onnx.TypeProto.Tensor]
) -> str | None:
    """Return the value that ``node`` merely passes on; None if it changes it."""
    if node.op_type == "Identity":
        return str(node.input[0])
    if node.op_type == "Cast":
        to = next(a.i for a in node.attribute if a.name == "to")
        source = types.get(node.input[0])
        return str(node.input[0]) if source is not None and source.elem_type == to else None
    if node.op_type == "Transpose":
        order = _order(node)
        if order and order == sorted(order):
            return str(node.input[0])
        before = producer.get(node.input[0])
        if before is not None and before.op_type == "Transpose" and order:
            first = _order(before)
            if first and [first[axis] for axis in order] == list(range(len(order))):
                return str(before.input[0])
    return None


def _order(node: onnx.NodeProto) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == "perm"), [])


def _bypass(graph: onnx.GraphProto, node: onnx.NodeProto, source: str) -> bool:
    """Let all readers of ``node`` read ``source``; return False if the graph's interface forbids it."""
    result = node.output[0]
    if result in {output.name for output in graph.output}:
        users = [n for n in graph.node if source in n.input and n is not node]
        maker = next((n for n in graph.node if source in n.output), None)
        outputs = {output.name for output in graph.output}
        if maker is None or users or source in outputs:
            return False
        maker.output[list(maker.output).index(source)] = result
        _drop_value_info(graph, source)
    else:
        for other in graph.node:
            for position, name in enumerate(other.input):
                if name == result:
                    other.input[position] = source
        _drop_value_info(graph, result)
    graph.node.remove(node)
    used = {name for n in graph.node for name in n.input} | {output.name for output in graph.output}
    for other in [n for n in graph.node if n.op_type == "Transpose" and not used & set(n.output)]:
        graph.node.remove(other)
    return True


def _drop_value_info(graph: onnx.GraphProto, name: str) -> None:
    for value in [v for v in graph.value_info if v.name == name]:
        graph.value_info.remove(value)


def _drop_unused_initializers(model: onnx.ModelProto) -> bool:
    graph = model.graph
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    unused = [tensor for tensor in graph.initializer if tensor.name not in used]
    for tensor in unused:
        graph.initializer.remove(tensor)
    return bool(unused)


def _name_after_modules(model: onnx.ModelProto) -> bool:
    """Name convolutions and linears by their modules' paths, so that profiles read like the network."""
    weights = {tensor.name for tensor in model.graph.initializer}
    taken = {node.name for node in model.graph.node}
    changed = False
    for node in model.graph.node:
        weight = node.input[1] if len(node.input) > 1 else ""
        path = weight.removesuffix(".weight")
        if weight in weights and path != weight and path not in taken:
            node.name = path
            taken.add(path)
            changed = True
    return changed
