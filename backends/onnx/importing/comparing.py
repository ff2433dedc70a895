"""Compares the module with the file in ONNX Runtime; an error names the first node that differs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, fx

from smcp_fx.backends.base import Array, to_arrays
from smcp_fx.backends.checking import ROUNDED, TOLERANCES, flatten_outputs, largest_difference, rounding
from smcp_fx.backends.onnx.importing.file import OnnxFile
from smcp_fx.backends.onnx.importing.network import VALUE
from smcp_fx.backends.onnxruntime.session import create_session, run_session, session_options
from smcp_fx.errors import BackendError, InputError

#: The number of intermediate values per run in the search for the first that differs.
_AT_A_TIME = 64
#: ONNX Runtime's option for the folder of weights beside the file, if it gets the model as bytes.
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"


def compare(file: OnnxFile, module: fx.GraphModule, inputs: Sequence[tuple[Tensor, ...]]) -> None:
    """Raise `BackendError` if the file in ONNX Runtime and the module compute different outputs."""
    session = create_session(file.path, session_options(exact=True))
    for example in inputs:
        actual = run_session(session, _feed(file, example))
        expected = _run(module, example)
        if any(map(_differs, repeat(file), actual, expected)) and any(
            map(_differs, repeat(file), actual, expected, rounding(module, example, expected, _run))
        ):
            raise BackendError(_told(file, module, example, actual, expected))


def opens_the_batch(file: OnnxFile, module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> bool:
    """Does the module compute for each of several samples the same as ONNX Runtime for that one alone?"""
    session = create_session(file.path, session_options(exact=True))
    rows = [tuple(tensor[i : i + 1] for tensor in inputs) for i in range(inputs[0].shape[0])]
    alone = [run_session(session, _feed(file, row)) for row in rows]
    try:
        together = _run(module, inputs)
    except InputError:
        return False
    return all(
        all(a.ndim and a.shape[0] == 1 for a in some) and not _differs(file, np.concatenate(some), b)
        for some, b in zip(zip(*alone, strict=True), together, strict=True)
    )


def _run(module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> list[Array]:
    try:
        with torch.no_grad():
            # Not by the module's own call, which prints the code that fails.
            return to_arrays(flatten_outputs(fx.Interpreter(module).run(*inputs)))
    except Exception as error:
        shapes = [tuple(tensor.shape) for tensor in inputs]
        raise InputError(f"the imported network fails on inputs of shapes {shapes}: {error}") from error


def _feed(file: OnnxFile, inputs: tuple[Tensor, ...]) -> dict[str, Array]:
    return {
        port.name: tensor.numpy().astype(onnx.helper.tensor_dtype_to_np_dtype(port.kind))
        for port, tensor in zip(file.interface.inputs, inputs, strict=True)
    }


def _differs(file: OnnxFile, actual: Array, expected: Array, limit: float = 0.0) -> bool:
    if actual.shape != expected.shape:
        return True
    kind = "float16" if file.interface.half else str(expected.dtype)
    allowed = max(TOLERANCES.get(kind, 0.0), limit)
    relative, absolute, *_ = largest_difference(actual, expected)
    return not (relative <= allowed or absolute <= ROUNDED.get(kind, 0.0))


def _told(
    file: OnnxFile,
    module: fx.GraphModule,
    inputs: tuple[Tensor, ...],
    actual: list[Array],
    expected: list[Array],
) -> str:
    """Return a message that names the output and the first node that differ."""
    names = [port.name for port in file.interface.outputs]
    name, a, b = next(
        (name, a, b) for name, a, b in zip(names, actual, expected, strict=True) if _differs(file, a, b)
    )
    how = (
        f"by {largest_difference(a, b)[0]:.3g} of its scale"
        if a.shape == b.shape
        else f"in its sizes: {a.shape} in ONNX Runtime, {b.shape} here"
    )
    first = _first_difference(file, module, inputs)
    where = f"The first node that differs is {first}" if first else "No node before it differs"
    return f"{file.path}: output {name!r} of the imported network differs {how}. {where}."


def _first_difference(file: OnnxFile, module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str:
    """Compare all intermediate values, some at a time, and return the first node whose value differs."""
    here = _Recorder(module)
    with torch.no_grad():
        here.run(*inputs)
    makers = {name: node for node in file.graph.node for name in node.output}
    names = [name for name in makers if name in here.values]
    for start in range(0, len(names), _AT_A_TIME):
        some = names[start : start + _AT_A_TIME]
        for name, value in zip(some, _values(file, some, inputs), strict=True):
            if _differs(file, np.asarray(value), np.asarray(here.values[name])):
                return f"{makers[name].name or name!r} ({makers[name].op_type})"
    return ""


class _Recorder(fx.Interpreter):
    """Keeps the tensors that are values of the file."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if VALUE in n.meta and isinstance(result, Tensor):
            self.values[n.meta[VALUE]] = result.numpy().copy()
        return result


def _values(file: OnnxFile, names: list[str], inputs: tuple[Tensor, ...]) -> list[Array]:
    """Return these values as ONNX Runtime computes them."""
    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = session_options(exact=True)
    options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(file.path.resolve().parent))
    session = create_session(model.SerializeToString(), options)
    return run_session(session, _feed(file, inputs))
