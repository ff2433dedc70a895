"""Weights that layers read through a movement of their dimensions: transposed, or with dimensions of size 1.

    F.linear(z, self.encode.weight.t())      F.conv2d(x, self.project.weight[:, :, None, None])

Each dimension of such a view is one of the parameter's, or has size 1. For the channel graph, a layer that reads the
view reads the parameter along other dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.masking.masks import EVERY_MASK
from smcp_fx.tracing.operations import operation_name
from smcp_fx.tracing.traits import Trait, has, operations_with
from smcp_fx.tracing.values import canonical_names, held

_DEFORMABLE = "deformconv2d"
_LAYERS = {f"conv{form}{rank}d" for form in ("", "transpose") for rank in (1, 2, 3)}
_LAYERS |= {"linear", "recurrentweight", _DEFORMABLE}
_MOVES = operations_with(Trait.RESHAPES | Trait.PERMUTES) | {"contiguous", "getitem", "squeeze", "unsqueeze"}
_ATTRIBUTES = ("T", "mT")
_INDICES = (int, slice, type(None), type(Ellipsis))
_QUESTIONS = ("size", "dim", "numel", "ndim", "shape")
#: Products of two tensors, and the place of the first factor among their arguments.
FIRST_FACTOR = {"matmul": 0, "mm": 0, "bmm": 0, "tensordot": 0, "einsum": 1, "addmm": 1, "baddbmm": 1}
#: For each dimension of a view, the parameter's dimension; None for an added dimension of size 1.
Dims = tuple[int | None, ...]
Shape = tuple[int, ...]
ShapeOf = Callable[[fx.Node], Shape | None]
#: Different sizes; their order in a result shows how an operation permutes dimensions.
_RULER = (2, 3, 4, 5, 6, 7, 8, 9)


@dataclass(frozen=True)
class WeightView:
    """A parameter with moved dimensions: the nodes that read it and move it first, and its dimensions in the view."""

    source: fx.Node
    first: fx.Node  # the source itself, before any movement
    dims: Dims


def weight_of(use: fx.Node) -> fx.Node | None:
    """The weight that a functional call of a layer reads; None if the node is no such call."""
    if is_layer(use):
        weight = weight_and_bias(use)[0]
        return weight if isinstance(weight, fx.Node) else None
    operands = factors(use)
    return next((operand for operand in reversed(operands) if _way_back(operand)[-1].op == "get_attr"), None)


def is_layer(use: fx.Node) -> bool:
    """Is it a functional call of a layer, with a weight and a bias?"""
    return use.op == "call_function" and operation_name(use, None) in _LAYERS


def weight_and_bias(use: fx.Node) -> tuple[Any, Any]:
    """The weight and the bias of a functional call of a layer; None for an argument that is missing."""
    places = ((1, "weight"), (4 if operation_name(use, None) == _DEFORMABLE else 2, "bias"))
    weight, bias = (
        use.args[place] if len(use.args) > place else use.kwargs.get(name) for place, name in places
    )
    return weight, bias


def contracted(use: fx.Node, shape_of: ShapeOf) -> int:
    """The dimension of its weight that a functional call of a layer sums over."""
    if is_layer(use):
        return 0 if "transpose" in str(getattr(use.target, "__name__", "")) else 1
    operands = factors(use)
    ranks = [len(shape_of(operand) or ()) for operand in (*operands, use)]
    try:
        names, out = named_dims(operation_name(use, None) or "", use.args, use.kwargs, ranks[:2], ranks[2])
    except (ValueError, LookupError, TypeError):  # it has no rule, and stays whole
        return 0
    own = names[operands.index(weight_of(use))]  # type: ignore[arg-type]
    return next((dim for dim, name in enumerate(own) if name not in out), 0)


def factors(use: fx.Node) -> list[fx.Node]:
    """The nodes of the two factors of a product; none if the node is no product."""
    name = operation_name(use, None) if use.op in ("call_function", "call_method") else None
    operands = factors_in(name, use.args)
    return operands if all(isinstance(operand, fx.Node) for operand in operands) else []


def factors_in(name: str | None, args: Sequence[Any]) -> list[Any]:
    """The two factors among the arguments of a product; none of another operation."""
    factors = args[FIRST_FACTOR[name] :][:2] if name in FIRST_FACTOR else ()
    if len(factors) == 1 and isinstance(factors[0], (list, tuple)):
        factors = factors[0]
    return list(factors) if len(factors) == 2 else []


def named_dims(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Sequence[int], rank: int
) -> tuple[list[list[str]], list[str]]:
    """Names for the dimensions of a product's two operands, and for those of its result.

    ``args``, ``kwargs``: the call's; ``ranks``, ``rank``: numbers of dimensions. `ValueError` for other forms.
    """
    if name == "tensordot":
        dims: Any = args[2] if len(args) > 2 else kwargs.get("dims", 2)
        if isinstance(dims, int):
            dims = range(ranks[0] - dims, ranks[0]), range(dims)
        one, other = ([f"{side}{d}" for d in range(size)] for side, size in zip("xy", ranks, strict=True))
        for d, summed in zip(*dims, strict=True):
            other[summed] = one[d]
        return [one, other], [name for name in one + other if not (name in one and name in other)]
    if name == "einsum":
        equation = str(args[0])
        inputs, _, out = equation.replace(" ", "").partition("->")
        sides = zip((*inputs.split(","), out), (*ranks, rank), strict=True)
        left, right, made = (_spelled_out(names, size) for names, size in sides)
        if "->" not in equation or any(len(set(names)) != len(names) for names in (left, right, made)):
            raise ValueError("no result is named, or an operand's diagonal is taken")
        return [left, right], made
    rows, columns = (["y"] if ranks[0] > 1 else []), (["z"] if ranks[1] > 1 else [])  # a vector has none
    batch = [f"x{d}" for d in range(rank - len(rows) - len(columns))]
    full = [*batch, *rows, "k"], ["z", "k"] if name == "linear" else [*batch, "k", *columns]
    names = [side[len(side) - size :] for side, size in zip(full, ranks, strict=True)]
    return names, [*batch, *rows, *columns]


def _spelled_out(names: str, rank: int) -> list[str]:
    """The names, with an ellipsis spelled out; its last dimensions have the same names in all operands."""
    left = rank - len(names.replace("...", ""))
    return list(names.replace("...", "ABCDEFGHIJ"[10 - left :] if left else ""))


def _way_back(node: fx.Node) -> list[fx.Node]:
    """The node, and the sources that it is moved from. The last one is a parameter, or no movement."""
    way = [node]
    while (_moves(way[-1]) or way[-1].target in EVERY_MASK) and isinstance(
        source := way[-1].args[0], fx.Node
    ):
        way.append(source)
    return way


def weight_views(module: fx.GraphModule, shape_of: ShapeOf) -> dict[fx.Node, WeightView]:
    """The views that only layers read, as their weights, and along the same dimension of the parameter."""
    views = parameter_views(module, shape_of)
    read, others = defaultdict[fx.Node, set[int | None]](set), set[fx.Node]()
    for node, view in views.items():
        for user in node.users:
            if weight_of(user) is node and user.all_input_nodes.count(node) == 1:
                read[view.first].add(view.dims[contracted(user, shape_of)])
            elif not is_question(user) and user not in views:
                others.add(view.first)
    alike = {first for first, dims in read.items() if len(dims) == 1} - others
    return {node: view for node, view in views.items() if view.first in alike}


def parameter_views(module: fx.GraphModule, shape_of: ShapeOf) -> dict[fx.Node, WeightView]:
    """The nodes that only move a parameter's dimensions, and add or drop some of size 1.

    ``shape_of``: the shape of a node's tensor, or None.
    """
    views: dict[fx.Node, WeightView] = {}
    for node in module.graph.nodes:
        tensor = held(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(tensor, nn.Parameter) and tensor.numel():
            views[node] = WeightView(node, node, tuple(range(tensor.dim())))
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in views:
            continue
        before = views[source]
        if node.target in EVERY_MASK:  # may stand between a parameter and the movements
            views[node] = before
            continue
        dims = _moved(node, before.dims, shape_of(source), shape_of(node)) if _moves(node) else None
        if dims is not None:
            first = node if before.first is before.source else before.first
            views[node] = WeightView(before.source, first, dims)
    return {n: v for n, v in views.items() if v.first is not v.source and n.target not in EVERY_MASK}


def first_movement(module: fx.GraphModule, weight: fx.Node, name: str) -> tuple[fx.Node, fx.Node] | None:
    """The first movement of parameter ``name``, and the node that reads it; None if ``weight`` is no view."""
    *way, source = _way_back(weight)
    moves = [node for node in way if node.target not in EVERY_MASK]
    if not moves or source.op != "get_attr" or canonical_names(module).get(str(source.target)) != name:
        return None
    return moves[-1], source


def _moves(node: fx.Node) -> bool:
    """Does the node only move, add or drop dimensions, provided that it keeps all elements?"""
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    name = operation_name(node, None) if node.op in ("call_function", "call_method") else None
    index = node.args[1] if name == "getitem" else ()
    return name in _MOVES and all(
        isinstance(i, _INDICES) for i in (index if isinstance(index, tuple) else (index,))
    )


def _moved(node: fx.Node, dims: Dims, before: Shape | None, after: Shape | None) -> Dims | None:
    """For each dimension of the node's tensor, the parameter's; None if the node splits or merges dimensions."""
    if before is None or after is None:
        return None
    if node.target is getattr or has(operation_name(node, None), Trait.PERMUTES):
        followed = len(node.all_input_nodes) == 1 and (len(before) == 2 or "T" not in node.args)
        return tuple(dims[d] for d in order_of(node, len(before))) if followed else None
    wide = [(size, dim) for size, dim in zip(before, dims, strict=True) if size > 1]
    thin = [dim for size, dim in zip(before, dims, strict=True) if size == 1 and dim is not None]
    if [size for size, _ in wide] != [size for size in after if size > 1]:
        return None
    return tuple((wide.pop(0)[1] if size > 1 else thin.pop(0) if thin else None) for size in after)


def order_of(node: fx.Node, rank: int) -> list[int]:
    """For each dimension of a permuted tensor, the dimension of the input."""
    ruler = torch.empty(_RULER[:rank], device="meta")
    run: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return [_RULER.index(size) for size in run(ruler, *node.args[1:], **node.kwargs).shape]


def is_question(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] in _QUESTIONS
    return node.target in _QUESTIONS
