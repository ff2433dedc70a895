"""How many parts `split`, `unbind` and their like give: fixed by the model, or by the example's sizes?

q, k, v = qkv.reshape(b, n, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)     three, whatever the input
for tile in x.split(8, dim=3)                                             as many as the width holds
"""

from __future__ import annotations

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
typeas prelu softplus clamp abs neg exp sqrt square
""".split()
)
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
    if name in ("chunk", "unsafechunk") and asked == len(value(node)):
        return False  # a larger dimension gives no more, and where a smaller one does, a part that is missing is told
    dim = _argument(node, 1 if name == "unbind" else 2, "dim")
    tensor = value(source)
    place = {"hsplit": 1, "vsplit": 0, "dsplit": 2}.get(name, 0 if dim is None else dim)
    if not isinstance(tensor, Tensor) or not isinstance(place, int):
        return True
    return not _is_fixed(source, place % tensor.dim(), model, value)


def _is_fixed(node: fx.Node, dim: int, model: nn.Module, value: Callable[[fx.Node], Any]) -> bool:
    """Is the size of this dimension in the model's code or parameters, so that no input changes it?"""
    while True:
        if node.op == "get_attr":
            return True
        name = _name(node, model)
        source = node.args[0] if node.args else None
        if name in ("linear", "embedding"):
            return dim == value(node).dim() - 1 or (
                name == "linear" and _is_fixed_in(source, dim, model, value)
            )
        if name in _CONVOLUTIONS:
            return dim == value(node).dim() - int(name[-2]) - 1
        if name in ("view", "reshape"):
            sizes = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
            return (
                isinstance(sizes, (tuple, list))
                and dim < len(sizes)
                and type(sizes[dim]) is int
                and sizes[dim] > 0
            )
        if not isinstance(source, fx.Node):
            return False
        rank = value(source).dim() if isinstance(value(source), Tensor) else 0
        if name == "permute":
            order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
            if not all(type(place) is int for place in order):
                return False
            dim = order[dim] % rank  # type: ignore[operator]
        elif (
            name == "transpose"
            and all(type(place) is int for place in node.args[1:3])
            and len(node.args) == 3
        ):
            pair = [place % rank for place in node.args[1:3]]  # type: ignore[operator]
            dim = pair[1 - pair.index(dim)] if dim in pair else dim
        elif name not in _SAME_SIZES:
            return False
        node = source


def _is_fixed_in(source: Any, dim: int, model: nn.Module, value: Callable[[fx.Node], Any]) -> bool:
    return isinstance(source, fx.Node) and _is_fixed(source, dim, model, value)


def _name(node: fx.Node, model: nn.Module) -> str | None:
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    return operation_name(node, module)


def _argument(node: fx.Node, position: int, *names: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)
