"""An ONNX file, read with suspicion: its graph, its tensors, and its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, inliner, numpy_helper
from torch import Tensor

from smcp_fx.backends.onnx.importing.interface import DTYPES, Interface, interface_of
from smcp_fx.errors import InputError

#: protobuf reads no longer message.
_LARGEST_FILE = 2**31 - 1
#: Most elements of one tensor, and of all in other files: 8 GiB of float32.
_MOST_ELEMENTS = 2**31
#: Since this opset of ai.onnx, operators have the form that the importer reads.
_OLDEST_OPSET = 7
#: Most nodes that functions may make, and how deep they may call each other.
_MOST_NODES, _DEEPEST = 10**6, 64
_QUANTISED = frozenset(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear ConvInteger MatMulInteger QLinearConv QLinearMatMul "
    "DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulIntegerToFloat QAttention QGemm QLinearAdd MatMulNBits".split()
)
_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class OnnxFile:
    """A file's model, its functions inlined; weights in other files are loaded on demand."""

    path: Path
    model: onnx.ModelProto

    @property
    def graph(self) -> onnx.GraphProto:
        """The main graph."""
        return self.model.graph

    @cached_property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return max(int(entry.version) for entry in self.model.opset_import if entry.domain in _DOMAINS)

    @cached_property
    def interface(self) -> Interface:
        """Names, types and axes of inputs and outputs, and the metadata."""
        return interface_of(self.path, self.model)

    def refused(self, why: str) -> InputError:
        """The error for a file that cannot be used."""
        return InputError(f"{self.path}: {why}")

    def tensor(self, proto: TensorProto) -> Tensor:
        """Return a tensor of the file, half precision widened to float32; `InputError` if it is damaged."""
        kind = DTYPES.get(proto.data_type)
        if kind is None:
            name = (
                TensorProto.DataType.Name(proto.data_type) if proto.data_type in _KINDS else proto.data_type
            )
            raise self.refused(f"tensor {proto.name!r} is of type {name}, which cannot be imported")
        count = math.prod(proto.dims)
        if any(size < 0 for size in proto.dims) or count > _MOST_ELEMENTS:
            raise self.refused(f"tensor {proto.name!r} is said to be of sizes {list(proto.dims)}")
        try:
            array = self._external(proto, count) if proto.external_data else numpy_helper.to_array(proto)
        except (ValueError, TypeError, OSError) as error:
            raise self.refused(f"tensor {proto.name!r} cannot be read: {error}") from error
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)
        elif array.dtype.kind not in "biufc":  # bfloat16
            array = array.astype(np.float32)
        return torch.tensor(array).to(kind)

    def beside(self, proto: TensorProto) -> Path:
        """Return the file beside this one with a tensor's data; `InputError` if it is not there."""
        fields = {entry.key: entry.value for entry in proto.external_data}
        location, folder = str(fields.get("location", "")), self.path.parent.resolve()
        data: Path = folder / location
        if not location or Path(location).is_absolute() or not data.resolve().is_relative_to(folder):
            raise self.refused(
                f"tensor {proto.name!r} is to be read from {location!r}, outside the file's folder: put the data "
                "beside the file, not a link to it"
            )
        if not data.is_file():
            raise self.refused(f"its weights {location!r} are not beside it: both files are needed")
        return data

    def _external(self, proto: TensorProto, count: int) -> np.ndarray[Any, Any]:
        """Read a tensor whose data is in another file."""
        fields, data = {entry.key: entry.value for entry in proto.external_data}, self.beside(proto)
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(proto.data_type))
        offset, length = (
            int(text) if (text := fields.get(key, str(default))).isdecimal() else -1
            for key, default in (("offset", 0), ("length", count * kind.itemsize))
        )
        if offset < 0 or length != count * kind.itemsize or offset + length > data.stat().st_size:
            raise self.refused(
                f"tensor {proto.name!r} of sizes {list(proto.dims)} does not fit {data.name!r} at {offset}: the data "
                "is cut off, or of another file"
            )
        return np.fromfile(data, kind, count, offset=offset).reshape(tuple(proto.dims))


