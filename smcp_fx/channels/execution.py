"""Operations executed on label tensors, and on positions, which show where a movement puts elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.channels.labels import along
from smcp_fx.channels.propagation import Propagation
from smcp_fx.channels.trail import Call, ConstantRef, ParameterRef
from smcp_fx.tracing.trees import mapped


def execute(call: Call, args: Any, kwargs: Any) -> Any:
    """Run the node's own operation on label tensors."""
    if call.module is not None:
        return call.module(*args, **kwargs)
    return perform(call.node, args, kwargs)


def perform(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run a function or method node on label tensors. `view` runs as `reshape`: labels have other strides."""
    if node.op == "call_method":
        name = {"view": "reshape", "view_as": "reshape_as"}.get(str(node.target), str(node.target))
        return getattr(args[0], name)(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def known_values(tree: Any) -> Any:
    """Return the arguments, with constants of integers and booleans as tensors."""
    return mapped(lambda v: v.value if isinstance(v, ConstantRef) else v, tree)


def labelled(run: Propagation, tree: Any) -> Any:
    """The arguments with parameters replaced by the labels of their elements."""
    return mapped(lambda v: run.of(v) if isinstance(v, ParameterRef) else v, tree)


def moved(
    module: fx.GraphModule, node: fx.Node, values: Mapping[str, Any], positions: Tensor | None = None
) -> Any:
    """Run a movement on the ``values`` of its operands, by node name, to see where it puts elements.

    ``positions``: takes the place of the first operand.
    """
    first = node.args[0] if positions is not None else None
    operands = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: positions if n is first else values[n.name]
    )
    target = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    args, kwargs = known_values(operands)
    return target(*args, **kwargs) if target is not None else perform(node, args, kwargs)


def positions_along(shape: Sequence[int], dim: int) -> Tensor:
    """For each element of a tensor of the shape, its position along ``dim``."""
    return along(torch.arange(shape[dim]), shape, dim)
