"""Values of nodes that only read the model's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.tracing.modes import is_by_mode
from smcp_fx.tracing.operations import result_of
from smcp_fx.tracing.values import held


def overwritten(parameter: Tensor, value: Tensor) -> Tensor:
    """Write the value into the parameter's memory, and return the parameter, which gets the gradient."""
    parameter.data.copy_(value.detach())
    return parameter


def ancestors(node: fx.Node) -> frozenset[fx.Node]:
    """The node, and all nodes that it is computed from."""
    nodes, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in nodes:
                nodes.add(source)
                todo.append(source)
    return frozenset(nodes)


def computed_value(
    module: nn.Module, nodes: tuple[fx.Node, ...], replaced: Mapping[fx.Node, Tensor] | None = None
) -> Any:
    """The value of the last of these nodes in eval mode. They only read parameters, and write nothing.

    ``replaced``: given values of some nodes, which are not computed.
    """
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if node in (replaced or {}):
            values[node] = replaced[node]  # type: ignore[index]
            continue
        if node.op == "get_attr":
            values[node] = held(module, str(node.target))
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target is overwritten or is_by_mode(node):
            values[node] = args[1]
        else:
            called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
            values[node] = result_of(node, called, args, kwargs)
    return values[nodes[-1]]
