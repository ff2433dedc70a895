"""A node of the file with the values of its inputs, as an operator's rule reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
from torch import Tensor

from smcp_fx.backends.onnx.importing.file import OnnxFile
from smcp_fx.backends.onnx.importing.sizes import SizeArray
from smcp_fx.errors import InputError

#: No axis is longer. Exporters write "to the end" as the largest integer, or as 999999999 (TensorFlow).
FAR = 10**8


@dataclass(frozen=True, eq=False)
class Call:
    """A node; each of ``inputs`` is a tensor if constant, else a node of the graph or an array of sizes.

    ``rank`` is that of the first input.
    """

    file: OnnxFile
    proto: onnx.NodeProto
    inputs: list[Any]
    rank: int | None

    @property
    def kind(self) -> str:
        """The operator."""
        return str(self.proto.op_type)

    @property
    def opset(self) -> int:
        """The version of the operators."""
        return self.file.opset

    @property
    def name(self) -> str:
        """The node's name in the file, or that of its output."""
        return str(self.proto.name or next(iter(self.proto.output), self.kind))

    def refused(self, why: str) -> InputError:
        """The error for a node that cannot be imported."""
        return self.file.refused(f"node {self.name!r} ({self.kind}): {why}")

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The attributes, by name; tensors and graphs as protocol buffers."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.proto.attribute}

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute; texts as str."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def of_rank(self, owner: Any, name: str, rank: int) -> Any:
        """Return torch's operation over ``rank`` dimensions, as nn.Conv2d; `InputError` if it has none."""
        if not 1 <= rank <= 3:
            raise self.refused(f"it is over {rank} dimensions, and not 1 to 3")
        return getattr(owner, f"{name}{rank}d")

    def has(self, position: int) -> bool:
        """Is there such an input?"""
        return position < len(self.inputs) and self.inputs[position] is not None

    def input(self, position: int) -> Any:
        """Return an input, or None."""
        return self.inputs[position] if self.has(position) else None

    def constant(self, position: int) -> Tensor:
        """Return an input that must be constant; `InputError` if it is computed."""
        value = self.input(position)
        if not isinstance(value, Tensor):
            raise self.refused(f"input {position} ({self.proto.input[position]!r}) is computed from the data")
        return value

    def given(self, name: str, position: int) -> list[int] | None:
        """Return integers: an attribute in old opsets, an input in new ones; None if they are left out."""
        if name in self.attributes:
            value = self.attributes[name]
            return [int(value)] if isinstance(value, int) else [int(v) for v in value]
        return [int(v) for v in self.constant(position).reshape(-1)] if self.has(position) else None

    def new_axes(self) -> list[int]:
        """Return the axes that the result has in addition to the input's."""
        return self.axes(len(self.given("axes", 1) or []))

    def axes(self, extra: int = 0) -> list[int]:
        """Return the axes, counted from the front; ``extra``: how many more axes the result has."""
        axes = self.given("axes", 1) or []
        rank = self.rank
        if any(axis < 0 for axis in axes) and rank is None:
            raise self.refused("axes are counted from the end of a value of unknown rank")
        if rank is None:
            return axes
        rank += extra
        if any(not -rank <= axis < rank for axis in axes):
            raise self.refused(f"axes {axes} of a value of rank {rank}")
        return sorted(axis % rank for axis in axes)

    def axis(self, default: int) -> int:
        """Return the attribute "axis", counted from the front."""
        axis = int(self.attribute("axis", default))
        if self.rank is None or not -self.rank <= axis <= self.rank:
            raise self.refused(f"axis {axis} of a value of rank {self.rank}")
        return axis + self.rank if axis < 0 else axis

    def slice_arguments(self) -> tuple[list[Any], list[Any], list[int], list[int]]:
        """Return starts, ends, axes and steps of Slice, in any opset; starts and ends may be sizes."""
        if "starts" in self.attributes:
            starts, ends = list(self.attributes["starts"]), list(self.attributes["ends"])
            axes = list(self.attributes.get("axes", range(len(starts))))
        else:
            starts, ends = (self.sizes(position) for position in (1, 2))
            axes = self.given("", 3) or list(range(len(starts)))
        steps = self.given("", 4) or [1] * len(starts)
        assert self.rank is not None
        if any(not -self.rank <= axis < self.rank for axis in axes):
            raise self.refused(f"axes {axes} of a value of rank {self.rank}")
        return starts, [_end(end) for end in ends], [axis % self.rank for axis in axes], steps

    def sizes(self, position: int) -> list[Any]:
        """Return the numbers and sizes that an input holds; `InputError` if it follows from data."""
        value = self.input(position)
        if isinstance(value, SizeArray):
            return value.flat
        return [int(size) for size in self.constant(position).reshape(-1)]


def _end(end: Any) -> Any:
    return None if isinstance(end, int) and abs(end) >= FAR else end
