"""Writes files like the one that a run began with: with its names, types, open axes and metadata."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from smcp_fx.backends.checking import eval_mode
from smcp_fx.backends.onnx.axes import Axes
from smcp_fx.backends.onnx.export import in_precision, write_checked, write_model
from smcp_fx.backends.onnx.importing.interface import Interface
from smcp_fx.backends.onnx.naming import name_values
from smcp_fx.errors import BackendError


class Writer:
    """Writes networks like the file of an ``interface``.

    ``closed``: the file's open axes that are fixed in the written files, as the network cannot be written
    with them open. The first file written decides.
    """

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self.closed: tuple[str, ...] = ()
        self._axes: Axes | None = None

    def write(
        self, module: nn.Module, inputs: tuple[Tensor, ...], path: Path, opset: int | None, half: bool = True
    ) -> Path:
        """Write and check a file; ``half``: in half precision if the file is. Raises `BackendError`."""
        if half and self.interface.half and _runs_in_half(module, inputs):
            module, inputs = in_precision(module, inputs, "fp16")
        every = self._choices() if self._axes is None else [self._axes]
        for axes in every:
            try:
                write_checked(module, inputs, path, axes, opset, self.name)
            except BackendError:
                if axes is every[-1]:
                    raise
                continue
            self._axes = axes
            self.closed = tuple(
                f"axis {axis} of {port.name}"
                for port, own in zip(self.interface.inputs, axes, strict=True)
                for axis in port.open_axes
                if axis not in own
            )
            break
        self._cast(path)
        return path

    def name(self, proto: onnx.ModelProto) -> None:
        """Give a model the file's names of inputs and outputs, and its metadata."""
        interface = self.interface
        name_values(proto, [p.name for p in interface.inputs], [p.name for p in interface.outputs])
        for key, value in {"producer": "smcp_fx", **interface.metadata}.items():
            proto.metadata_props.add(key=key, value=value)

    def _choices(self) -> list[Axes]:
        """Return the sets of axes that may stay open, the largest first."""
        ports = self.interface.inputs
        return [
            tuple({a: name for a, name in port.open_axes.items() if name in names} for port in ports)
            for names in self.interface.open_choices()
        ]

    def _cast(self, path: Path) -> None:
        """Give inputs and outputs the file's types, by casts."""
        model = onnx.load(path)
        graph, changed = model.graph, False
        pairs = (*zip(self.interface.inputs, graph.input, strict=True),
                 *zip(self.interface.outputs, graph.output, strict=True))  # fmt: skip
        for place, (port, value) in enumerate(pairs):
            kind = value.type.tensor_type.elem_type
            if kind == port.kind:
                continue
            changed, inner = True, f"{port.name}_as_computed"
            for node in graph.node:
                node.input[:] = [inner if name == port.name else name for name in node.input]
                node.output[:] = [inner if name == port.name else name for name in node.output]
            value.type.tensor_type.elem_type = port.kind
            if place < len(graph.input):
                graph.node.insert(0, onnx.helper.make_node("Cast", [port.name], [inner], to=kind))
            else:
                graph.node.append(onnx.helper.make_node("Cast", [inner], [port.name], to=port.kind))
        if changed:
            write_model(model, path)


def _runs_in_half(module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Does PyTorch run all of the network's operations in half precision on a processor?"""
    halved, given = in_precision(module, inputs, "fp16")
    try:
        with torch.no_grad(), eval_mode(halved):
            halved(*given)
    except RuntimeError:  # NotImplementedError, too
        return False
    return True
