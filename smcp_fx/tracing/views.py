"""Which writes of an operation are visible elsewhere: those into inputs of the graph, and into views of tensors."""

from __future__ import annotations

from torch import fx

from smcp_fx.tracing.operations import normal_name, operation_name
from smcp_fx.tracing.traits import Trait, has


def may_be_seen(node: fx.Node) -> bool:
    """May a write into the node's tensor show in another tensor that is not named by this node?"""
    if node.op in ("placeholder", "get_attr"):
        return True
    name = operation_name(node, None) if node.op in ("call_function", "call_method") else None
    if name == "data" or (name == "getattr" and node.args[1:2] == ("data",)):
        return True
    return (has(name, Trait.MOVES) and not has(name, Trait.COPIES)) or name == normal_name("detach")
