"""Which tensors others see when an operation writes into them: inputs of the graph, and views of tensors."""

from __future__ import annotations

from torch import fx

from smcp_fx.tracing.operations import MOVES, normal_name, operation_name

#: What moves data and always returns a tensor of its own.
_COPIES = frozenset(
    "channelshuffle flip indexselect pixelshuffle pixelunshuffle repeat repeatinterleave roll tile rot90".split()
)


def may_be_seen(node: fx.Node) -> bool:
    """May a write into the node's tensor show in another tensor that is not named by this node?"""
    if node.op in ("placeholder", "get_attr"):
        return True
    name = operation_name(node, None) if node.op in ("call_function", "call_method") else None
    if name == "data" or (name == "getattr" and node.args[1:2] == ("data",)):
        return True
    return name in MOVES - _COPIES or name == normal_name("detach")
