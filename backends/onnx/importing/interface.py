"""An ONNX file's inputs and outputs: their names and open axes, and example inputs of two sizes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from smcp_fx.errors import InputError

#: PyTorch's type for each of ONNX's; half precision is computed in float32, and unsigned integers in int64.
DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float32,
    TensorProto.BFLOAT16: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT16: torch.int16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.int64,
    TensorProto.UINT32: torch.int64,
    TensorProto.UINT64: torch.int64,
    TensorProto.BOOL: torch.bool,
}
#: Pairs of sizes to try for open axes other than the batch; later pairs keep an image's height the same.
#: Sizes differ by more than a network's stride, so that the sizes that follow from them differ, too.
_PAIRS = ((64, 160), (224, 480), (32, 96), (640, 960))
_HEIGHTS = (48, 32, 64, 80, 224)
_BATCHES = (2, 3)
#: Most combinations of open axes that are tried: all of four axes.
_MOST_CHOICES = 15

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Port:
    """An input or output: its name, element type in the file, and sizes (numbers, or names if open)."""

    name: str
    kind: int
    sizes: tuple[int | str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Its type in PyTorch."""
        return DTYPES[self.kind]

    @property
    def open_axes(self) -> dict[int, str]:
        """The names of the open axes, by axis."""
        return {axis: size for axis, size in enumerate(self.sizes) if isinstance(size, str)}

    def _batch(self) -> int:
        return _BATCHES[0] if 0 in self.open_axes else int(self.sizes[0])

    def shape_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape with sizes as for `Interface.shapes_of`; `InputError` if the file has others."""
        rest = [axis for axis in self.open_axes if axis]
        shape: tuple[int, ...] = tuple(sizes)
        if len(sizes) == len(self.sizes) - 1:
            shape = (self._batch(), *sizes)
        elif rest and len(sizes) < len(self.sizes) and len(sizes) in (1, len(rest)):
            filled = dict(zip(rest, itertools.cycle(sizes), strict=False)) | {0: self._batch()}
            shape = tuple(filled[a] if a in filled else int(size) for a, size in enumerate(self.sizes))
        fits = len(shape) == len(self.sizes) and all(
            size > 0 and (isinstance(own, str) or own == size)
            for own, size in zip(self.sizes, shape, strict=True)
        )
        if not fits:
            raise InputError(
                f"sizes {'x'.join(map(str, sizes))} do not fit input {self.name!r}, in the file {list(self.sizes)}"
            )
        return shape


@dataclass(frozen=True)
class Interface:
    """The inputs, outputs and metadata of a file; ``half``: there are values in half precision."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: Mapping[str, str]
    half: bool = False

    def pairs_of_shapes(self) -> Iterator[tuple[Shapes, Shapes]]:
        """Yield shapes of all inputs at two sizes, the likeliest first; one pair if nothing is open."""
        for heights, widths in _open_sizes():
            shapes: list[Shapes] = []
            for which in (0, 1):
                by_name: dict[str, int] = {}
                sizes = []
                for port in self.inputs:
                    for axis, name in port.open_axes.items():
                        by_name.setdefault(name, _size(port, axis, which, heights, widths))
                    sizes.append(tuple(by_name[s] if isinstance(s, str) else s for s in port.sizes))
                shapes.append(tuple(sizes))
            yield shapes[0], shapes[1]
            if shapes[0] == shapes[1]:
                return

    def opened(self) -> Interface | None:
        """Return the interface with an open batch if the file fixes the batch to one sample; else None."""
        if any(not port.sizes or port.sizes[0] != 1 for port in self.inputs):
            return None
        inputs = tuple(replace(port, sizes=("batch", *port.sizes[1:])) for port in self.inputs)
        return replace(self, inputs=inputs)

    def open_choices(self) -> Iterator[frozenset[str]]:
        """Yield sets of axes to leave open: all, then smaller combinations up to a limit; at last none."""
        names = list(dict.fromkeys(name for port in self.inputs for name in port.open_axes.values()))
        fewer = (some for count in range(len(names), 0, -1) for some in itertools.combinations(names, count))
        batch = tuple(dict.fromkeys(port.open_axes[0] for port in self.inputs if 0 in port.open_axes))
        yield from dict.fromkeys(map(frozenset, (*itertools.islice(fewer, _MOST_CHOICES), batch, ())))

    def pairs_from(self, shapes: Shapes) -> Iterator[tuple[Shapes, Shapes]]:
        """Yield these shapes with others, whose open axes are doubled or halved, for all `open_choices`."""
        for names, halves in itertools.product(self.open_choices(), (False, True)):
            other = [
                tuple(
                    s if port.open_axes.get(a) not in names else s // 2 if halves and a and s > 1 else 2 * s
                    for a, s in enumerate(shape)
                )
                for port, shape in zip(self.inputs, shapes, strict=True)
            ]
            yield shapes, tuple(other)

    def shapes_of(self, text: str) -> Shapes:
        """Return the shapes of all inputs that a text gives, one input after the other, separated by commas.

        "3x48x320" leaves the batch out, "320" gives all other open axes, "48x320" gives them in order. Raises
        `InputError` for sizes that do not fit the file.
        """
        parts = text.replace(" ", "").lower().split(",")
        ports = ", ".join(f"{port.name} {list(port.sizes)}" for port in self.inputs)
        if len(parts) != len(self.inputs) or not all(re.fullmatch(r"\d+(x\d+)*", part) for part in parts):
            raise InputError(
                f"sizes {text!r}: give those of {ports} without the batch, as 3x48x320; of several inputs with commas"
            )
        return tuple(
            port.shape_of([int(size) for size in part.split("x")])
            for port, part in zip(self.inputs, parts, strict=True)
        )

    def random_inputs(self, shapes: Shapes, seed: int = 0) -> tuple[Tensor, ...]:
        """Return inputs of these shapes: normally distributed; integers are zeros and ones."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(shape, generator=generator).to(port.dtype)
            if port.dtype.is_floating_point
            else torch.randint(0, 2, shape, generator=generator).to(port.dtype)
            for port, shape in zip(self.inputs, shapes, strict=True)
        )


def _open_sizes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    yield from ((pair, pair) for pair in _PAIRS)
    yield from (((height, height), pair) for height in _HEIGHTS for pair in (_PAIRS[0], _PAIRS[1]))


def _size(port: Port, axis: int, which: int, heights: tuple[int, int], widths: tuple[int, int]) -> int:
    if axis == 0 and len(port.sizes) > 1:
        return _BATCHES[which]
    is_height = axis == len(port.sizes) - 2 and len(port.sizes) >= 4
    return (heights if is_height else widths)[which]


def interface_of(path: Path, model: onnx.ModelProto) -> Interface:
    """Return the file's interface; `InputError` for inputs that are no tensors of known types."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_port(path, v) for v in model.graph.input if v.name not in weights)
    outputs = tuple(_port(path, v) for v in model.graph.output)
    if not inputs or not outputs:
        raise InputError(f"{path}: the network has no {'outputs' if inputs else 'inputs'}")
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    kinds |= {port.kind for port in (*inputs, *outputs)}
    half = bool(kinds & {TensorProto.FLOAT16, TensorProto.BFLOAT16})
    metadata = {str(entry.key): str(entry.value) for entry in model.metadata_props}
    return Interface(inputs, outputs, metadata, half)


def _port(path: Path, value: onnx.ValueInfoProto) -> Port:
    kind = value.type.tensor_type
    if kind.elem_type not in DTYPES:
        raise InputError(f"{path}: input or output {value.name!r} is no tensor of numbers")
    sizes: list[int | str] = []
    if not all(isinstance(name, str) for name in (value.name, *(dim.dim_param for dim in kind.shape.dim))):
        raise InputError(
            f"{path}: {value.name!r}, an input or output, or one of its axes has a name that is no text"
        )
    for axis, dim in enumerate(kind.shape.dim):
        named = dim.dim_param if dim.dim_param not in ("", "?", "-1", "None") else f"{value.name}_{axis}"
        sizes.append(dim.dim_value if dim.dim_value > 0 else named)
    return Port(value.name, kind.elem_type, tuple(sizes))
