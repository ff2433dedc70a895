"""Names that users of an ONNX file meet: those of inputs and outputs, and of open axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import onnx

from smcp_fx.errors import InputError


def name_values(proto: onnx.ModelProto, inputs: Sequence[str] | None, outputs: Sequence[str] | None) -> None:
    """Give inputs and outputs these names, in their order (None: as they are); `InputError` if they do not fit."""
    graph = proto.graph
    new: dict[str, str] = {}
    for kind, values, names in (("input", graph.input, inputs), ("output", graph.output, outputs)):
        if names is None:
            continue
        if isinstance(names, str) or len(names) != len(values) or not all(names):
            present = ", ".join(value.name for value in values)
            raise InputError(f"{kind}_names must be {len(values)} names, for {present}; not {names!r}")
        new |= {value.name: str(name) for value, name in zip(values, names, strict=True)}
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | {
        t.name for t in graph.initializer
    }
    clashes = sorted(set(new.values()) & (taken - new.keys()))
    if len(set(new.values())) < len(new) or clashes:
        raise InputError(
            f"names of inputs and outputs must be unique in the file; {clashes or list(new.values())} are not"
        )
    for part in _graphs(graph):
        for node in part.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
        for value in (*part.input, *part.output, *part.value_info):
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
    """The graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)
