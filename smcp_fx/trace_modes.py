"""One graph from the two that a model gives in `eval()` and in `train()`.

Where the two differ only in a flag, the flag becomes a node that reads the owning module's own `training`; where
training runs other operations (auxiliary heads), the graph holds both modes' and the output is picked by the mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree


def one_graph(model: nn.Module, evaluated: fx.Graph, trained: fx.Graph) -> fx.Graph:
    """Merge the two modes' graphs: a constant that is False in one and True in the other becomes a node."""
    pairs = list(zip(evaluated.nodes, trained.nodes, strict=False))
    counterpart = {id(t): e for e, t in pairs}
    same = len(evaluated.nodes) == len(trained.nodes)
    rewritten = []
    for e, t in pairs:
        if not same:
            break
        left, left_spec = pytree.tree_flatten((e.args, e.kwargs))
        right, right_spec = pytree.tree_flatten((t.args, t.kwargs))
        targets = e.target == t.target or _same_constants(model, e, t)
        same = e.op == t.op and targets and left_spec == right_spec
        for index, (a, b) in enumerate(zip(left, right, strict=True) if same else ()):
            if isinstance(b, fx.Node):
                same = same and counterpart.get(id(b)) is a
            elif a is False and b is True:
                left[index] = _training_node(evaluated, e)
            else:
                same = same and type(a) is type(b) and (a == b or (a != a and b != b))  # NaN is itself here
        rewritten.append((e, left, left_spec))
    if same:
        for e, left, left_spec in rewritten:
            e.args, e.kwargs = pytree.tree_unflatten(left, left_spec)
    return evaluated if same else _both_modes(model, evaluated, trained)


def _both_modes(model: nn.Module, evaluated: fx.Graph, trained: fx.Graph) -> fx.Graph:
    """One graph for a model that runs other operations in `train()` (auxiliary heads): it holds both modes'.

    What both do is there once; what only training does is added, and the output is picked by the mode:
    ``output = (evaluated, trained)[training]``.
    """
    free: dict[Any, list[fx.Node]] = {}
    for node in evaluated.nodes:
        free.setdefault(_key(model, node, lambda n: n), []).append(node)
    placed: dict[fx.Node, fx.Node] = {}
    order = {node: index for index, node in enumerate(evaluated.nodes)}
    last = next(iter(evaluated.nodes))
    for node in trained.nodes:
        if node.op == "output":
            continue
        twins = free.get(_key(model, node, lambda n: placed[n]), [])
        if twins:
            placed[node] = twins.pop(0)
            _mark_flags(evaluated, placed[node], node)
        else:
            with evaluated.inserting_after(last):
                placed[node] = evaluated.node_copy(node, lambda n: placed[n])
            order[placed[node]] = order[last]
        if order[placed[node]] >= order[last]:
            last = placed[node]
    ends = [next(n for n in graph.nodes if n.op == "output") for graph in (evaluated, trained)]
    result = (ends[0].args[0], fx.node.map_arg(ends[1].args[0], lambda n: placed[n]))
    flag = _training_node(evaluated, None)
    with evaluated.inserting_before(ends[0]):
        ends[0].args = (evaluated.call_function(operator.getitem, (result, flag)),)
    for node in list(evaluated.nodes):
        if node.op == "get_attr" and not node.users and str(node.target).endswith("training"):
            evaluated.erase_node(node)
    evaluated.lint()
    return evaluated


def _key(model: nn.Module, node: fx.Node, place: Callable[[fx.Node], fx.Node]) -> Any:
    """What tells one call from another, training flags aside."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    plain = [
        id(place(leaf)) if isinstance(leaf, fx.Node) else "flag" if isinstance(leaf, bool) else repr(leaf)
        for leaf in leaves
    ]
    constant = getattr(model, str(node.target), None) if node.op == "get_attr" else None
    target = repr(constant) if isinstance(constant, Tensor) else node.target
    return node.op, target, tuple(plain), repr(spec)


def _mark_flags(graph: fx.Graph, node: fx.Node, trained: fx.Node) -> None:
    """Where the trained twin has True for a False, the module's own mode decides."""
    left, spec = pytree.tree_flatten((node.args, node.kwargs))
    right = pytree.tree_leaves((trained.args, trained.kwargs))
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is False and b is True:
            left[index] = _training_node(graph, node)
    node.args, node.kwargs = pytree.tree_unflatten(left, spec)


def _same_constants(model: nn.Module, left: fx.Node, right: fx.Node) -> bool:
    """Tensors made in `forward` are kept by the tracer as attributes, under a new name in each mode."""
    if left.op != "get_attr" or right.op != "get_attr":
        return False
    a, b = (getattr(model, str(node.target), None) for node in (left, right))
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)


def _training_node(graph: fx.Graph, node: fx.Node | None) -> fx.Node:
    """A node that reads `training` of the innermost module whose forward made `node`, or of the model."""
    stack = node.meta.get("nn_module_stack") if node is not None else None
    owner = list(stack.values())[-1][0] if stack else ""
    target = f"{owner}.training" if owner else "training"
    for other in graph.nodes:
        if other.op == "get_attr" and other.target == target:
            found: fx.Node = other
            return found
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        return graph.create_node("get_attr", target)
