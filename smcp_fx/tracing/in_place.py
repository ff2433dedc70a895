"""`x += y` becomes a new tensor for all later readers, if no reader could see a difference.

    before   b = a; b += 1; return a + b      after   add = a + 1; return add + add

It stays a write if it changes an input, a view that is read later, or a tensor that may be another one in the other
mode or type (`b = drop(a)`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError as FxTraceError

from smcp_fx.tracing.aliases import sharing
from smcp_fx.tracing.mode_reads import unmarked
from smcp_fx.tracing.operations import operation_name

#: The operators that write, and what they compute.
PLAIN: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
#: Operations that give numbers, even of a tensor.
_NUMBERS = {"getattr", "getitem", "size", "dim", "numel", "len", "ndimension", "stride", "nelement", "type"}


def is_tensor_for_sure(node: fx.Node) -> bool:
    """Does the operation alone show that the result is a tensor?"""
    node = unmarked(node)
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    library = getattr(node.target, "__module__", "")
    if library in ("math", "builtins") or operation_name(node, None) in _NUMBERS:
        return False
    if library in ("_operator", "operator"):  # of two numbers, a number
        return any(is_tensor_for_sure(operand) for operand in node.all_input_nodes)
    return True


def drop_releases(graph: fx.Graph) -> None:
    """Drop `x.set_()`, with which a forward frees the memory of a tensor that it does not read again."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        operand = node.args[0] if node.args else None
        if node.op != "call_method" or node.target != "set_" or len(node.args) > 1 or node.kwargs:
            continue
        if (
            isinstance(operand, fx.Node)
            and not node.users
            and all(place[u] <= place[node] for u in operand.users)
        ):
            graph.erase_node(node)


def settle_in_place(graph: fx.Graph, model: nn.Module, value: Callable[[fx.Node], Any]) -> None:
    """Turn `+=` and similar writes into new tensors, if all later readers see the same.

    ``value`` gives a traced node's value on the example.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = node.args[0] if node.op == "call_function" and node.target in PLAIN else None
        if not isinstance(target, fx.Node):
            continue
        earlier = {user for user in place if place[user] < place[node]}
        names, others = sharing(target, earlier, model)
        later = [(name, user) for name in names for user in name.users if place[user] > place[node]]
        shown = any(one.op in ("placeholder", "get_attr") for one in names | others) or any(
            place[user] > place[node] for other in others for user in other.users
        )
        if shown or (later and not _keeps_its_type(node, value)):
            continue
        node.target = PLAIN[node.target]
        node._rename(node.target.__name__)
        for name, user in later:
            user.replace_input_with(name, node)


def _keeps_its_type(node: fx.Node, value: Callable[[fx.Node], Any]) -> bool:
    """Does the result have the target's shape and type? (A write always keeps them.)"""
    target, other = node.args
    assert isinstance(target, fx.Node)
    try:
        held = value(target)
        result = PLAIN[node.target](held, value(other) if isinstance(other, fx.Node) else other)
    except (FxTraceError, RuntimeError):
        return False
    return not isinstance(held, Tensor) or (held.shape, held.dtype) == (result.shape, result.dtype)
