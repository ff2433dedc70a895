"""Operations run on label tensors, as they are."""

from __future__ import annotations

from typing import Any

from torch import fx

from smcp_fx.channels.trail import Call, ConstantRef
from smcp_fx.tracing.trees import mapped


def execute(call: Call, args: Any, kwargs: Any) -> Any:
    """Run the node's own operation on label tensors."""
    if call.module is not None:
        return call.module(*args, **kwargs)
    return perform(call.node, args, kwargs)


def perform(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run a function or method node on label tensors, whose strides refuse `view`: it runs as `reshape`."""
    if node.op == "call_method":
        name = {"view": "reshape", "view_as": "reshape_as"}.get(str(node.target), str(node.target))
        return getattr(args[0], name)(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def known_values(tree: Any) -> Any:
    """Return the arguments, with constants of integers and booleans as tensors."""
    return mapped(lambda v: v.value if isinstance(v, ConstantRef) else v, tree)
