"""Weights that are computed from parameters each time the network runs: weight standardisation and its like.

    before   w = batch_norm(weight.reshape(1, out, -1), ..., gain); w = w.reshape(weight.shape); conv2d(x, w, bias)

What a convolution or linear reads is then a function of parameters alone. To the channel graph it is a weight like
any other, under the name of the parameter that has its shape; converting replaces the function by its value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.channels.weight_views import LAYERS, weight_view
from smcp_fx.tracing.values import held


@dataclass(frozen=True)
class ComputedWeight:
    """``result`` computes a weight from the parameter ``name`` (and others) by way of the nodes ``through``."""

    result: fx.Node
    name: str
    through: tuple[fx.Node, ...]  # in the order they run, the reads of parameters and ``result`` among them


def computed_weights(
    module: fx.GraphModule, transparent: tuple[Callable[..., object], ...] = ()
) -> list[ComputedWeight]:
    """Find them. ``transparent``: functions that may stand between a weight and its layer (masks)."""
    found: dict[fx.Node, ComputedWeight] = {}
    for use in module.graph.nodes:
        if use.op != "call_function" or use.target not in LAYERS:
            continue
        weight = use.args[1] if len(use.args) > 1 else use.kwargs.get("weight")
        while isinstance(weight, fx.Node) and weight.target in transparent:
            weight = weight.args[0]
        if isinstance(weight, fx.Node) and weight not in found:
            if weight_view(module, weight) is not None:
                continue
            computed = _computed(module, weight, transparent)
            if computed is not None:
                found[weight] = computed
    return list(found.values())


def _computed(
    module: fx.GraphModule, result: fx.Node, transparent: tuple[Callable[..., object], ...]
) -> ComputedWeight | None:
    if result.op not in ("call_function", "call_method"):
        return None
    through, stack = {result}, [result]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.op in ("placeholder", "call_module"):
                return None
            if source not in through:
                through.add(source)
                stack.append(source)
    # Sizes of the weight may be read from outside; the values it is made of may not.
    for node in through - {result}:
        for user in node.users:
            if (
                user not in through
                and user.target is not getattr
                and user.target not in ("size", "dim", "numel")
            ):
                return None
    if any(user.target not in LAYERS and user.target not in transparent for user in _readers(result)):
        return None
    ordered = tuple(node for node in module.graph.nodes if node in through)
    with torch.no_grad():
        value = evaluate(module, ordered)
    if not isinstance(value, torch.Tensor):
        return None
    parameters = {
        str(node.target): held(module, str(node.target)) for node in through if node.op == "get_attr"
    }
    names = [n for n, p in parameters.items() if isinstance(p, nn.Parameter) and p.shape == value.shape]
    if len(names) != 1 or id(parameters[names[0]]) in _read_by(module, through):
        return None
    return ComputedWeight(result, names[0], ordered)


def _read_by(module: fx.GraphModule, left_out: set[fx.Node]) -> set[int]:
    """The ids of the parameters that the graph's other nodes read, under whatever name, those of modules included."""
    found: set[int] = set()
    for node in module.graph.nodes:
        if (
            node in left_out
            or node.op not in ("get_attr", "call_module")
            or (node.op == "get_attr" and not node.users)
        ):
            continue
        target = str(node.target)
        read = module.get_submodule(target) if node.op == "call_module" else held(module, target)
        found.update(map(id, read.parameters()) if isinstance(read, nn.Module) else [id(read)])
    return found


def evaluate(module: fx.GraphModule, nodes: tuple[fx.Node, ...]) -> Any:
    """The value of the last of these nodes, which read nothing but parameters."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op == "get_attr":
            values[node] = held(module, str(node.target))
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    return values[nodes[-1]]


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is not getattr and user.target not in ("size", "dim")]