def read_onnx(path: Path | str) -> OnnxFile:
    """Read a file; `InputError` if it is not ONNX, is quantised, or has operators of other domains."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError(
            f"{path} is larger than 2 GiB, which no ONNX file is: weights go into a file beside it"
        )
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception as error:
        raise InputError(f"{path} cannot be read as ONNX: {error}") from error
    file = OnnxFile(path, model)
    if not model.graph.node or not any(entry.domain in _DOMAINS for entry in model.opset_import):
        raise file.refused("it holds no network")
    if model.functions:
        if _inlined(model) > _MOST_NODES:
            raise file.refused(f"its functions call each other, or make more than {_MOST_NODES} nodes")
        try:
            file = OnnxFile(path, inliner.inline_local_functions(model))
        except Exception as error:
            raise file.refused(f"its functions cannot be inlined: {error}") from error
    _check_operators(file)
    beside = [tensor for tensor in _tensors(file.graph) if tensor.external_data]
    for tensor in beside:
        file.beside(tensor)  # checks all: ONNX Runtime also opens those not read here
    if sum(abs(math.prod(tensor.dims)) for tensor in beside) > _MOST_ELEMENTS:
        # They may all name the same bytes.
        raise file.refused(f"its weights have more than {_MOST_ELEMENTS} elements in all")
    if file.opset < _OLDEST_OPSET:
        raise file.refused(f"opset {file.opset} is too old: export it again, in {_OLDEST_OPSET} or later")
    return file


def _check_operators(file: OnnxFile) -> None:
    kinds = {(node.domain, node.op_type) for node in _nodes(file.graph.node)}
    quantised = sorted(kind for _, kind in kinds if kind in _QUANTISED)
    if quantised:
        raise file.refused(
            f"the file is quantised ({', '.join(quantised)}), and integers cannot be pruned: prune the float file "
            "that it was made from, then smcp-compile --precision int8 quantises the smaller one"
        )
    foreign = sorted(f"{kind} of {domain}" for domain, kind in kinds if domain not in _DOMAINS)
    if foreign:
        raise file.refused(
            f"it has operators that are not ONNX's own ({', '.join(foreign[:4])}): export the file without a "
            "runtime's optimisations, in plain ONNX"
        )


def _inlined(model: onnx.ModelProto) -> int:
    """Return the main graph's number of nodes with all functions inlined, or more than are allowed."""
    bodies = {(function.domain, function.name): function.node for function in model.functions}
    counts: dict[tuple[str, str], int] = {}

    def count(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        total = 0
        for node in _nodes(nodes):
            kind = (node.domain, node.op_type)
            if kind in bodies and kind not in counts:
                if depth > _DEEPEST:
                    return _MOST_NODES + 1
                counts[kind] = count(bodies[kind], depth + 1)
            total += counts.get(kind, 1)
        return min(total, _MOST_NODES + 1)

    return count(model.graph.node, 0)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and those of the graphs inside them."""
    for node in nodes:
        yield node
        for inner in _inside(node):
            yield from _nodes(inner.node)


def in_order(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return a graph's nodes, each after the nodes that it reads; in the file's order if there is a cycle.

    ONNX requires that order, but runtimes accept others, and converters to half precision write them.
    """
    nodes = list(graph.node)
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    before = {
        place: {makers[name] for inner in _nodes([node]) for name in inner.input if name in makers}
        for place, node in enumerate(nodes)
    }
    if all(first < place for place, firsts in before.items() for first in firsts):
        return nodes
    try:
        return [nodes[place] for place in TopologicalSorter(before).static_order()]
    except CycleError:
        return nodes


def _inside(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)  # an empty graph if there is none


def _tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Yield all tensors of a graph, of its nodes, and of the graphs in these."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
        for inner in _inside(node):
            yield from _tensors(inner)


_KINDS = frozenset(TensorProto.DataType.values())
