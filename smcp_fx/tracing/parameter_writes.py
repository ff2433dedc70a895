"""Forwards that write into a parameter before a layer reads it: fused, masked and clipped weights.

    before   self.weight.data *= self.mask                     after   value = weight.detach() * mask
             return F.conv2d(x, self.weight)                           own = overwritten(weight, value)
                                                                       return F.conv2d(x, own)

The write stays, so that training sees the same parameter; later readers read a value that the graph computes. A value
that depends on the input, or differs at each call, is no weight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from types import MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.errors import TraceError
from smcp_fx.tracing.constant_values import ancestors, computed_value, overwritten
from smcp_fx.tracing.contexts import NO_GRAD
from smcp_fx.tracing.in_place import PLAIN
from smcp_fx.tracing.operations import writes_in_place
from smcp_fx.tracing.write_places import parts_of
from smcp_fx.tracing.writes import write_once

#: Two calls may write values that differ by rounding: by this share of the largest value.
_SAME = 1e-5


def parameter_of(node: Any) -> fx.Node | None:
    """The read of the tensor with which a node shares memory: `weight`, `weight.data`, `weight.detach()`."""
    while isinstance(node, fx.Node) and node.op != "get_attr":
        detached = node.target in ("detach", torch.detach) or (
            node.target is getattr and node.args[1] == "data"
        )
        if not detached and node.target is not overwritten:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def written_parameter(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """The read of the model's tensor that the node writes into, in whole or in part; None for other tensors."""
    if node.target is not overwritten and not (node.args and writes_in_place(node, model)):
        return None
    parts = parts_of(node)
    return parameter_of(node.args[0] if parts is None else parts[0])


