"""How many parts `split`, `unbind` and their like give: fixed by the model, or by the example's sizes?

q, k, v = qkv.reshape(b, n, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)     three, whatever the input
for tile in x.split(8, dim=3)                                             as many as the width holds
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.channels.operations import operation_name

_SPLITS = {"split", "unbind", "chunk", "unsafesplit", "unsafechunk", "hsplit", "vsplit", "dsplit"}
#: Operations that keep the size of every dimension.
_SAME_SIZES = frozenset(
    """
relu relu6 leakyrelu elu selu celu gelu silu mish sigmoid tanh softmax logsoftmax hardswish hardsigmoid hardtanh
dropout dropout2d identity contiguous batchnorm layernorm groupnorm instancenorm normalize clone detach float half to
typeas prelu softplus clamp abs neg exp sqrt square zeroslike oneslike emptylike fulllike randnlike maskedfill
""".split()
)
_ARITHMETIC = {"add", "sub", "mul", "div"}
_FACTORIES = {"zeros", "ones", "empty", "randn", "rand"}
_SIZED = _FACTORIES | {"view", "reshape", "newzeros", "newones", "newempty"}
_CONVOLUTIONS = {f"conv{rank}d" for rank in (1, 2, 3)} | {f"convtranspose{rank}d" for rank in (1, 2, 3)}


def may_vary(node: fx.Node, model: nn.Module, value: Callable[[fx.Node], Any]) -> bool:
    """May the node give another number of parts for other sizes? ``value`` tells nodes' values on the example."""
    name = _name(node, model)
    source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("tensor"))
    if name not in _SPLITS or not isinstance(source, fx.Node):
        return False
    asked = _argument(node, 1, "chunks", "split_size", "split_size_or_sections", "sections")
    if name != "unbind" and isinstance(asked, (tuple, list)):
        return False
    dim = _argument(node, 1 if name == "unbind" else 2, "dim")
    tensor = value(source)
    place = {"hsplit": 1, "vsplit": 0, "dsplit": 2}.get(name, 0 if dim is None else dim)
    if not isinstance(tensor, Tensor) or not isinstance(place, int):
        return True
    return not is_fixed(source, place % tensor.dim(), model, value)


def is_fixed(node: fx.Node, dim: int, model: nn.Module, value: Callable[[fx.Node], Any]) -> bool:
    """Is the size of this dimension in the model's code or parameters, so that no input changes it?"""
    while node.op != "get_attr":
        name = _name(node, model) or ""
        source = node.args[0] if node.args else None
        if name in _CONVOLUTIONS:
            return dim == value(node).dim() - int(name[-2]) - 1
        if name in ("linear", "embedding") and dim == value(node).dim() - 1:
            return True
        if name in _SIZED:
            return _is_written(node.args[name not in _FACTORIES :], dim)
        if not isinstance(source, fx.Node) or not isinstance(value(source), Tensor):
            return False
        rank = value(source).dim()
        if name == "permute":
            order = _flat(node.args[1:])
            if not all(type(place) is int for place in order):
                return False
            dim = order[dim] % rank
        elif (
            name == "transpose" and all(type(place) is int for place in node.args[1:]) and len(node.args) == 3
        ):
            pair: list[Any] = [place % rank for place in node.args[1:]]  # type: ignore[operator]
            dim = pair[1 - pair.index(dim)] if dim in pair else dim
        elif name in _ARITHMETIC:  # broadcasting changes no size but 1
            if rank != value(node).dim() or value(source).shape[dim] == 1:
                return False
        elif name not in _SAME_SIZES and name != "linear":
            return False
        node = source
    return True


def is_fixed_number(node: fx.Node, model: nn.Module, value: Callable[[fx.Node], Any]) -> bool:
    """Does the number follow from such sizes alone?"""
    todo = [node]
    while todo:
        here = todo.pop()
        source, dim = (*here.args, None, None)[:2]
        if here.op == "call_function" and here.target is operator.getitem and isinstance(source, fx.Node):
            asked = source.target is getattr and source.args[1] == "shape"
            source = source.args[0] if asked else None
        elif here.op == "call_function" and getattr(here.target, "__module__", "") in ("_operator", "math"):
            todo += here.all_input_nodes
            continue
        elif here.op != "call_method" or here.target != "size":
            return False
        tensor = value(source) if isinstance(source, fx.Node) else None
        if not isinstance(tensor, Tensor) or type(dim) is not int:
            return False
        if not is_fixed(source, dim % tensor.dim(), model, value):  # type: ignore[arg-type]
            return False
    return True


def _is_written(sizes: Any, dim: int) -> bool:
    """Is the size of the dimension a number in the arguments of `view`, `zeros` and their like?"""
    flat = _flat(sizes)
    return dim < len(flat) and type(flat[dim]) is int and flat[dim] > 0


def _flat(arguments: Any) -> list[Any]:
    return list(arguments[0] if arguments and isinstance(arguments[0], (tuple, list)) else arguments)


def _name(node: fx.Node, model: nn.Module) -> str | None:
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    return operation_name(node, module)


def _argument(node: fx.Node, position: int, *names: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)
