"""Weights that are computed from the input: mixtures of kernels, modulated convolutions, hypernetworks.

    w = (routing @ weight).view(b * o, i, 3, 3)       weight [experts, o * i * 9]
    y = conv2d(x.view(1, b * i, h, w), w, groups=b)

Such a weight has two dimensions of channels, as a parameter has. They are followed back, through what computes it, to
dimensions of parameters, where several may lie in one, and to tensors that have one of them (styles), whose channels
go with them. What has neither (routing) stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from smcp_fx.channels.weight_views import is_question, weight_and_bias
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo

_RESHAPES = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "clone",
    "detach",
}
_COPIES = {"contiguous", "clone", "detach"}
_TURNS = {"permute", "transpose", "movedim", "t"}
_CASTS = {"to", "float", "type", "typeas"}
#: Sizes told apart, by which an operation shows how it turns dimensions.
_RULER = (2, 3, 4, 5, 6, 7, 8, 9)


@dataclass(frozen=True)
class Part:
    """A factor of a dimension: ``kind`` "in" or "out" of channels, "" of anything else."""

    kind: str
    size: int


#: For each dimension of a tensor, what it is made of, in the order of memory.
Parts = tuple[tuple[Part, ...], ...]


class _UnknownError(Exception):
    """Something on the way that cannot be followed."""


@dataclass
class MixedWeight:
    """The weight ``result`` that the layer ``use`` reads, of ``images`` images; what computes it."""

    use: fx.Node
    result: fx.Node
    images: int
    parts: dict[fx.Node, Parts] = field(
        default_factory=dict
    )  # of the nodes between parameters and the weight
    parameters: dict[fx.Node, Parts] = field(default_factory=dict)  # read as tensors
    modules: dict[fx.Node, Parts] = field(default_factory=dict)  # linears: parts of the weight
    leaves: dict[fx.Node, Parts] = field(default_factory=dict)  # with channels of one kind, or none
    sums: list[tuple[fx.Node, fx.Node, tuple[int, ...]]] = field(default_factory=list)  # (sum, of what, dims)
    whole: list[tuple[fx.Node, int]] = field(default_factory=list)  # dimensions that must have no channels


def mixed_weights(
    module: fx.GraphModule, values: Mapping[str, Any], computed: Collection[str], views: Collection[str]
) -> dict[fx.Node, MixedWeight]:
    """Find them, by the layer that reads them.

    ``computed``: nodes that compute weights from parameters alone; ``views``: nodes that move a weight's dimensions.
    """
    found: dict[fx.Node, MixedWeight] = {}
    for use in module.graph.nodes:
        name = operation_of(module, use) or ""
        if use.op != "call_function" or not (name.startswith("conv") or name == "linear"):
            continue
        weight = weight_and_bias(use)[0]
        if (
            not isinstance(weight, fx.Node)
            or weight.name in (*computed, *views)
            or weight.op in ("get_attr", "placeholder")
        ):
            continue
        try:
            images, shape = _images(module, use, values), _shape(weight, values)
            parts = _parts(name, use, images, shape)
            if parts is not None:
                found[use] = _followed(module, values, computed, MixedWeight(use, weight, images), parts)
        except (
            _UnknownError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
        ):  # an unknown form
            continue
    return found


def _parts(name: str, use: fx.Node, images: int, shape: tuple[int, ...]) -> Parts | None:
    """What the dimensions of a layer's weight are made of; None for a form that has no rule."""
    kernel = tuple((Part("", size),) for size in shape[2:])
    if shape[0] % images or shape[1] == 1:
        return None
    first, second = ("in", "out") if "transpose" in name else ("out", "in")
    rows = (Part("", images), Part(first, shape[0] // images))
    return (rows if images > 1 else rows[1:], (Part(second, shape[1]),), *kernel)


def fold(module: fx.GraphModule, use: fx.Node, values: Mapping[str, Any]) -> list[fx.Node]:
    """Return what a convolution reads, back to the reshape that may have written a batch's images as one."""
    path: list[fx.Node] = []
    node = use.args[0]
    while isinstance(node, fx.Node) and node.args and _shape(node, values)[0] == 1:
        path.append(node)
        if operation_of(module, node) in _RESHAPES - _COPIES:
            break
        node = node.args[0]
    return path


def _images(module: fx.GraphModule, use: fx.Node, values: Mapping[str, Any]) -> int:
    """How many images lie among the channels of a convolution's input."""
    if operation_of(module, use) == "linear":
        return 1
    path = fold(module, use, values)
    images = _shape(path[-1].args[0], values)[0] if path else 1
    return images if _shape(use.args[0], values)[1] % images == 0 else 1


def _shape(node: Any, values: Mapping[str, Any]) -> tuple[int, ...]:
    value = values.get(node.name) if isinstance(node, fx.Node) else None
    if not isinstance(value, TensorInfo):
        raise _UnknownError
    return value.shape


def _followed(
    module: fx.GraphModule,
    values: Mapping[str, Any],
    computed: Collection[str],
    found: MixedWeight,
    parts: Parts,
) -> MixedWeight:
    """Go back from the weight, the last nodes first."""
    wanted: dict[fx.Node, Parts] = {found.result: parts}
    order = ancestors(found.result)
    for node in reversed(module.graph.nodes):
        if node not in wanted or node not in order:
            continue
        kinds = _kinds(wanted[node])
        before = ancestors(node) - {node}
        crossed = any(len(_kinds(p)) > 1 and n in before for n, p in wanted.items())
        if len(kinds) < 2 and not crossed:
            found.leaves[node] = wanted[node]
            continue
        if any(
            user is not found.use and user not in found.parts and not is_question(user) for user in node.users
        ):
            raise _UnknownError
        if node.op == "get_attr" or node.name in computed:
            found.parameters[node] = wanted[node]
        elif node.op == "call_module" and operation_of(module, node) == "linear":
            _of_module(module, node, wanted[node], found, values, wanted)
        else:
            for source, told in _sources(module, node, wanted[node], values, found):
                wanted[source] = _merged(wanted.get(source), told)
        found.parts[node] = wanted[node]
    for node in module.graph.nodes:
        if node in found.parts and node not in found.parameters:
            found.parts[node] = _forward(module, node, found, values)
    crossed = any(_kinds((found.parts[node][dim],)) for node, dim in found.whole if node in found.parts)
    if crossed or not (found.parameters or found.modules):
        raise _UnknownError
    return found


def _forward(module: fx.GraphModule, node: fx.Node, found: MixedWeight, values: Mapping[str, Any]) -> Parts:
    """What is known of a node by what it reads: a sum tells nothing of the dimensions that it sums over."""
    name, parts = operation_of(module, node) or "", found.parts[node]
    for source in node.all_input_nodes:
        told = found.parts.get(source)
        if told is None:
            continue
        if name in _RESHAPES or name == "getitem":
            parts = _merged(parts, _regrouped(told, _shape(node, values)))
        elif name in _TURNS:
            order = _order(node, len(told))
            parts = _merged(parts, tuple(told[dim] for dim in order))
        elif name in _CASTS or name == "softmax" or has(name, Trait.ELEMENTWISE):
            parts = _merged(parts, (*parts[: len(parts) - len(told)], *told))
    return parts


def _kinds(parts: Parts) -> set[str]:
    return {part.kind for dim in parts for part in dim} - {""}


def _of_module(
    module: fx.GraphModule,
    node: fx.Node,
    parts: Parts,
    found: MixedWeight,
    values: Mapping[str, Any],
    wanted: dict[fx.Node, Parts],
) -> None:
    """A linear that makes a weight: its rows are the weight's."""
    source = node.args[0]
    shape = _shape(source, values)
    found.modules[node] = parts[-1:]
    assert isinstance(source, fx.Node)
    if any(_kinds((dim,)) for dim in parts[:-1]):
        raise _UnknownError
    wanted[source] = _merged(wanted.get(source), _plain(shape))


def _plain(shape: tuple[int, ...]) -> Parts:
    return tuple((Part("", size),) if size > 1 else () for size in shape)


def _merged(known: Parts | None, told: Parts) -> Parts:
    """What two readers say of one tensor."""
    if known is None:
        return told
    both = []
    for one, other in zip(known, told, strict=True):
        if one != other and _kinds((one,)) and _kinds((other,)):
            raise _UnknownError
        both.append(other if _kinds((other,)) else one)
    return tuple(both)


def _sources(
    module: fx.GraphModule, node: fx.Node, parts: Parts, values: Mapping[str, Any], found: MixedWeight
) -> Iterator[tuple[fx.Node, Parts]]:
    """The tensors that a node reads, and what their dimensions are made of."""
    name = operation_of(module, node) or ""
    inputs = [n for n in node.all_input_nodes if isinstance(values.get(n.name), TensorInfo)]
    first = node.args[0] if node.args else None
    if name in _RESHAPES or (name == "getitem" and _adds_dims(node)):
        if inputs != [first]:
            raise _UnknownError
        yield inputs[0], _regrouped(parts, _shape(first, values))
    elif name in _TURNS:
        yield inputs[0], _turned(node, parts)
    elif name in ("expand", "expandas", "broadcastto") or name in _CASTS:
        yield inputs[0], _broadcast(parts, _shape(first, values))
    elif name in ("matmul", "mm", "bmm", "linear", "einsum"):
        yield from _factors(name, node, parts, values, found)
    elif name in ("sum", "mean"):
        yield _summed(name, node, parts, values, found)
    elif name == "softmax" or has(name, Trait.ELEMENTWISE):
        for source in inputs:
            yield source, _broadcast(parts, _shape(source, values))
        if name == "softmax":
            dim: Any = node.kwargs.get("dim", (*node.args, None)[1])
            found.whole.append((node, int(dim)))
    else:
        raise _UnknownError


def _adds_dims(node: fx.Node) -> bool:
    index: Any = node.args[1]
    given = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in given)


def _regrouped(parts: Parts, shape: tuple[int, ...]) -> Parts:
    """The same elements in the same order, in dimensions of other sizes."""
    left = [part for dim in parts for part in dim if part.size > 1 or part.kind]
    made = []
    for size in shape:
        own: list[Part] = []
        while math.prod(part.size for part in own) < size:
            if not left:
                raise _UnknownError
            part, missing = left.pop(0), size // math.prod(p.size for p in own)
            if part.size > missing and not part.kind and part.size % missing == 0:
                left.insert(0, Part("", part.size // missing))
                part = Part("", missing)
            own.append(part)
        if math.prod(part.size for part in own) != size:
            raise _UnknownError
        made.append(tuple(own))
    if left and any(part.size > 1 for part in left):
        raise _UnknownError
    return tuple(made)


def _turned(node: fx.Node, parts: Parts) -> Parts:
    """The dimensions before an operation turned them."""
    order = _order(node, len(parts))
    return tuple(parts[order.index(dim)] for dim in range(len(parts)))


def _order(node: fx.Node, rank: int) -> list[int]:
    """The dimension of its input that each dimension of a turned tensor is."""
    ruler = torch.empty(_RULER[:rank], device="meta")
    run: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return [_RULER.index(size) for size in run(ruler, *node.args[1:], **node.kwargs).shape]


def _broadcast(parts: Parts, shape: tuple[int, ...]) -> Parts:
    """Of an operand with fewer dimensions, or of size 1 in some."""
    own = parts[len(parts) - len(shape) :]
    if any(size not in (1, math.prod(p.size for p in dim)) for dim, size in zip(own, shape, strict=True)):
        raise _UnknownError
    return tuple(dim if size > 1 else () for dim, size in zip(own, shape, strict=True))


def _factors(
    name: str, node: fx.Node, parts: Parts, values: Mapping[str, Any], found: MixedWeight
) -> Iterator[tuple[fx.Node, Parts]]:
    """Both operands of a product, whose dimensions are the result's, or summed over."""
    given = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if (name == "linear" and len(node.args) + len(node.kwargs) > 2) or len(given) != 2:
        raise _UnknownError
    shapes = [_shape(arg, values) for arg in given]
    if name == "einsum":
        inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
        names = [list(one) for one in inputs.split(",")]
    else:
        rows = [] if len(shapes[0]) == 1 else ["n"]  # a vector has none
        batch = [f"b{d}" for d in range(len(parts) - 1 - len(rows))]
        names = [[*batch, *rows, "k"], ["m", "k"] if name == "linear" else [*batch, "k", "m"]]
        names = [one[len(one) - len(shape) :] for one, shape in zip(names, shapes, strict=True)]
        out = [*batch, *rows, "m"]  # type: ignore[assignment]
        if len(names[1]) < 2:
            raise _UnknownError
    made = dict(zip(out, parts, strict=False))
    if len(made) != len(parts) or "." in made:
        raise _UnknownError
    for operand, own, shape in zip(given, names, shapes, strict=True):
        if len(own) != len(shape):
            raise _UnknownError
        plain = _plain(shape)
        found.whole += [(operand, d) for d, one in enumerate(own) if one not in made]
        pairs = zip(own, plain, shape, strict=True)
        yield operand, tuple(made.get(one, full) if size > 1 else () for one, full, size in pairs)


def _summed(
    name: str, node: fx.Node, parts: Parts, values: Mapping[str, Any], found: MixedWeight
) -> tuple[fx.Node, Parts]:
    """What a sum reads: the dimensions that are summed over may be told by others."""
    source = node.args[0]
    shape = _shape(source, values)
    dims: Any = node.kwargs.get("dim", (*node.args, None)[1])
    if dims is None or not isinstance(source, fx.Node):
        raise _UnknownError
    over = tuple(int(dim) % len(shape) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))
    keep = len(_shape(node, values)) == len(shape)
    left = [dim for d, dim in enumerate(parts) if not keep or d not in over]
    plain = _plain(shape)
    told = tuple(plain[d] if d in over else left.pop(0) for d in range(len(shape)))
    found.sums.append((node, source, over))
    return source, told
