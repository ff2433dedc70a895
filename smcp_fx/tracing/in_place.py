"""`x += y` becomes a new tensor that is read wherever the old one was, if nothing could tell the difference.

    before   b = a; b += 1; return a + b      after   add = a + 1; return add + add

It stays a write if it changes an input, a view that is read later, or what may be another tensor in the other mode or
type (`b = drop(a)`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError as FxTraceError

from smcp_fx.tracing.mode_reads import unmarked
from smcp_fx.tracing.operations import may_be_operand, operation_name, writes_in_place
from smcp_fx.tracing.rewrites import RESHAPED
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.views import may_be_seen

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

_CALLS = ("call_function", "call_method", "call_module")
#: Attributes that are the tensor itself, seen in another way.
_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}


def is_tensor_for_sure(node: fx.Node) -> bool:
    """Whether the operation alone shows that it is a tensor. (For sizes and the like, look at the value.)"""
    node = unmarked(node)
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    known = getattr(node.target, "__module__", "")
    if known in ("math", "builtins") or operation_name(node, None) in _NUMBERS:
        return False
    if known in ("_operator", "operator"):  # of two numbers, a number
        return any(is_tensor_for_sure(operand) for operand in node.all_input_nodes)
    return True


def drop_releases(graph: fx.Graph) -> None:
    """Leave out `x.set_()`, by which a forward gives up the memory of what it does not read again."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        given = node.args[0] if node.args else None
        if node.op != "call_method" or node.target != "set_" or len(node.args) > 1 or node.kwargs:
            continue
        if (
            isinstance(given, fx.Node)
            and not node.users
            and all(place[u] <= place[node] for u in given.users)
        ):
            graph.erase_node(node)


def settle_in_place(graph: fx.Graph, model: nn.Module, value: Callable[[fx.Node], Any]) -> None:
    """Make new tensors of what `+=` and its like write, where that is the same for all who read them later.

    ``value`` gives a traced node's value on the example.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = node.args[0] if node.op == "call_function" and node.target in PLAIN else None
        if not isinstance(target, fx.Node):
            continue
        earlier = {user for user in place if place[user] < place[node]}
        names, others = _sharing(target, earlier, model)
        later = [(name, user) for name in names for user in name.users if place[user] > place[node]]
        shown = any(map(may_be_seen, names)) or any(
            other.op in ("placeholder", "get_attr") or any(place[user] > place[node] for user in other.users)
            for other in others
        )
        if shown or (later and not _keeps_its_type(node, value)):
            continue
        node.target = PLAIN[node.target]
        node._rename(node.target.__name__)
        for name, user in later:
            user.replace_input_with(name, node)


def _sharing(target: fx.Node, earlier: set[fx.Node], model: nn.Module) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that are the very tensor by another name, and others that may hold its memory, so far."""
    names, others, todo = {target}, set[fx.Node](), [target]
    while todo:
        node = todo.pop()
        links = [(node, source) for source in node.all_input_nodes]
        links += [(user, node) for user in node.users if user in earlier]
        for result, operand in links:
            other = operand if result is node else result
            if other in names:
                continue
            if node in names and _is_operand(result, operand, model):
                names.add(other)
                others.discard(other)
                todo.append(other)
            elif other not in others and _may_share(result, operand, model):
                others.add(other)
                todo.append(other)
    return names, others


def _is_operand(node: fx.Node, operand: fx.Node, model: nn.Module) -> bool:
    """Does the node always return this operand itself?"""
    if not node.args or node.args[0] is not operand or node.op not in _CALLS:
        return False
    if node.target in RESHAPED or node.target is operator.setitem:
        return False
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    return writes_in_place(node, model) or operation_name(node, module) == "identity"


def _may_share(node: fx.Node, operand: fx.Node, model: nn.Module) -> bool:
    """May the node's result be memory of this operand?"""
    if node.op not in _CALLS or node.target is operator.setitem:
        return False
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    name = operation_name(node, module)
    if name is None:
        return getattr(node.target, "__module__", "") not in ("math", "builtins")
    if not node.args or node.args[0] is not operand:
        return False
    if name == "getattr":
        return node.args[1] in _VIEWS
    return has(name, Trait.MOVES) or may_be_operand(node, model)


def _keeps_its_type(node: fx.Node, value: Callable[[fx.Node], Any]) -> bool:
    """Is what is computed of the target's shape and type? A write is, whatever is added."""
    target, other = node.args
    assert isinstance(target, fx.Node)
    try:
        held = value(target)
        result = PLAIN[node.target](held, value(other) if isinstance(other, fx.Node) else other)
    except (FxTraceError, RuntimeError):
        return False
    return not isinstance(held, Tensor) or (held.shape, held.dtype) == (result.shape, result.dtype)
