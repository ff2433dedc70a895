"""Which tensors of a graph may share memory, so that a write into one shows in the other.

    v = x.view(2, -1);  y = drop(v)      y may be v, and v may be x: sources(y) = [v], sources(v) = [x]

Operations without a name may return any of their operands.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.tracing.modes import is_by_mode
from smcp_fx.tracing.operations import operation_of, writes_in_place
from smcp_fx.tracing.rewrites import RESHAPED
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import canonical_names, held

#: Attributes of tensors that share no memory with the tensor.
_ABOUT = {"shape", "dtype", "device", "layout", "ndim", "names", "requires_grad", "is_leaf", "is_cuda"}
#: Functions of Python that hold their operands; the others give numbers.
_CONTAINERS = (tuple, list, dict, set)


def sources(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """The operands whose memory the node's result may be, in all or in part."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    if is_by_mode(node):
        return [side for side in node.args[1:] if isinstance(side, fx.Node)]
    name = operation_of(model, node)
    if name is None:
        of_numbers = getattr(node.target, "__module__", "") in ("math", "builtins")
        return [] if of_numbers and node.target not in _CONTAINERS else node.all_input_nodes
    first = node.args[0] if node.args else None
    shares = (
        node.args[1] not in _ABOUT
        if name == "getattr"
        else has(name, Trait.VIEWS | Trait.SAME)
        or (has(name, Trait.MOVES) and not has(name, Trait.COPIES))
        or writes_in_place(node, model)
    )
    return [first] if shares and isinstance(first, fx.Node) else []


def is_source(operand: fx.Node, node: fx.Node, model: nn.Module) -> bool:
    """Does the node always return this operand itself, in its own shape?"""
    if node.target in RESHAPED or node.args[:1] != (operand,):
        return False
    return writes_in_place(node, model) or operation_of(model, node) == "identity"


def sharing(
    target: fx.Node, earlier: Collection[fx.Node], model: nn.Module
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that return the same tensor, and other nodes that may share its memory.

    ``earlier``: the nodes that have run.
    """
    names, others, todo = {target}, set[fx.Node](), [target]
    while todo:
        node = todo.pop()
        links = [(node, source) for source in sources(node, model)]
        links += [(user, node) for user in node.users if user in earlier and node in sources(user, model)]
        for result, operand in links:
            other = operand if result is node else result
            if other in names:
                continue
            if node in names and is_source(operand, result, model):
                names.add(other)
                others.discard(other)
                todo.append(other)
            elif other not in others:
                others.add(other)
                todo.append(other)
    return names, others


def origins(node: Any, model: nn.Module) -> set[Any]:
    """The tensors at the start of the chains of views that may end in this node."""
    owners, todo = set(), [node]
    while todo:
        one = todo.pop()
        before = sources(one, model) if isinstance(one, fx.Node) else []
        todo += before
        owners |= set() if before else {one}
    return owners


def memory_of_model(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that may share memory with a tensor of the model, and a name of that tensor."""
    owner: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            if isinstance(held(model, str(node.target)), Tensor):
                owner[node] = str(node.target)
        elif owner.keys().isdisjoint(node.all_input_nodes):  # the usual case, which is the fastest to check
            continue
        elif owners := [owner[source] for source in sources(node, model) if source in owner]:
            owner[node] = owners[0]
    return owner


def written_buffers(module: fx.GraphModule) -> frozenset[str]:
    """The buffers that the graph writes into, under all of their names."""
    memory, names = memory_of_model(module, module.graph), canonical_names(module)
    written = {
        names.get(memory[node.args[0]])
        for node in module.graph.nodes
        if node.args and node.args[0] in memory and writes_in_place(node, module)
    }
    buffers = (name for name, _ in module.named_buffers(remove_duplicate=False))
    return frozenset(name for name in buffers if names[name] in written)
