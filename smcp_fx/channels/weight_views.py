"""Weights that layers read through a movement of their dimensions: transposed, or with dimensions of size 1.

    F.linear(z, self.encode.weight.t())      F.conv2d(x, self.project.weight[:, :, None, None])

Each dimension of such a view is one of the parameter's, or has size 1. For the channel graph, a layer that reads the
view reads the parameter along other dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from smcp_fx.masking.masks import EVERY_MASK
from smcp_fx.tracing.operations import operation_name
from smcp_fx.tracing.recurrent import recurrent_weight
from smcp_fx.tracing.traits import Trait, operations_with
from smcp_fx.tracing.values import held

LAYERS: tuple[Callable[..., object], ...] = (
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.linear,
    recurrent_weight,
)
_MOVES = operations_with(Trait.RESHAPES | Trait.PERMUTES) | {"contiguous", "getitem", "squeeze", "unsqueeze"}
_ATTRIBUTES = ("T", "mT")
_MASKS = EVERY_MASK  # may stand between a parameter and the movements
_QUESTIONS = ("size", "dim", "numel", "ndim", "shape")
#: Products of two tensors, and the place of the first factor among their arguments.
FIRST_FACTOR = {"matmul": 0, "mm": 0, "bmm": 0, "tensordot": 0, "einsum": 1, "addmm": 1, "baddbmm": 1}
#: For each dimension of a view, the parameter's dimension; None for an added dimension of size 1.
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class WeightView:
    """``chain``: the nodes from the parameter ``source`` on to what a layer reads.

    ``dims``: the dimensions of each node of the chain.
    """

    source: fx.Node
    chain: tuple[fx.Node, ...]
    dims: tuple[Dims, ...]


def weight_of(use: fx.Node) -> fx.Node | None:
    """The weight that a functional call of a layer reads; None if the node is no such call."""
    if is_layer(use):
        weight = weight_and_bias(use)[0]
        return weight if isinstance(weight, fx.Node) else None
    operands = factors(use)
    return next((operand for operand in reversed(operands) if _leads_to_parameter(operand)), None)


def is_layer(use: fx.Node) -> bool:
    """Is it a functional call of a layer, with a weight and a bias?"""
    return use.op == "call_function" and (use.target in LAYERS or _is_deformable(use))


def weight_and_bias(use: fx.Node) -> tuple[Any, Any]:
    """The weight and the bias of a functional call of a layer; None for an argument that is missing."""
    places = ((1, "weight"), (4 if _is_deformable(use) else 2, "bias"))
    weight, bias = (
        use.args[place] if len(use.args) > place else use.kwargs.get(name) for place, name in places
    )
    return weight, bias


def _is_deformable(use: fx.Node) -> bool:
    return (
        getattr(use.target, "__name__", "") == "deform_conv2d" and operation_name(use, None) == "deformconv2d"
    )


def contracted(use: fx.Node, rank: int) -> int:
    """The dimension of its weight that a functional call of a layer sums over; the weight has ``rank`` dimensions."""
    if is_layer(use):
        return 0 if "transpose" in str(getattr(use.target, "__name__", "")) else 1
    place = factors(use).index(weight_of(use))  # type: ignore[arg-type]
    if operation_name(use, None) == "einsum":
        inputs, _, out = str(use.args[0]).replace(" ", "").partition("->")
        names = inputs.split(",")[place]
        return next((d for d, name in enumerate(names) if name not in out), 0)
    if operation_name(use, None) == "tensordot":
        dims = use.args[2] if len(use.args) > 2 else use.kwargs["dims"]
        return rank - 1 if dims == 1 and place == 0 else 0 if dims == 1 else int(dims[place][0])  # type: ignore[index, arg-type]
    return rank - 1 if place == 0 else max(rank - 2, 0)


def factors(use: fx.Node) -> list[fx.Node]:
    """The nodes of the two factors of a product; none if the node is no product."""
    name = operation_name(use, None) if use.op in ("call_function", "call_method") else None
    operands = factors_in(name, use.args)
    return operands if all(isinstance(operand, fx.Node) for operand in operands) else []


def factors_in(name: str | None, args: Sequence[Any]) -> list[Any]:
    """The two factors among the arguments of a product; none of another operation."""
    given = args[FIRST_FACTOR[name] :][:2] if name in FIRST_FACTOR else ()
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = given[0]
    return list(given) if len(given) == 2 else []


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


def _leads_to_parameter(node: fx.Node) -> bool:
    """Is the node a parameter, or a parameter with moved dimensions?"""
    while (_moves(node) or node.target in _MASKS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr"


def weight_views(module: fx.GraphModule) -> dict[fx.Node, WeightView]:
    """The views that layers read, by the node of the view."""
    found: dict[fx.Node, WeightView] = {}
    for use in module.graph.nodes:
        weight = weight_of(use)
        if weight is not None and weight not in found:
            view = weight_view(module, weight)
            if view is not None:
                found[weight] = view
    while lost := [end for end, view in found.items() if not _read_alike(view, found)]:
        for end in lost:
            del found[end]
    return found


def weight_view(module: fx.GraphModule, weight: fx.Node) -> WeightView | None:
    """How the node moves a parameter's dimensions; None if it is the parameter itself, or does more than that."""
    chain: list[fx.Node] = []
    node = weight
    while _moves(node) or node.target in _MASKS:
        if node.target not in _MASKS:
            chain.insert(0, node)
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        node = source
    if node.op != "get_attr" or not chain:
        return None
    parameter = held(module, str(node.target))
    if not isinstance(parameter, nn.Parameter) or parameter.numel() == 0:
        return None
    ruler = torch.empty(parameter.shape, device="meta")  # its strides identify its dimensions
    known: dict[fx.Node, Any] = {node: ruler}
    try:
        found = [_dims(_evaluated(link, known), ruler) for link in chain]
    except (
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # an argument does not follow from the parameter
        return None
    dims = tuple(places for places in found if places is not None)
    return WeightView(node, tuple(chain), dims) if len(dims) == len(chain) else None


def _moves(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    called = node.op in ("call_function", "call_method")
    return called and operation_name(node, None) in _MOVES


def _evaluated(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The node's value for the ruler in ``known``; raises `LookupError` if it needs any other tensor."""
    if node in known:
        return known[node]
    first = node.args[0] if node.args else None
    if node.op == "get_attr" and any(node.target == source.target for source in known):
        return next(known[source] for source in known if node.target == source.target)
    if not (_moves(node) or is_question(node) or node.target in _MASKS) or not isinstance(first, fx.Node):
        raise LookupError(node.name)
    value = _evaluated(first, known)
    if node.target not in _MASKS and operation_name(node, None) != "contiguous":
        args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), lambda n: _evaluated(n, known))
        if node.op == "call_method":
            value = getattr(value, str(node.target))(*args, **kwargs)
        else:
            assert callable(node.target)
            value = node.target(value, *args, **kwargs)
    known[node] = value
    return value


def _dims(view: Tensor, ruler: Tensor) -> Dims | None:
    """The ruler's dimension for each dimension of a view; None if the view splits or merges dimensions."""
    if view.numel() != ruler.numel() or not (view is ruler or view._base is ruler):
        return None
    wide = [d for d in range(ruler.dim()) if ruler.shape[d] > 1]
    thin = [d for d in range(ruler.dim()) if ruler.shape[d] == 1]
    found: list[int | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            found.append(thin.pop(0) if thin else None)
            continue
        same = [d for d in wide if ruler.shape[d] == size and ruler.stride(d) == stride]
        if len(same) != 1:
            return None
        found.append(same[0])
    return tuple(found) if all(d in found for d in wide) else None


def _read_alike(view: WeightView, views: dict[fx.Node, WeightView]) -> bool:
    """Do only layers read the nodes of the chain, as weights, and along the same dimension of the parameter?"""
    read: set[int | None] = set()
    for node, dims in zip(view.chain, view.dims, strict=True):
        for user in node.users:
            if weight_of(user) is node and user.all_input_nodes.count(node) == 1 and node in views:
                read.add(dims[contracted(user, len(dims))])
            elif not is_question(user) and not any(user in other.chain for other in views.values()):
                return False
    return len(read) == 1


def is_question(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] in _QUESTIONS
    return node.target in _QUESTIONS
