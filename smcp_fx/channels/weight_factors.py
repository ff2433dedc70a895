"""The channels that make up each dimension of a computed weight.

    w = (routing @ weight).view(b, o, i, 3, 3)       weight [experts, o * i * 9]

A weight has channels along two dimensions. On the way from a parameter to a layer, one dimension may hold several
*factors*, in the order of memory. Each operation equates factors of its operands with factors of its result. So the
factors of one tensor (a layer's weight) determine those of all tensors that it is computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from smcp_fx.channels.weight_views import FIRST_FACTOR, named_dims, order_of
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has, operations_with
from smcp_fx.tracing.values import TensorInfo

COPIES = {"contiguous", "clone", "detach"}
RESHAPES = {*operations_with(Trait.RESHAPES), "squeeze", "unsqueeze", *COPIES}
CASTS = {"to", "float", "type", "typeas"}
#: Products of two tensors, and the number of arguments before the first operand.
PRODUCTS = {"linear": 0, **{name: first for name, first in FIRST_FACTOR.items() if name != "tensordot"}}
#: Reductions, and normalisations: the place of their dimensions among the arguments.
REDUCTIONS = {"sum": 1, "mean": 1, "norm": 2, "vectornorm": 2, "amax": 1, "amin": 1, "var": 1, "std": 1}
NORMS = {"softmax": 1, "normalize": 2}


class UnknownError(Exception):
    """Factors cannot be followed through an operation."""


#: Errors at forms of an operation that this file does not handle.
UNFIT = (UnknownError, LookupError, TypeError, ValueError, RuntimeError, AttributeError)


class Part(NamedTuple):
    """A factor. ``kind``: "in" or "out" for channels, the name of a product that sums over it, or ""."""

    kind: str
    size: int


#: For each dimension of a tensor, its factors.
Parts = tuple[tuple[Part, ...], ...]


@dataclass(eq=False)
class Factor:
    """A factor of a dimension. ``made_of``: the factor that it equals, or the smaller factors that it consists of."""

    size: int
    kind: str = ""
    made_of: tuple[Factor, ...] = ()

    def smallest(self) -> list[Factor]:
        """Its smallest factors."""
        return [small for part in self.made_of for small in part.smallest()] if self.made_of else [self]


Dimension = list[Factor]


def unify(left: Dimension, right: Dimension) -> None:
    """Equate two dimensions that hold the same elements in the same order; `UnknownError` if they cannot."""
    one, other = list(left), list(right)
    while one and other:
        a, b = one.pop(0), other.pop(0)
        if a.made_of or b.made_of:
            one[:0], other[:0] = a.smallest(), b.smallest()
        elif a.size == b.size and a is not b:
            if a.kind and b.kind and a.kind != b.kind:
                raise UnknownError
            a.kind = a.kind or b.kind
            b.made_of = (a,)
        elif a.size != b.size:
            large, small, rest = (a, b, one) if a.size > b.size else (b, a, other)
            if large.kind or large.size % small.size:
                raise UnknownError
            large.made_of = small, Factor(large.size // small.size)
            rest.insert(0, large.made_of[1])
    if one or other:
        raise UnknownError


class Factors:
    """The factors of a traced module's tensors. Each call of `relate` adds the equations of one operation."""

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any]) -> None:
        self._module, self._values = module, values
        self._dims: dict[fx.Node, list[Dimension]] = {}
        #: Operations that mix some dimensions of an argument: (node, number of the argument, argument, dimensions).
        self.mixes: list[tuple[fx.Node, int, fx.Node, tuple[int, ...]]] = []

    def of(self, node: Any) -> list[Dimension]:
        """The factors of each of a tensor's dimensions."""
        if node not in self._dims:
            self._dims[node] = [[Factor(size)] if size > 1 else [] for size in shape_of(node, self._values)]
        return self._dims[node]

    def bind(self, node: fx.Node, parts: Parts) -> None:
        """Set the factors of a tensor's dimensions."""
        self._dims[node] = [[Factor(part.size, part.kind) for part in dim if part.size > 1] for dim in parts]

    def parts(self, node: fx.Node) -> Parts:
        """The factors of each dimension, with their kinds as far as known."""
        return tuple(
            tuple(Part(small.kind, small.size) for factor in dim for small in factor.smallest())
            for dim in self.of(node)
        )

    def kinds(self, node: fx.Node, dims: Iterable[int] | None = None) -> set[str]:
        """The kinds of channels in a tensor, or in its dimensions ``dims``."""
        parts = self.parts(node)
        return {part.kind for d in (range(len(parts)) if dims is None else dims) for part in parts[d]} - {""}

    def relate(self, node: fx.Node) -> list[fx.Node]:
        """Equate the factors of a node's result with those of its operands, and return the operands.

        `UnknownError` if factors cannot be followed through the operation.
        """
        name, made = operation_of(self._module, node) or "", self.of(node)
        inputs = [n for n in node.all_input_nodes if isinstance(self._values.get(n.name), TensorInfo)]
        first: Any = node.args[0] if node.args else None
        if name in RESHAPES or (name == "getitem" and _adds_dims(node)):
            if inputs != [first]:
                raise UnknownError
            unify([f for dim in self.of(first) for f in dim], [f for dim in made for f in dim])
        elif has(name, Trait.PERMUTES):
            for dim, place in zip(made, order_of(node, len(made)), strict=True):
                unify(dim, self.of(first)[place])
        elif name in PRODUCTS:
            return self._product(node)
        elif name in REDUCTIONS:
            over = self._reduced(node, first, REDUCTIONS[name])
            keep = len(made) == len(self.of(first))
            left = [dim for d, dim in enumerate(self.of(first)) if keep or d not in over]
            for d, dim in enumerate(made):
                unify(dim, [] if keep and d in over else left[d])
        else:
            if name in ("expand", "expandas", "broadcastto") or name in CASTS:
                inputs = inputs[:1]
            elif name in NORMS:
                self._reduced(node, node, NORMS[name])
            elif not has(name, Trait.ELEMENTWISE):
                raise UnknownError
            for source in inputs:
                self._broadcast(source, node)
        return inputs

    def _product(self, node: fx.Node) -> list[fx.Node]:
        product = Product(self._module, self._values, node)
        dims = dict(zip(product.out, self.of(node), strict=True))
        for operand, names in zip(product.operands, product.names, strict=True):
            for name, dim in zip(names, self.of(operand), strict=True):
                if dim:
                    unify(dims.setdefault(name, dim), dim)
            alone = tuple(d for d, name in enumerate(names) if name not in (*product.out, *product.summed))
            self.mixes.append((node, node.args.index(operand), operand, alone))
        at = min((0, 1), key=lambda at: len(self.kinds(product.operands[at])))
        tensor = product.operands[at]
        over = tuple(product.names[at].index(name) for name in product.summed)
        self.mixes.append((node, node.args.index(tensor), tensor, over))
        if product.bias is None:
            return product.operands
        self._broadcast(product.bias, node)
        return [*product.operands, product.bias]

    def _broadcast(self, source: fx.Node, node: fx.Node) -> None:
        """Equate the factors of a result with an operand's, except where the operand has size 1."""
        own = self.of(source)
        for dim, whole in zip(own, self.of(node)[len(self.of(node)) - len(own) :], strict=True):
            if dim:
                unify(dim, whole)

    def _reduced(self, node: fx.Node, source: fx.Node, place: int) -> tuple[int, ...]:
        """The dimensions that an operation mixes: its argument number ``place``, or the keyword ``dim``."""
        dims: Any = node.kwargs.get("dim", node.args[place] if len(node.args) > place else None)
        if dims is None or isinstance(dims, bool):
            raise UnknownError
        rank = len(self.of(source))
        over = tuple(int(dim) % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))
        self.mixes.append((node, 0, source, over))
        return over


