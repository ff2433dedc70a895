"""Finds which sizes the model's code fixes, and from them how many parts `split` and `unbind` give.

q, k, v = qkv.reshape(b, n, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)     three, whatever the input
for tile in x.split(8, dim=3)                                             as many as the width holds
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from smcp_fx.tracing.operations import operation_name, operation_of
from smcp_fx.tracing.traits import Trait, has

_SPLITS = {"split", "unbind", "chunk", "unsafesplit", "unsafechunk"}
#: Operations, besides element-wise ones, that keep the size of every dimension.
_SAME_SIZES = frozenset(
    "softmax logsoftmax contiguous batchnorm layernorm groupnorm instancenorm rmsnorm normalize prelu".split()
)
_FACTORIES = {"zeros", "ones", "empty", "randn", "rand"}
_SIZED = _FACTORIES | {"view", "reshape", "newzeros", "newones", "newempty"}
_SPATIAL = {
    f"{kind}pool{rank}d" for kind in ("max", "avg", "adaptiveavg", "adaptivemax") for rank in (1, 2, 3)
}
_WITH_KERNELS = {getattr(F, f"conv{form}{rank}d") for form in ("", "_transpose") for rank in (1, 2, 3)}
_CONVOLUTIONS = {f"conv{rank}d" for rank in (1, 2, 3)} | {f"convtranspose{rank}d" for rank in (1, 2, 3)}


class FixedSizes:
    """The sizes of a traced graph that come from the model's code or parameters, so that no input changes them.

    ``value`` gives a node's value on the example; ``written`` maps a node to the tensor of its size that it replaces.
    """

    def __init__(
        self,
        model: nn.Module,
        value: Callable[[fx.Node], Any],
        written: Mapping[fx.Node, fx.Node] | None = None,
    ) -> None:
        self.model = model
        self.value = value
        self.written = written or {}
        self._known: dict[tuple[fx.Node, int], bool] = {}

    # ---- parts ------------------------------------------------------------------------------------------

    def may_vary(self, node: fx.Node) -> bool:
        """May the number of parts of `split`, `unbind` or a similar operation depend on the input?"""
        name = self._name(node)
        if name not in _SPLITS or not isinstance(_source(node), fx.Node):
            return False
        if name != "unbind" and isinstance(_asked(node), (tuple, list)):
            return False
        return not self.is_fixed(_source(node), self._dim(node))

    def number_of_parts(self, node: fx.Node, proxy: Callable[[fx.Node], Any]) -> Any:
        """The number of parts of a split, as a number of the graph (``proxy`` makes a node's proxy)."""
        size = proxy(_source(node)).size(self._dim(node))
        name, asked = self._name(node), _asked(node)
        if name == "unbind":
            return size
        asked = proxy(asked) if isinstance(asked, fx.Node) else asked
        if "chunk" in name:
            asked = (size + (asked - 1)) // asked  # the size of each part
        return (size + (asked - 1)) // asked

    def _dim(self, node: fx.Node) -> int:
        """The dimension that is split."""
        dim = _argument(node, 1 if self._name(node) == "unbind" else 2, "dim")
        dim = self.value(dim) if isinstance(dim, fx.Node) else dim or 0
        return int(dim) if dim >= 0 else int(dim) + int(self.value(_source(node)).dim())

    # ---- sizes ------------------------------------------------------------------------------------------

    def is_fixed(self, node: fx.Node, dim: int) -> bool:
        """Is the size of this dimension the same for every input?"""
        passed = []
        while (node, dim) not in self._known:
            passed.append((node, dim))
            self._known[node, dim] = False  # until known
            answer = self._told(node, dim)
            if isinstance(answer, bool):
                self._known[node, dim] = answer
            else:
                node, dim = answer
        for place in passed:
            self._known[place] = self._known[node, dim]
        return self._known[node, dim]

    def _told(self, node: fx.Node, dim: int) -> bool | tuple[fx.Node, int]:
        """The answer, or a node and dimension with the same answer."""
        if node.op == "get_attr":
            return True
        if node in self.written:
            return self.written[node], dim
        name, source = self._name(node), _source(node)
        if name in _CONVOLUTIONS:
            return bool(dim == self.value(node).dim() - int(name[-2]) - 1)
        if name in ("linear", "embedding") and dim == self.value(node).dim() - 1:
            return True
        if name in _SIZED:
            return self._is_written(_flat(node.args[name not in _FACTORIES :]), dim)
        if name == "cat" and isinstance(source, (tuple, list)):
            along = _argument(node, 1, "dim") or 0
            fixed = (self.is_fixed(part, dim) for part in source if isinstance(part, fx.Node))
            return all(fixed) if along % self.value(node).dim() == dim else any(fixed)
        if node.op == "call_function" and node.target is operator.getitem and isinstance(source, fx.Node):
            if _slices(node.args[1]):
                return source, dim
            if self._name(source) not in ("split", "chunk") or isinstance(_asked(source), fx.Node):
                return False
            source = _source(source)
        if name == "permute" and isinstance(source, fx.Node):
            order = _flat(node.args[1:])
            return (source, order[dim] % len(order)) if all(type(place) is int for place in order) else False
        if not isinstance(source, fx.Node) or not isinstance(self.value(source), Tensor):
            return False
        shape = self.value(source).shape
        if name in ("flatten", "unflatten") and node.op != "call_module":
            return self._reshaped(node, name, source, dim)
        if name == "transpose":
            pair = [place % len(shape) for place in node.args[1:] if type(place) is int]
            other = pair[1 - pair.index(dim)] if len(pair) == 2 and dim in pair else dim
            return (source, other) if len(pair) == 2 else False
        if has(name, Trait.ELEMENTWISE):  # broadcasting changes no size but 1
            return self._broadcast(node, name, dim)
        spatial = name in _SPATIAL and dim >= len(shape) - int(name[-2])
        keeps_sizes = name in _SAME_SIZES or name in _SPATIAL or name in ("linear", "getitem")
        keeps_sizes |= name in ("interpolate", "upsample") and dim < 2
        return (source, dim) if keeps_sizes and not spatial else False

    def _broadcast(self, node: fx.Node, name: str, dim: int) -> bool | tuple[fx.Node, int]:
        """As `_told`, for broadcast operands: the size is that of an operand without size 1."""
        size, rank, full = self.value(node).shape[dim], self.value(node).dim(), []
        # The second tensor only names a type.
        for operand in node.all_input_nodes[: 1 if name in ("to", "typeas") else None]:
            shape = getattr(self.value(operand), "shape", ())
            place = dim - rank + len(shape)
            if place >= 0 and shape[place] == size != 1:
                full.append((operand, place))
        return any(operand.op == "get_attr" for operand, _ in full) or next(iter(full), False)

    def _reshaped(self, node: fx.Node, name: str, source: fx.Node, dim: int) -> bool | tuple[fx.Node, int]:
        """As `_told`, for merged or split dimensions."""
        rank = self.value(source).dim()
        first = int(_argument(node, 1, "start_dim", "dim") or 0) % rank
        if name == "flatten":
            last = _argument(node, 2, "end_dim")
            last = rank - 1 if last is None else int(last) % rank
            if dim == first:
                return all(self.is_fixed(source, place) for place in range(first, last + 1))
            return source, dim if dim < first else dim + last - first
        sizes = _argument(node, 2, "sizes", "unflattened_size")
        if not isinstance(sizes, (tuple, list)):
            return False
        if first <= dim < first + len(sizes):
            literal = type(sizes[dim - first]) is int and sizes[dim - first] > 0
            return literal or (source, first)
        return source, dim if dim < first else dim - len(sizes) + 1

    def is_fixed_number(self, node: fx.Node) -> bool:
        """Does the number follow from fixed sizes only?"""
        todo = [node]
        while todo:
            here = todo.pop()
            of_numbers = getattr(here.target, "__module__", "") in ("_operator", "math")
            if of_numbers and here.target is not operator.getitem:
                todo += here.all_input_nodes
                continue
            tensor, dim = self._asked_size(here)
            if tensor is None or not self.is_fixed(tensor, dim):
                return False
        return True

    def _asked_size(self, node: fx.Node) -> tuple[fx.Node | None, int]:
        """The tensor and dimension whose size the node is, as `x.size(1)` or `x.shape[1]`; None for other nodes."""
        source, place = _first_two(node)
        tensor, dims = None, range(0)
        if node.target is operator.getitem:
            tensor, dims = self._dims(source)
        elif node.op == "call_method" and node.target == "size":
            tensor, dims = source, range(self.value(source).dim())
        in_range = type(place) is int and -len(dims) <= place < len(dims)
        return (tensor, dims[place]) if in_range else (None, 0)

    def _dims(self, node: Any) -> tuple[fx.Node | None, range]:
        """The tensor and dimensions whose sizes the node holds: `x.shape`, `x.size()`, `x.shape[1:]`."""
        if not isinstance(node, fx.Node):
            return None, range(0)
        source, index = _first_two(node)
        if (node.target is getattr and index == "shape") or (node.target == "size" and index is None):
            return source, range(len(self.value(node)))
        if node.target is operator.getitem and isinstance(index, slice) and _slices(index):
            tensor, dims = self._dims(source)
            return tensor, dims[index]
        return None, range(0)

    def is_multiple(self, node: fx.Node, dim: int, step: Any) -> bool:
        """Does the step divide the size for every input, as in `zeros(b, c, 2 * h, w)` with step 2?"""
        while node in self.written:
            node = self.written[node]
        if type(step) is not int or self._name(node) not in _SIZED - {"view", "reshape"}:
            return False
        arguments = node.args[1:] if self._name(node).startswith("new") else node.args
        sizes = _flat(arguments)
        size = sizes[dim] if dim < len(sizes) else None
        times = size.args if isinstance(size, fx.Node) and size.target is operator.mul else ()
        return any(type(factor) is int and factor % step == 0 for factor in times)

    def _is_written(self, sizes: list[Any], dim: int) -> bool:
        """Is the size of the dimension a known number in the arguments of `view`, `zeros` and their like?"""
        size = sizes[dim] if dim < len(sizes) else None
        if isinstance(size, fx.Node):
            return type(self.value(size)) is int and self.is_fixed_number(size)
        return type(size) is int and size > 0

    def _name(self, node: fx.Node) -> str:
        return (operation_of(self.model, node) if node.op.startswith("call_") else None) or ""


def write_out_kernels(graph: fx.Graph, sizes: FixedSizes) -> None:
    """Write out how often a constant kernel is repeated, if the model alone decides that.

    before   conv2d(x, kernel.repeat(x.shape[1], 1, 1, 1))      after   conv2d(x, kernel.repeat(16, 1, 1, 1))
    """

    def number(node: fx.Node) -> Any:
        fixed = type(sizes.value(node)) is int and sizes.is_fixed_number(node)
        return sizes.value(node) if fixed else node

    for node in graph.nodes:
        source = node.args[0] if node.args and operation_name(node, None) == "repeat" else None
        if not isinstance(source, fx.Node) or source.op != "get_attr" or not node.users:
            continue
        if all(user.target in _WITH_KERNELS and user.args[1:2] == (node,) for user in node.users):
            node.args = (source, *fx.node.map_arg(node.args[1:], number))


def _slices(index: Any) -> bool:
    """Does an index only take slices between literal numbers? Then equal sizes stay equal."""
    parts = index if isinstance(index, tuple) else (index,)
    edges = [edge for part in parts if isinstance(part, slice) for edge in (part.start, part.stop, part.step)]
    return all(isinstance(part, slice) for part in parts) and all(type(e) in (int, type(None)) for e in edges)


def _first_two(node: fx.Node) -> tuple[Any, Any]:
    return (*node.args, None, None)[:2]  # type: ignore[return-value]


def _source(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("tensor"))


def _asked(node: fx.Node) -> Any:
    return _argument(node, 1, "chunks", "split_size", "split_size_or_sections")


def _flat(arguments: Any) -> list[Any]:
    return list(arguments[0] if arguments and isinstance(arguments[0], (tuple, list)) else arguments)


def _argument(node: fx.Node, position: int, *names: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)
