"""What is rewritten in a fresh trace, so that rules and passes meet fewer ways to say one thing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.channels.operations import operation_name
from smcp_fx.channels.trail import TensorInfo

_EXPANSIONS = {"expand", "expandas", "broadcastto", "repeat"}
#: Methods that change their tensor's shape, and do what they do out of place, too.
_RESHAPED = {"unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_"}


def normalise(model: nn.Module, graph: fx.Graph) -> None:
    """First arguments by position, so that rules and passes find them; `nn.Unflatten` as the function it is.

    `h.unsqueeze_(1)` becomes `h = h.unsqueeze(1)`: no tensor has two shapes.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _RESHAPED and isinstance(node.args[0], fx.Node):
            node.target = str(node.target).rstrip("_")
            for user in [user for user in node.args[0].users if place[user] > place[node]]:
                user.replace_input_with(node.args[0], node)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        kwargs = dict(node.kwargs)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        called = node.target if module is None else module.forward
        for name in ("input", "tensors", "tensor"):
            if not node.args and name in kwargs and _is_first(called, name):
                node.args = (kwargs.pop(name),)
        for name in ("shape", "size"):
            sizes = kwargs.get(name)
            by_keyword = len(node.args) == 1 and isinstance(sizes, (tuple, list))
            if by_keyword and node.target in (torch.reshape, torch.broadcast_to):
                node.args = (*node.args, kwargs.pop(name))
        if len(node.args) == 1 and node.target is torch.unflatten and {"dim", "sizes"} <= kwargs.keys():
            node.args = (*node.args, kwargs.pop("dim"), kwargs.pop("sizes"))
        node.kwargs = kwargs
        if type(module) is nn.Unflatten and isinstance(module.dim, int):
            node.op, node.target = "call_function", torch.unflatten
            node.args = (node.args[0], module.dim, tuple(module.unflattened_size))
    for node in graph.nodes:
        if node.op == "call_method" and len(node.args) == 1:
            names = {
                "view": ["size"],
                "reshape": ["shape"],
                "expand": ["size"],
                "unflatten": ["dim", "sizes"],
            }
            wanted = names.get(str(node.target), [])
            if wanted and all(name in node.kwargs for name in wanted):
                node.args = (*node.args, *(node.kwargs[name] for name in wanted))
                node.kwargs = {k: v for k, v in node.kwargs.items() if k not in wanted}


def _is_first(function: Callable[..., Any], name: str) -> bool:
    """Is this the function's first parameter? Those of torch that do not say take their input first, but for two."""
    try:
        return next(iter(inspect.signature(function).parameters), None) == name
    except (TypeError, ValueError):
        return function not in (torch.where, torch.searchsorted)


def drop_expansions(traced: fx.GraphModule, values: dict[str, Any]) -> None:
    """Leave the spreading of one value over the channels to the arithmetic that reads it.

    before   gate.expand_as(x) * x      after   gate * x

    An expanded gate would need as many channels as ``x`` keeps; one that broadcasts needs nothing.
    """
    changed = False
    for node in list(traced.graph.nodes):
        name = None if node.op == "call_module" else operation_name(node, None)
        source = node.args[0] if node.args else None
        info, held = values.get(node.name), values.get(source.name) if isinstance(source, fx.Node) else None
        if name not in _EXPANSIONS or not isinstance(info, TensorInfo) or not isinstance(held, TensorInfo):
            continue
        padded = (1,) * (len(info.shape) - len(held.shape)) + held.shape
        spread = all(a in (1, b) for a, b in zip(padded, info.shape, strict=True))
        if spread and node.users and all(_broadcasts(user, node, info.shape, values) for user in node.users):
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)
            changed = True
    if changed:
        traced.recompile()


def _broadcasts(user: fx.Node, node: fx.Node, shape: tuple[int, ...], values: dict[str, Any]) -> bool:
    """Does the user's arithmetic give the same when ``node`` is not spread to ``shape`` before?"""
    if user.op == "call_module" or operation_name(user, None) not in ("add", "sub", "mul", "div"):
        return False
    others = [values.get(n.name) for n in user.all_input_nodes if n is not node]
    in_place = str(getattr(user.target, "__name__", user.target)).endswith("_") and user.args[0] is node
    return not in_place and any(isinstance(other, TensorInfo) and other.shape == shape for other in others)
