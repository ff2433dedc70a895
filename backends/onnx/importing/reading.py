"""`from_onnx`: a file as a plain PyTorch network, compared in ONNX Runtime before it is returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from smcp_fx.backends.onnx.importing.building import Builder, SizesError
from smcp_fx.backends.onnx.importing.comparing import compare
from smcp_fx.backends.onnx.importing.file import OnnxFile, read_onnx
from smcp_fx.backends.onnx.importing.interface import Interface, Shapes
from smcp_fx.backends.onnx.importing.network import build_network, finished
from smcp_fx.backends.onnx.importing.patterns import recognise
from smcp_fx.errors import InputError

#: The key of a module's `meta` under which its file's `Interface` is.
INTERFACE = "onnx"


def from_onnx(
    path: Path | str, example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None
) -> fx.GraphModule:
    """Return an ONNX file as a graph module of torch.nn modules; as `smcp_fx.from_onnx`."""
    file = read_onnx(path)
    shapes, (builder, outputs) = _built(file, example_inputs)
    recognise(builder, outputs)
    module = finished(builder, outputs)
    runs = tuple(dict.fromkeys(shapes))
    inputs = [file.interface.random_inputs(given, seed) for seed, given in enumerate(runs)]
    if example_inputs is not None:
        inputs[0] = _as_tuple(file.interface, example_inputs)
    compare(file, module, inputs)
    module.meta[INTERFACE] = file.interface
    module.example_input_array = inputs[0]
    return module


def _built(file: OnnxFile, given: Any) -> tuple[tuple[Shapes, Shapes], tuple[Builder, list[Any]]]:
    """Build the network at the first pair of sizes that it takes."""
    first: SizesError | None = None
    for shapes in _pairs(file.interface, given):
        try:
            return shapes, build_network(file, shapes)
        except SizesError as error:
            first = first or error
    cure = (
        "No size that was tried for its open axes fits: give from_onnx example_inputs"
        if given is None
        else "The example inputs do not fit the network"
    )
    raise InputError(f"{first}. {cure}.")


def _pairs(interface: Interface, given: Any) -> Iterator[tuple[Shapes, Shapes]]:
    if given is None:
        yield from interface.pairs_of_shapes()
        return
    inputs = _as_tuple(interface, given)
    shapes = tuple(tuple(tensor.shape) for tensor in inputs)
    yield from interface.pairs_from(shapes)


def _as_tuple(interface: Interface, given: Any) -> tuple[Tensor, ...]:
    names = [port.name for port in interface.inputs]
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise InputError(f"example_inputs must be of {', '.join(names)}, not {', '.join(map(str, given))}")
        given = [given[name] for name in names]
    inputs = (given,) if isinstance(given, Tensor) else tuple(given)
    if len(inputs) != len(names) or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise InputError(f"example_inputs must be {len(names)} tensors, for {', '.join(names)}")
    for port, tensor in zip(interface.inputs, inputs, strict=True):
        fits = len(port.sizes) in (0, tensor.dim()) and all(
            isinstance(size, str) or size == own for size, own in zip(port.sizes, tensor.shape, strict=False)
        )
        if not fits:
            raise InputError(
                f"example_inputs: {port.name!r} is of sizes {list(port.sizes)} in the file, and the tensor given of "
                f"{list(tensor.shape)}"
            )
    return tuple(tensor.to(port.dtype) for port, tensor in zip(interface.inputs, inputs, strict=True))
