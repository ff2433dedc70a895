"""From the nodes of a file to a graph of torch.nn modules."""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import Tensor, fx

from smcp_fx.backends.onnx.importing.building import Builder, SizesError, identifier
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.detection import DETECTION
from smcp_fx.backends.onnx.importing.elementwise import ELEMENTWISE, Rule
from smcp_fx.backends.onnx.importing.file import OnnxFile, in_order
from smcp_fx.backends.onnx.importing.interface import Shapes
from smcp_fx.backends.onnx.importing.layers import LAYERS
from smcp_fx.backends.onnx.importing.movement import MOVEMENT
from smcp_fx.backends.onnx.importing.recurrent import RECURRENT
from smcp_fx.backends.onnx.importing.reductions import REDUCTIONS
from smcp_fx.backends.onnx.importing.resizing import RESIZING
from smcp_fx.backends.onnx.importing.size_arithmetic import rule_of_sizes
from smcp_fx.backends.onnx.importing.sizes import SizeArray
from smcp_fx.errors import InputError, SmcpError

_RULES: dict[str, Rule] = {
    **ELEMENTWISE, **MOVEMENT, **REDUCTIONS, **LAYERS, **RECURRENT, **RESIZING, **DETECTION,
    "SequenceConstruct": lambda b, call: [list(call.inputs)],
    "SequenceAt": lambda b, call: call.inputs[0][int(call.constant(1))],
    "ConcatFromSequence": lambda b, call: b.call(torch.cat, list(call.inputs[0]), call.attribute("axis")),
}  # fmt: skip
#: Operators whose first input is sizes, not a tensor.
_OF_SIZES = ("ConstantOfShape", "Range", "Where", *ELEMENTWISE)
#: The key of a node's metadata for the name of the file's value that it computes.
VALUE = "onnx"


def build_network(
    file: OnnxFile, shapes: tuple[Shapes, Shapes], opened: bool = False
) -> tuple[Builder, list[Any]]:
    """Return the graph of a file, and its outputs' values, for examples of these shapes.

    ``opened``: the examples have several samples, and the file takes one.

    `SizesError` if the network does not accept these sizes, `InputError` if it cannot be imported.
    """
    builder = Builder(file, shapes, opened)
    _run(builder, file.graph)
    return builder, [_value(builder, port.name, "the network's outputs") for port in file.interface.outputs]


def finished(builder: Builder, outputs: list[Any]) -> fx.GraphModule:
    """Complete a graph with its outputs, and return its module."""
    nodes = [builder.placed(value) if isinstance(value, Tensor) else value for value in outputs]
    if any(not isinstance(value, fx.Node) for value in nodes):
        raise builder.file.refused("an output is a shape, not a tensor")
    builder.graph.output(nodes[0] if len(nodes) == 1 else tuple(nodes))
    module = fx.GraphModule(builder.root, builder.graph, identifier(builder.file.path.stem))
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    module.graph.lint()
    module.eval()
    return module


def _run(b: Builder, graph: onnx.GraphProto) -> None:
    """Go through a graph's nodes, each after those that it reads."""
    for tensor in graph.initializer:
        b.values[tensor.name] = b.name(b.file.tensor(tensor), tensor.name)
    if graph.sparse_initializer:
        raise b.file.refused("it has sparse tensors: export it with dense ones")
    for node in in_order(graph):
        inputs = [_value(b, name, f"node {node.name!r} ({node.op_type})") for name in node.input]
        results = _results(b, node, inputs)
        for name, value in zip(node.output, results, strict=False):
            if name in b.values and name:
                raise b.file.refused(f"value {name!r} is made twice")
            b.values[name] = value
            if isinstance(value, fx.Node):
                value.meta.setdefault(VALUE, name)


def _value(b: Builder, name: str, reader: str) -> Any:
    if name not in b.values:
        raise b.file.refused(
            f"{reader} reads {name!r}, which nothing before it makes: a weight that is missing, or a cycle"
        )
    return b.values[name]


def _results(b: Builder, node: onnx.NodeProto, inputs: list[Any]) -> list[Any]:
    call = Call(b.file, node, inputs, b.rank(inputs[0]) if inputs else None)
    if node.op_type == "If":
        return _chosen(b, call)
    rule = _RULES.get(node.op_type)
    if rule is None:
        raise call.refused("this operator cannot be imported. Export a file that does without it")
    sizes = any(isinstance(value, SizeArray) for value in inputs)
    if sizes and all(isinstance(value, (SizeArray, Tensor, type(None))) for value in inputs):
        rule = rule_of_sizes(node.op_type, rule)
    elif inputs and isinstance(inputs[0], SizeArray) and node.op_type not in _OF_SIZES:
        inputs[0] = b.tensor(inputs[0])
    try:
        result = rule(b, call)
    except SizesError as error:
        raise SizesError(f"{b.file.path}: node {call.name!r} ({call.kind}): {error}") from error
    except InputError as error:
        message = str(error)
        raise error if message.startswith(str(b.file.path)) else call.refused(message) from error
    except SmcpError:
        raise
    except Exception as error:  # a damaged file's node fits no rule
        raise call.refused(
            f"its inputs and attributes do not fit: {type(error).__name__}: {error}"
        ) from error
    return result if isinstance(result, list) else [result]


def _chosen(b: Builder, call: Call) -> list[Any]:
    """Run the branch of an If whose condition is constant, and return its outputs."""
    condition = call.inputs[0]
    if not isinstance(condition, Tensor):
        raise call.refused(
            "which branch is taken follows from data or open sizes: export the network without it"
        )
    branch = call.attributes["then_branch" if bool(condition) else "else_branch"]
    _run(b, branch)
    return [_value(b, output.name, call.name) for output in branch.output]
