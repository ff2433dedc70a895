"""The names that users of an ONNX file see: those of inputs and outputs, and of open axes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence

import onnx
import torch

from smcp_fx.errors import InputError

#: The names that the exporter gives to values, without checking whether a weight has the same name.
_GENERATED = re.compile(r"val_\d+")


def rename_weights(program: torch.export.ExportedProgram) -> None:
    """Rename weights that are named as the exporter names values, such as those of files it wrote."""
    for spec in program.graph_signature.input_specs:
        if spec.target is not None and _GENERATED.fullmatch(spec.target):
            new = free_name(spec.target, program.state_dict | program.constants)
            for held in (program.state_dict, program.constants):
                if spec.target in held:
                    held[new] = held.pop(spec.target)
            spec.target = new


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name, or a similar one that is not taken."""
    while name in taken:
        name += "_"
    return name


def name_values(proto: onnx.ModelProto, inputs: Sequence[str] | None, outputs: Sequence[str] | None) -> None:
    """Give inputs and outputs these names, in their order (None: unchanged); `InputError` if they do not fit.

    Other values with one of these names are renamed.
    """
    graph = proto.graph
    new: dict[str, str] = {}
    for kind, values, names in (("input", graph.input, inputs), ("output", graph.output, outputs)):
        if names is None:
            continue
        if isinstance(names, str) or len(names) != len(values) or not all(names):
            present = ", ".join(value.name for value in values)
            raise InputError(f"{kind}_names must be {len(values)} names, for {present}; not {names!r}")
        new |= {value.name: str(name) for value, name in zip(values, names, strict=True)}
    chosen = set(new.values())
    if len(chosen) < len(new):
        raise InputError(
            f"names of inputs and outputs must be unique in the file; {list(new.values())} are not"
        )
    parts = list(_graphs(graph))
    taken = {name for part in parts for node in part.node for name in (*node.input, *node.output)}
    taken |= {tensor.name for part in parts for tensor in part.initializer}
    for name in (chosen & taken) - new.keys():
        new[name] = free_name(name, taken | chosen)
    for part in parts:
        for node in part.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
        for value in (*part.input, *part.output, *part.value_info, *part.initializer):
            value.name = new.get(value.name, value.name)


def name_axes(proto: onnx.ModelProto, axes: Sequence[Mapping[int, str]]) -> None:
    """Call the open axes of the inputs by these names, instead of the exporter's own symbols."""
    names: dict[str, str] = {}
    for value, own in zip(proto.graph.input, axes, strict=True):
        dims = value.type.tensor_type.shape.dim
        names |= {dims[axis].dim_param: name for axis, name in own.items() if dims[axis].dim_param}
    if not names:
        return
    symbols = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for part in _graphs(proto.graph):
        for value in (*part.input, *part.output, *part.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = symbols.sub(lambda found: names[found[1]], dim.dim_param)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)
