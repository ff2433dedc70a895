"""`from_onnx`: a file as a plain PyTorch network, compared with ONNX Runtime before it is returned."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.backends.onnx.importing.building import SizesError
from smcp_fx.backends.onnx.importing.comparing import compare, opens_the_batch
from smcp_fx.backends.onnx.importing.file import OnnxFile, read_onnx
from smcp_fx.backends.onnx.importing.interface import Interface, Shapes
from smcp_fx.backends.onnx.importing.network import build_network, finished
from smcp_fx.backends.onnx.importing.patterns import recognise
from smcp_fx.errors import InputError

#: The key of a module's `meta` for its file's `Interface`.
INTERFACE = "onnx"

Examples = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None


def from_onnx(path: Path | str, example_inputs: Examples = None) -> fx.GraphModule:
    """Return an ONNX file as a graph module of torch.nn modules; see `smcp_fx.from_onnx`."""
    file = read_onnx(path)
    return imported(file, None if example_inputs is None else _as_tuple(file.interface, example_inputs))


def imported(file: OnnxFile, given: tuple[Tensor, ...] | None = None) -> fx.GraphModule:
    """Return a file's network, compared with ONNX Runtime; ``given``: example inputs."""
    module, shapes = _built(file, given)
    inputs = [file.interface.random_inputs(sizes, seed) for seed, sizes in enumerate(dict.fromkeys(shapes))]
    if given is not None:
        inputs[0] = given
    compare(file, module, inputs)
    example = inputs[0]
    if larger := _with_open_batch(file, example):
        module, example = larger, tuple(torch.cat([tensor, tensor]) for tensor in example)
    module.meta[INTERFACE] = file.interface
    module.__dict__["example_input_array"] = example
    return module


def _built(file: OnnxFile, given: tuple[Tensor, ...] | None) -> tuple[fx.GraphModule, tuple[Shapes, Shapes]]:
    """Build the network at the first pair of sizes that it takes."""
    first: SizesError | None = None
    own = None if given is None else tuple(tuple(tensor.shape) for tensor in given)
    for shapes in file.interface.pairs_of_shapes() if own is None else file.interface.pairs_from(own):
        try:
            return _network(file, shapes), shapes
        except SizesError as error:
            first = first or error
    cure = (
        "No size that was tried for its open axes fits: give from_onnx example_inputs"
        if given is None
        else "The example inputs do not fit the network"
    )
    raise InputError(f"{first}. {cure}.")


def _network(file: OnnxFile, shapes: tuple[Shapes, Shapes], opened: bool = False) -> fx.GraphModule:
    builder, outputs = build_network(file, shapes, opened)
    recognise(builder, outputs)
    return finished(builder, outputs)


def _with_open_batch(file: OnnxFile, given: tuple[Tensor, ...]) -> fx.GraphModule | None:
    """Return a one-sample file's network for several samples, if it computes the same for each sample."""
    opened = file.interface.opened()
    if opened is None:
        return None
    shapes = tuple(tuple((batch, *tensor.shape[1:]) for tensor in given) for batch in (2, 3))
    with contextlib.suppress(InputError):
        module = _network(file, (shapes[0], shapes[1]), True)
        compare(file, module, [given])
        if opens_the_batch(file, module, opened.random_inputs(shapes[0])):
            return module
    return None


def _as_tuple(interface: Interface, given: Any) -> tuple[Tensor, ...]:
    """Return example inputs in the file's order and types; `InputError` if they do not fit."""
    names = [port.name for port in interface.inputs]
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise InputError(
                f"example_inputs must be of {', '.join(names)}, not {', '.join(map(str, given))}"
            )
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
