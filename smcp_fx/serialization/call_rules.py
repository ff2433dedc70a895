"""Rules for the methods that a saved model's graph may call: tensor methods only on tensors.

Generated code calls methods by name, not by type. So each node gets a kind: ``tensor`` (one or more tensors,
or a number made from one), ``input`` (an argument of the model), ``size``, ``device``, ``dtype``, ``range``
(of a dtype), or ``plain`` (numbers, strings, tuples and lists from the file itself).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.serialization.safe_operations import ATTRIBUTES, DICT_METHODS, SIZE_METHODS, tensor_methods

_OF_TENSORS = ("tensor", "input")
_SIZES = ("size", "stride")
#: Operators allowed on strings; the others format, repeat or join them.
_WITH_STRINGS = ("contains", "eq", "getitem", "is_", "is_not", "ne", "setitem")
#: Operators that make a value of any size from two constants, and the largest constant they may have.
_GROWING, _LARGEST = ("lshift", "mul", "imul", "pow", "ipow"), 1 << 16


def check_calls(graph: fx.Graph, root: nn.Module, names: dict[fx.Node, str]) -> None:
    """Raise `CheckpointError` for a call that is not an operation on tensors, sizes and numbers.

    ``names`` holds the saved name of each node's function.
    """
    kinds: dict[fx.Node, str] = {}
    for node in graph.nodes:
        kinds[node] = _kind(node, names.get(node, ""), root, kinds)


def _kind(node: fx.Node, function: str, root: nn.Module, kinds: dict[fx.Node, str]) -> str:
    if node.op == "placeholder":
        default = node.args[0] if node.args else None
        return "plain" if default and isinstance(default, (str, tuple, list, dict)) else "input"
    if node.op == "get_attr":
        return "tensor" if isinstance(_value(root, str(node.target)), Tensor) else "plain"
    first = node.args[0] if node.args else None
    kind = kinds[first] if isinstance(first, fx.Node) else "plain"
    if node.op == "call_method":
        return _method(node, kind)
    if function == "builtins.getattr":
        return _attribute(node, kind)
    if function == "smcp_fx.tracing.modes.by_mode":
        sides = [_of(side, kinds) for side in node.args[1:] if side is not None]
        return sides[0] if len(set(sides)) == 1 else "plain"
    if function in ("torch.finfo", "torch.iinfo"):
        return "range"
    space, _, name = function.rpartition(".")
    if space == "operator":
        return _operator(node, name, kind, kinds)
    if space == "math":
        return "plain"
    if node.op == "call_function" and space.startswith("torch") and not space.startswith("torchvision"):
        return "tensor"
    # Modules and leaf functions may return their argument (`nn.Identity`).
    return "tensor" if kind in _OF_TENSORS else "plain"


def _of(value: Any, kinds: dict[fx.Node, str]) -> str:
    return kinds[value] if isinstance(value, fx.Node) else "plain"


def _method(node: fx.Node, kind: str) -> str:
    name = str(node.target)
    if kind in _OF_TENSORS and name in tensor_methods():
        if name == "to" and any(isinstance(arg, str) for arg in node.args[1:]):
            raise _refused(
                node, "`to` with a device as a string; use torch.device(...) or another tensor's device"
            )
        return "size" if name in _SIZES else "tensor"
    if kind == "input" and name in DICT_METHODS:
        return "input"
    if kind == "size" and name in SIZE_METHODS:
        return "plain"
    if kind in _OF_TENSORS or name not in tensor_methods():
        raise _refused(
            node,
            f"the method {name!r} is not one that a saved model may call; write it with tensor operations",
        )
    raise _refused(
        node, f"the method {name!r} would be called on something other than a tensor; use a function of torch"
    )


def _attribute(node: fx.Node, owner: str) -> str:
    name = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    kind = ATTRIBUTES.get(owner, {}).get(name) if isinstance(name, str) else None
    if kind is None and owner == "input":
        raise _refused(
            node,
            f"the input has an attribute {str(name)[:80]!a}, so it is of a class of your own, which a saved model "
            "cannot make: let forward take tensors, tuples or dicts",
        )
    if kind is None:
        raise _refused(
            node,
            f"the attribute {str(name)[:80]!a} of a value of kind {owner!r} is not one that a saved model may read; "
            "compute it with tensor operations, or in __init__",
        )
    return kind


def _operator(node: fx.Node, name: str, kind: str, kinds: dict[fx.Node, str]) -> str:
    if name in ("getitem", "setitem"):
        return kind if name == "getitem" and kind != "size" else "plain"
    if name not in _WITH_STRINGS and any(isinstance(value, str) for value in node.args):
        raise _refused(node, f"operator.{name} of a string is not an operation on tensors")
    if any(kinds[value] in _OF_TENSORS for value in node.args if isinstance(value, fx.Node)):
        return "tensor"
    if name in _GROWING and any(isinstance(value, int) and abs(value) > _LARGEST for value in node.args):
        raise _refused(
            node, f"operator.{name} of a constant above {_LARGEST} makes more than a network needs"
        )
    return "plain"


def _value(root: nn.Module, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    parent = root.get_submodule(owner)
    return {**vars(parent), **parent._buffers, **parent._parameters}.get(name)


def _refused(node: fx.Node, why: str) -> CheckpointError:
    return CheckpointError(f"{place_of(node)}: {why}")


def place_of(node: fx.Node) -> str:
    """Return a node's name, with the module whose forward made it, if known."""
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return f"node {node.name!r} (in module {path!r})" if path else f"node {node.name!r}"
