"""What the dimensions of a tensor are made of that has two kinds of channels, as weights have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo

COPIES = {"contiguous", "clone", "detach"}
RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", *COPIES}
TURNS = {"permute", "transpose", "movedim", "t"}
CASTS = {"to", "float", "type", "typeas"}
#: Products of two tensors, and how many arguments stand before the first factor.
PRODUCTS = {"matmul": 0, "mm": 0, "bmm": 0, "linear": 0, "einsum": 1, "addmm": 1, "baddbmm": 1}
#: Reductions, and what gives each value among those of others; the place of the dimensions among their arguments.
REDUCTIONS = {"sum": 1, "mean": 1, "norm": 2, "vectornorm": 2, "amax": 1, "amin": 1, "var": 1, "std": 1}
NORMS = {"softmax": 1, "normalize": 2}
#: Sizes told apart, by which an operation shows how it turns dimensions.
_RULER = (2, 3, 4, 5, 6, 7, 8, 9)


@dataclass(frozen=True)
class Part:
    """A factor of a dimension: ``kind`` "in" or "out" of channels, a product's name of what it sums over, or ""."""

    kind: str
    size: int


#: For each dimension of a tensor, what it is made of, in the order of memory.
Parts = tuple[tuple[Part, ...], ...]


class UnknownError(Exception):
    """Something on the way that cannot be followed."""


#: What following raises at forms that it was not written for.
UNFIT = (UnknownError, LookupError, TypeError, ValueError, RuntimeError, AttributeError)


def shape_of(node: Any, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a node's tensor; raises `UnknownError` if it is none."""
    value = values.get(node.name) if isinstance(node, fx.Node) else None
    if not isinstance(value, TensorInfo):
        raise UnknownError
    return value.shape


def kinds(parts: Parts) -> set[str]:
    """The kinds of channels among these parts."""
    return {part.kind for dim in parts for part in dim} - {""}


def plain(shape: tuple[int, ...]) -> Parts:
    """Dimensions without channels."""
    return tuple((Part("", size),) if size > 1 else () for size in shape)


def merged(known: Parts | None, told: Parts) -> Parts:
    """What two readers say of one tensor."""
    if known is None:
        return told
    both = []
    for one, other in zip(known, told, strict=True):
        if one != other and kinds((one,)) and kinds((other,)):
            raise UnknownError
        both.append(other if kinds((other,)) else one)
    return tuple(both)


def adds_dims(node: fx.Node) -> bool:
    """Does an index only add dimensions of size 1?"""
    index: Any = node.args[1]
    given = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in given)


def regrouped(parts: Parts, shape: tuple[int, ...]) -> Parts:
    """The same elements in the same order, in dimensions of other sizes."""
    left = [part for dim in parts for part in dim if part.size > 1 or part.kind]
    made = []
    for size in shape:
        own: list[Part] = []
        while math.prod(part.size for part in own) < size:
            if not left:
                raise UnknownError
            part, missing = left.pop(0), size // math.prod(p.size for p in own)
            if part.size > missing and not part.kind and part.size % missing == 0:
                left.insert(0, Part("", part.size // missing))
                part = Part("", missing)
            own.append(part)
        if math.prod(part.size for part in own) != size:
            raise UnknownError
        made.append(tuple(own))
    if left and any(part.size > 1 for part in left):
        raise UnknownError
    return tuple(made)


def order_of(node: fx.Node, rank: int) -> list[int]:
    """The dimension of its input that each dimension of a turned tensor is."""
    ruler = torch.empty(_RULER[:rank], device="meta")
    run: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return [_RULER.index(size) for size in run(ruler, *node.args[1:], **node.kwargs).shape]


def broadcast(parts: Parts, shape: tuple[int, ...]) -> Parts:
    """Of an operand with fewer dimensions, or of size 1 in some."""
    own = parts[len(parts) - len(shape) :]
    if any(size not in (1, math.prod(p.size for p in dim)) for dim, size in zip(own, shape, strict=True)):
        raise UnknownError
    return tuple(dim if size > 1 else () for dim, size in zip(own, shape, strict=True))


def forward(
    module: fx.GraphModule, node: fx.Node, told: Parts, parts: Parts, values: Mapping[str, Any]
) -> Parts:
    """What is known of a node by the parts ``told`` of what it reads, beside ``parts`` that its readers say."""
    name = operation_of(module, node) or ""
    if name in RESHAPES or (name == "getitem" and adds_dims(node)):
        return merged(parts, regrouped(told, shape_of(node, values)))
    if name in TURNS:
        return merged(parts, tuple(told[dim] for dim in order_of(node, len(told))))
    if name in CASTS or name in NORMS or has(name, Trait.ELEMENTWISE):
        return merged(parts, (*parts[: len(parts) - len(told)], *told))
    return parts


def reduced_dims(node: fx.Node, rank: int, place: int = 1) -> tuple[int, ...]:
    """The dimensions that a reduction names, as its argument number ``place`` or by keyword."""
    dims: Any = node.kwargs.get("dim", node.args[place] if len(node.args) > place else None)
    if dims is None or isinstance(dims, bool):
        raise UnknownError
    return tuple(int(dim) % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def factors(name: str, node: fx.Node) -> list[fx.Node]:
    """Both operands of a product, which must be arguments of their own."""
    first = PRODUCTS[name]
    given = [arg for arg in node.args[first : first + 2] if isinstance(arg, fx.Node)]
    if len(given) != 2 or given[0] is given[1]:
        raise UnknownError
    return given


def added(name: str, node: fx.Node) -> fx.Node | None:
    """What is added to a product: a linear's bias, the first argument of `addmm`."""
    if name == "linear":
        found = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    else:
        found = node.args[0] if name in ("addmm", "baddbmm") else None
    return found if isinstance(found, fx.Node) else None


def named_dims(
    name: str, node: fx.Node, shapes: list[tuple[int, ...]], rank: int
) -> tuple[list[list[str]], list[str]]:
    """Names for the dimensions of a product's operands, of the shapes, and for those of its result."""
    if name == "einsum":
        inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
        names = [list(one) for one in inputs.split(",")]
        if "." in str(node.args[0]) or any(len(set(one)) != len(one) for one in (*names, out)):
            raise UnknownError
        return names, list(out)
    rows = [] if len(shapes[0]) == 1 else ["n"]  # a vector has none
    columns = [] if len(shapes[1]) == 1 else ["m"]
    batch = [f"b{d}" for d in range(rank - len(rows) - len(columns))]
    if name == "linear":
        names = [[*batch, *rows, "k"], ["m", "k"]]
    else:
        names = [[*batch, *rows, "k"], [*batch, "k", *columns]]
    names = [one[len(one) - len(shape) :] for one, shape in zip(names, shapes, strict=True)]
    return names, [*batch, *rows, *columns]
