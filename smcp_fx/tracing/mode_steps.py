"""The operations of several traces of one model, aligned: the nodes of the traces that are the same operation.

Nodes made by the same run of the same line are aligned first; between them, equal operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.tracing.mode_paths import ModeTrace, Paths
from smcp_fx.tracing.mode_reads import leaves
from smcp_fx.tracing.values import NO_AUTOCAST, TensorInfo


@dataclass
class Step:
    """One operation of the merged graph: its node in each trace that has it, by the trace's number."""

    nodes: dict[int, fx.Node]
    key: Any = None
    points: set[Any] = field(default_factory=set)
    made: fx.Node | None = None
    chosen: dict[int, Any] = field(default_factory=dict)  # arguments, by their place among the leaves

    @property
    def first(self) -> tuple[int, fx.Node]:
        return next(iter(self.nodes.items()))


def in_steps(
    model: nn.Module, traces: Sequence[ModeTrace], paths: Paths, values: Callable[[ModeTrace], dict[str, Any]]
) -> list[Step]:
    """The steps of all traces, in the order of each; ``values`` gives the values of a trace's nodes, if needed."""
    first, *others = (trace.graph for trace in traces)
    if all(alike(model, first, other, numbers=False) for other in others):
        rows = zip(*(trace.graph.nodes for trace in traces), strict=True)
        return [Step(dict(enumerate(nodes))) for nodes in rows]
    return _aligned(model, traces, paths, values)


def alike(model: nn.Module, one: fx.Graph, other: fx.Graph, *, numbers: bool = True) -> bool:
    """Do two traces run the same operations on the same results, and on the same ``numbers``?"""
    if not _same_operations(model, one, other):
        return False
    twin = dict(zip(other.nodes, one.nodes, strict=True))
    return all(
        twin.get(b, b) is a if isinstance(b, fx.Node) else not numbers or same(a, b)
        for left, right in zip(one.nodes, other.nodes, strict=True)
        for a, b in zip(leaves(left), leaves(right), strict=True)
    )


def _same_operations(model: nn.Module, one: fx.Graph, other: fx.Graph) -> bool:
    return len(one.nodes) == len(other.nodes) and all(
        a.op == b.op
        and (NO_AUTOCAST in a.meta) == (NO_AUTOCAST in b.meta)
        and structure(a) == structure(b)
        and (a.target == b.target or _constant(model, a) == _constant(model, b, None))
        for a, b in zip(one.nodes, other.nodes, strict=True)
    )


def _aligned(
    model: nn.Module, traces: Sequence[ModeTrace], paths: Paths, values: Callable[[ModeTrace], dict[str, Any]]
) -> list[Step]:
    """The steps of all traces. Nodes from one place in the program are one step; then nodes with equal operations."""
    steps: list[Step] = []
    for number, trace in enumerate(traces):
        trace.values = trace.values or values(trace)
        points = paths.points(trace)
        own = [Step({number: n}, _key(model, n, trace), {points[n]}) for n in trace.graph.nodes]
        steps = _joined(steps, own) if steps else own
    return steps


def returning_other_shapes(traces: Sequence[ModeTrace], paths: Paths) -> set[str]:
    """The modules whose modes change the shapes that they return: their readers must not be merged across modes."""
    shapes: dict[Any, Any] = {}
    paths_of = set[str]()
    for trace in traces:
        for node in trace.graph.nodes if trace.values else ():
            for index, leaf in enumerate(leaves(node)):
                for frame, place in paths.returned(trace, node, index, leaf):
                    call = paths.call(trace, frame)
                    shape = _shapes(trace.values[leaf.name])
                    if shapes.setdefault((call, place), shape) != shape:
                        paths_of.add(call[0])
    return paths_of - paths.leaking


def _joined(steps: list[Step], own: list[Step]) -> list[Step]:
    """Two rows of steps as one, in the order of both."""
    place = {(point, step.key): index for index, step in enumerate(steps) for point in step.points}
    merged: list[Step] = []
    left = right = 0
    for index, step in enumerate(own):
        (point,) = step.points
        match = place.get((point, step.key), -1)
        if match >= left:
            merged += _alike(steps[left:match], own[right:index])
            merged.append(_as_one(steps[match], step))
            left, right = match + 1, index + 1
    return merged + _alike(steps[left:], own[right:])


def _alike(steps: list[Step], own: list[Step]) -> list[Step]:
    """Two rows of steps as one; equal operations become one step."""
    numbers: dict[Any, int] = {}
    first, second = ([numbers.setdefault(step.key, len(numbers)) for step in row] for row in (steps, own))
    merged: list[Step] = []
    left = right = 0
    for a, b, size in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        merged += steps[left:a] + own[right:b]
        merged += map(_as_one, steps[a : a + size], own[b : b + size])
        left, right = a + size, b + size
    return merged


def _as_one(step: Step, other: Step) -> Step:
    return Step(step.nodes | other.nodes, step.key, step.points | other.points)


def _key(model: nn.Module, node: fx.Node, trace: ModeTrace) -> Any:
    """A key that is equal for equal operations of the same module on tensors of the same shapes."""
    if node.op == "output":
        return "output"
    plain = [
        _shapes(trace.values[leaf.name])
        if isinstance(leaf, fx.Node)
        else "flag"
        if isinstance(leaf, bool)
        else repr(leaf)
        for index, leaf in enumerate(leaves(node))
        if computes(node, index)
    ]
    target = _constant(model, node) if node.op == "get_attr" else node.target
    done = node.op, target, NO_AUTOCAST in node.meta, _innermost(node), tuple(plain), structure(node)
    return *done, _shapes(trace.values[node.name])


def _innermost(node: fx.Node) -> str:
    """The innermost module whose forward made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    return ["", *(str(path) for path, _ in stack.values())][-1]


def _constant(model: nn.Module, node: fx.Node, otherwise: Any = "") -> Any:
    """The tensor that a `get_attr` reads; one made in `forward` by its values, as its name depends on the mode."""
    if node.op != "get_attr" or not str(node.target).startswith("_tensor_constant"):
        return node.target if node.op == "get_attr" else otherwise
    held = getattr(model, str(node.target))
    if not isinstance(held, Tensor):
        return node.target
    return str(held.dtype), tuple(held.shape), repr(held.tolist())


def _shapes(value: Any) -> Any:
    parts, spec = pytree.tree_flatten(value)
    plain = [(leaf.shape, leaf.dtype) if isinstance(leaf, TensorInfo) else type(leaf) for leaf in parts]
    return tuple(plain), repr(spec)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b or (a != a and b != b))  # NaN is itself here


def computes(node: fx.Node, index: int) -> bool:
    """Whether an argument changes the node's result; the messages of assertions differ between modes."""
    return node.target is not torch._assert or index == 0


def structure(node: fx.Node) -> str:
    return repr(fx.node.map_aggregate((node.args, node.kwargs), lambda _: None))
