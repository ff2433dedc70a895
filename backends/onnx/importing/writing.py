"""A pruned file as its users know it: the names, axes and metadata of the file that it comes from."""

from __future__ import annotations

from pathlib import Path

import onnx

from smcp_fx.backends.onnx.export import write_model
from smcp_fx.backends.onnx.importing.interface import Interface
from smcp_fx.backends.onnx.naming import name_values


def take_over(path: Path, interface: Interface) -> tuple[str, ...]:
    """Give an exported file the interface's names and metadata; return the open axes that it has no more.

    The file's own entries of metadata stay beside them.
    """
    model = onnx.load(path)
    name_values(model, [port.name for port in interface.inputs], [port.name for port in interface.outputs])
    own = {entry.key for entry in model.metadata_props}
    for key, value in interface.metadata.items():
        if key not in own:
            model.metadata_props.add(key=key, value=value)
    closed = []
    for port, value in zip(interface.inputs, model.graph.input, strict=True):
        for axis, name in port.open_axes.items():
            dim = value.type.tensor_type.shape.dim[axis]
            if dim.HasField("dim_param"):
                dim.dim_param = name
            else:
                closed.append(f"axis {axis} of {port.name}")
    write_model(model, path)
    return tuple(closed)