class Product:
    """The operands of a product of two tensors, and names for their dimensions and for those of the result.

    `UnknownError` unless both operands are arguments, and different ones.
    """

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any], node: fx.Node) -> None:
        name = operation_of(module, node) or ""
        first = PRODUCTS[name]
        self.operands = [arg for arg in node.args[first : first + 2] if isinstance(arg, fx.Node)]
        if len(self.operands) != 2 or self.operands[0] is self.operands[1]:
            raise UnknownError
        self.shapes = [shape_of(operand, values) for operand in self.operands]
        ranks = [len(shape) for shape in self.shapes]
        self.names, self.out = named_dims(name, node.args, node.kwargs, ranks, len(shape_of(node, values)))
        bias = node.args[0] if name in ("addmm", "baddbmm") else None
        if name == "linear":
            bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        self.bias = bias if isinstance(bias, fx.Node) else None  # the addend of the product

    @property
    def summed(self) -> list[str]:
        """The dimensions of both operands that the result lacks."""
        return [name for name in self.names[0] if name in self.names[1] and name not in self.out]


def shape_of(node: Any, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a node's tensor; raises `UnknownError` if the node is no tensor."""
    value = values.get(node.name) if isinstance(node, fx.Node) else None
    if not isinstance(value, TensorInfo):
        raise UnknownError
    return value.shape


def _adds_dims(node: fx.Node) -> bool:
    """Does an index only add dimensions of size 1?"""
    index: Any = node.args[1]
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is None or entry is Ellipsis or entry == slice(None) for entry in entries)