def settle_parameter_writes(graph: fx.Graph, model: nn.Module, adopt: Callable[[fx.Node], None]) -> None:
    """Let later readers of a written parameter read the written value; ``adopt`` registers a new node.

    Raises `TraceError` for an assignment to `.data` of a value that does not follow from parameters.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for node in list(graph.nodes):
        read = written_parameter(node, model)
        parameter = parameters.get(str(read.target)) if read is not None else None
        if parameter is None:
            continue
        if node.target is operator.setitem:
            write_once(node)
        same = {n for n in graph.nodes if n.op == "get_attr" and parameters.get(str(n.target)) is parameter}
        if node.target is overwritten and parameter_of(node.args[1]) in same:
            _drop_second_half(graph, node)
            continue
        write = _Write(graph, model, node, parameter, same)
        why = write.refused()
        if not why:
            write.settle(adopt)
        elif node.target is overwritten:
            assert read is not None
            raise TraceError(
                f"{str(read.target)!r} is overwritten in forward, {why}: fuse weights once, and prepare the model "
                "that reads the fused ones; or hand them to a function (F.conv2d)"
            )


def _drop_second_half(graph: fx.Graph, node: fx.Node) -> None:
    """`w.data *= m` is `v = w.data; v *= m; w.data = v` in Python: the second statement has already written."""
    own, value = node.args
    node.replace_all_uses_with(own)  # type: ignore[arg-type]
    graph.erase_node(node)
    if isinstance(value, fx.Node) and not value.users:
        graph.erase_node(value)


class _Write:
    """The write of ``node`` into ``parameter``, which the nodes ``reads`` read from the model."""

    def __init__(
        self, graph: fx.Graph, model: nn.Module, node: fx.Node, parameter: nn.Parameter, reads: set[fx.Node]
    ) -> None:
        self.graph, self.model, self.node, self.parameter, self.reads = graph, model, node, parameter, reads
        self.place = {other: index for index, other in enumerate(graph.nodes)}
        after = self.place[node]
        views = [n for n in graph.nodes if parameter_of(n) in reads and self.place[n] < after]
        self.own = [n for n in views if n.target is overwritten]  # earlier overwrites
        self.later = [
            (name, user) for name in {*reads, *views, node} for user in name.users if self.place[user] > after
        ]

    def refused(self) -> str:
        """Why the write cannot be settled; empty if it can."""
        value = self._value()
        if value is None or not self.later:
            return "and not read afterwards"
        own_nodes = {*self.reads, *self.own, self.node}
        if self.node.target is overwritten and any(name not in own_nodes for name, _ in self.later):
            return "and what it held before is read afterwards"
        operation, args = value
        way = frozenset[fx.Node]().union(*(ancestors(one) for one in args if isinstance(one, fx.Node)))
        if any(node.op not in ("get_attr", "call_function", "call_method") for node in way):
            return "by what follows from the input"
        return self._unsteady(operation, args, way)

    def _value(self) -> tuple[Any, tuple[Any, ...]] | None:
        """The operation that makes a new tensor in place of the write, and its arguments."""
        name = str(getattr(self.node.target, "__name__", self.node.target))
        if self.node.target is overwritten or (name == "copy_" and len(self.node.args) == 2):
            return Tensor.detach, self.node.args[1:]
        if (parts := parts_of(self.node)) is not None:
            return _with_part, parts
        if self.node.target in PLAIN:
            return PLAIN[self.node.target], self.node.args
        operation = getattr(Tensor, name.removesuffix("_"), None) if name.endswith("_") else None
        return None if operation is None else (operation, self.node.args)

    def _unsteady(self, operation: Any, args: tuple[Any, ...], way: frozenset[fx.Node]) -> str:
        """Why a second call would write other values, or a tensor that does not fit."""
        ordered = [node for node in self.graph.nodes if node in way]
        held, written = self.parameter.detach().clone(), []
        with torch.no_grad(), torch.random.fork_rng():
            for _ in range(2):
                arguments = fx.node.map_arg(args, partial(self._valued, ordered, held))
                held = operation(*arguments, **self.node.kwargs)
                if (held.shape, held.dtype) != (self.parameter.shape, self.parameter.dtype):
                    return "by a tensor of another shape or type"
                written.append(held)
        scale = float(written[0].abs().max()) if held.numel() else 0.0
        same = torch.allclose(written[0], written[1], rtol=0, atol=_SAME * scale, equal_nan=True)
        return "" if same else "by another value at each call"

    def _valued(self, ordered: list[fx.Node], held: Tensor, node: fx.Node) -> Any:
        before = tuple(ordered[: ordered.index(node) + 1])
        return computed_value(self.model, before, dict.fromkeys(self.reads, held))

    def settle(self, adopt: Callable[[fx.Node], None]) -> None:
        """Rewrite the graph so that later readers read the written value."""
        value = self._value()
        assert value is not None
        operation: Any = value[0]
        args, before = value[1], set(self.graph.nodes)
        read = min(self.reads, key=self.place.__getitem__)
        with self.graph.inserting_before(self.node):
            if operation is _with_part:
                made = self.graph.call_method("clone", (self.own[-1] if self.own else read,))
                self.graph.call_function(operator.setitem, (made, *args[1:]))
            elif isinstance(operation, MethodDescriptorType):
                made = self.graph.call_method(operation.__name__, args, dict(self.node.kwargs))
            else:
                made = self.graph.call_function(operation, args)
            own = self.graph.call_function(overwritten, (read, made))
            plain = self.graph.call_method("detach", (own,))
        for node in [n for n in self.graph.nodes if n not in before]:
            node.meta = {key: kept for key, kept in self.node.meta.items() if key != NO_GRAD}
            adopt(node)
        for name, user in self.later:
            user.replace_input_with(name, own if name in (*self.reads, *self.own) else plain)
        view: Any = self.node.args[0]
        for idle in (self.node, plain, view):
            if idle.op != "get_attr" and not idle.users:
                self.graph.erase_node(idle)


def _with_part(tensor: Tensor, index: Any, part: Any) -> Tensor:
    written = tensor.clone()
    written[index] = part
    return written
