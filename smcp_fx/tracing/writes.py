"""Writes into part of a tensor become new tensors, if no reader could see a difference.

    before   x[:, :4] = y                       after   x = cat([y.type_as(x), x[:, 4:]], 1)
    before   x[x < 0] = 0                       after   x = x.masked_fill(x < 0, 0)
    before   x[:, ::2] = y                      after   x = cat([y.type_as(x), x[:, 1::2]], 1), shuffled
    before   z = x.slice_scatter(y, 1, 0, 4)    after   as the first

A write into memory that others hold too (an input, a parameter, a view that is read later) stays a write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError as FxTraceError

from smcp_fx.tracing.aliases import sharing
from smcp_fx.tracing.in_place import PLAIN
from smcp_fx.tracing.lengths import FixedSizes
from smcp_fx.tracing.operations import writes_in_place
from smcp_fx.tracing.sentences import AGAIN, TAKEN, express
from smcp_fx.tracing.write_places import (
    Every,
    Span,
    every_index,
    full_index,
    next_place,
    parts_of,
    scatters,
)

Value = Callable[[fx.Node], Any]


def functional_writes(
    graph: fx.Graph, model: nn.Module, value: Value, adopt: Callable[[fx.Node], None], assumed: list[str]
) -> None:
    """Rewrite the graph's writes by index.

    ``value`` gives a traced node's value on the example; ``adopt`` makes a new node known to it. What a rewrite
    assumes about inputs is added to ``assumed``, and checked in every call.
    """
    written: dict[fx.Node, fx.Node] = {}  # new tensors, and the tensors that they replace
    for node in list(graph.nodes):
        parts = parts_of(node)
        if parts is None:
            continue
        if node.target is operator.setitem:
            write_once(node)
        write = _Write(graph, model, value, node, parts, assumed, written)
        last = node.prev
        result = write.rewritten()
        while last.next is not node:
            last = last.next
            last.meta = dict(node.meta)
            adopt(last)
        if result is not None:
            written[result] = write.target
            write.put(result)


def write_once(node: fx.Node) -> None:
    """`x[i] += y` is `v = x[i]; v += y; x[i] = v` in Python: let only the last statement write."""
    target, index, source = node.args
    if not isinstance(source, fx.Node) or source.target not in PLAIN or len(source.users) > 1:
        return
    part = source.args[0]
    if isinstance(part, fx.Node) and part.target is operator.getitem and part.args == (target, index):
        source.target = PLAIN[source.target]


def own_constants(
    graph: fx.Graph, model: nn.Module, names: Iterable[str], adopt: Callable[[fx.Node], None]
) -> None:
    """Let every call write into its own copies of the graph's constants, which forward created."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _BY_INDEX:
            node.op, node.target = "call_function", _BY_INDEX[node.target]
    for name in names:
        nodes = [node for node in graph.nodes if node.op == "get_attr" and node.target == name]
        users = [(node, user) for node in nodes for user in node.users]
        if not any(
            user.args and user.args[0] is node and writes_in_place(user, model) for node, user in users
        ):
            continue
        with graph.inserting_after(nodes[0]):
            copied = graph.call_method("clone", (nodes[0],))
        copied.meta = dict(nodes[0].meta)
        adopt(copied)
        for node, user in users:
            user.replace_input_with(node, copied)
        for node in nodes[1:]:
            graph.erase_node(node)


#: Methods that torch.fx records if a traced tensor indexes a constant, and the functions to call instead.
_BY_INDEX = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}


class _Write:
    """One `target[index] = source`, by this node."""

    def __init__(
        self,
        graph: fx.Graph,
        model: nn.Module,
        value: Value,
        node: fx.Node,
        parts: tuple[Any, Any, Any],
        assumed: list[str],
        written: dict[fx.Node, fx.Node],
    ) -> None:
        self.graph, self.model, self.node = graph, model, node
        self.value, self.assumed = value, assumed
        self.sizes = FixedSizes(model, value, written)
        self.place = {other: index for index, other in enumerate(graph.nodes)}
        self.target, self.index, self.source = parts
        self.fixed = False  # do the indexed dimensions have the same size for every input?
        self.stops: dict[fx.Node, int] = {}  # new nodes, with their values on the example

    def rewritten(self) -> fx.Node | None:
        """The new tensor; None if the write stays."""
        try:
            for node in self.node.all_input_nodes:
                self.value(node)
            if not isinstance(self.target, fx.Node):
                return None
            if not scatters(self.node) and self._is_shared(self.target):
                return None
        except FxTraceError:  # shapes that depend on values: the write stays
            return None
        with self.graph.inserting_before(self.node):
            return self._masked() if _is_mask(self._example(self.index)) else self._parts()

    def put(self, result: fx.Node) -> None:
        """Let later readers of the target read the new tensor."""
        if scatters(self.node):
            self.node.replace_all_uses_with(result)
            self.graph.erase_node(self.node)
            return
        after = self.place[self.node]
        for user in [user for user in self.target.users if self.place.get(user, -1) > after]:
            user.replace_input_with(self.target, result)
        view = self.node.args[0]
        self.graph.erase_node(self.node)
        if isinstance(view, fx.Node) and view is not self.target and not view.users:
            self.graph.erase_node(view)

    # ---- other readers of the write ---------------------------------------------------------------------

    def _is_shared(self, target: fx.Node) -> bool:
        """Does a later reader, or the caller, hold the target's memory under another name?"""
        after = self.place[self.node]
        names, others = sharing(target, {user for user in self.place if self.place[user] < after}, self.model)
        aliased = names | others
        return any(node.op in ("placeholder", "get_attr") for node in aliased) or any(
            self.place[user] > after for node in aliased - {target} for user in node.users
        )

    # ---- the new tensor ---------------------------------------------------------------------------------

    def _masked(self) -> fx.Node | None:
        """`x[mask] = number`, and `x[mask] = y[mask]`."""
        tensor, mask, source = self._example(self.target), self.index, self.source
        picked = source if isinstance(source, fx.Node) and source.target is operator.getitem else None
        other = picked.args[0] if picked is not None and picked.args[1] is mask else None
        same = isinstance(other, fx.Node) and self._example(other).shape == tensor.shape
        if not same and not isinstance(source, (int, float)):
            return None
        for _ in range(tensor.dim() - self._example(mask).dim()):
            mask = self.graph.call_method("unsqueeze", (mask, -1))
        if not same:
            return self.graph.call_method("masked_fill", (self.target, mask, source))
        other = self.graph.call_method("type_as", (other, self.target))
        return self.graph.call_function(torch.where, (mask, other, self.target))

    def _parts(self) -> fx.Node | None:
        """`x[:, 2:4] = y`: y between the remaining parts of x."""
        tensor = self._example(self.target)
        index = full_index(self.index, tensor.dim())
        if index is None:
            return None
        cut, self.fixed = [], True
        for dim, part in enumerate(index):
            if isinstance(part, slice) and part == slice(None):
                continue
            fixed = self.sizes.is_fixed(self.target, dim)
            if isinstance(part, Span) and not fixed:
                edges = self._edges_of_span(part, dim, tensor.shape[dim])
            else:
                edges = self._edges(part, dim, tensor.shape[dim], fixed)
            if edges is None:
                return None
            cut.append((dim, *edges))
            self.fixed &= fixed
        gone = [dim for dim, part in enumerate(index) if isinstance(part, int)]
        return self._within(self.target, cut, gone, tensor)

    def _edges(self, part: Any, dim: int, size: int, fixed: bool) -> tuple[Any, Any] | None:
        """The start and stop of a part; None if unknown, or if their order may change at another size."""
        if isinstance(part, Span):
            length = self._number(part.length)
            if type(length) is not int:
                return None
            part = slice(part.start, part.start + length)
        if isinstance(part, slice) and part.step not in (None, 1):
            divides = fixed or (part.stop is None and self.sizes.is_multiple(self.target, dim, part.step))
            every = every_index(part, size) if divides else None
            return None if every is None else (every, None)
        start, stop = (part.start, part.stop) if isinstance(part, slice) else (part, next_place(part))
        start, stop = (self._number(edge) for edge in (start, stop))
        bounds = [self._example(edge) for edge in (start, stop)]
        if any(type(edge) not in (int, type(None)) for edge in bounds):
            return None
        first, last, _ = slice(*bounds).indices(size)
        if first >= last or (type(bounds[0]) is int and bounds[0] < -size):
            return None
        if fixed:
            return first or None, None if last == size else last
        signs = {edge < 0 for edge in bounds if edge is not None}
        moving = any(isinstance(edge, fx.Node) for edge in (start, stop)) and None not in (start, stop)
        if (
            moving
            or len(signs) > 1
            or (first == 0 and start not in (None, 0))
            or (last == size and stop is not None)
        ):
            return None
        return start, stop

    def _edges_of_span(self, span: Span, dim: int, size: int) -> tuple[Any, Any] | None:
        """A part that ends with the dimension is assumed to do so at any size: nothing remains after it."""
        if type(self.value(span.length)) is not int:
            return None
        stop = (
            self.graph.call_function(operator.add, (span.start, span.length)) if span.start else span.length
        )
        self.stops[stop] = span.start + self.value(span.length)
        if self.stops[stop] < size:
            return span.start or None, stop
        whole = self.graph.call_method("size", (self.target, dim))
        same = self.graph.call_function(operator.eq, (stop, whole))
        assumption = TAKEN + express(same)
        self.graph.call_function(torch._assert, (same, assumption + AGAIN))
        self.assumed.append(assumption)
        return span.start or None, None

    def _number(self, edge: Any) -> Any:
        """A node's number, if no input changes it."""
        fixed = isinstance(edge, fx.Node) and self.sizes.is_fixed_number(edge)
        return self.value(edge) if fixed else edge

    def _within(self, whole: fx.Node, cut: list[Any], gone: list[int], tensor: Tensor) -> fx.Node:
        if not cut:
            return self._fitted(whole, gone, tensor)
        dim, start, stop = cut[0]
        ahead = [slice(None)] * dim
        if isinstance(start, Every):
            return self._interleaved(whole, start, ahead, cut[1:], gone, tensor)

        def part(first: int | None, last: int | None) -> fx.Node:
            return self.graph.call_function(operator.getitem, (whole, (*ahead, slice(first, last))))

        inner_shape = tensor[(*ahead, slice(self._example(start), self._example(stop)))]
        pieces = [] if start in (None, 0) else [part(None, start)]
        pieces.append(self._within(part(start, stop), cut[1:], gone, inner_shape))
        pieces += [] if stop is None else [part(stop, None)]
        return self.graph.call_function(torch.cat, (pieces, dim)) if len(pieces) > 1 else pieces[0]

    def _interleaved(
        self, whole: fx.Node, every: Every, ahead: list[Any], cut: list[Any], gone: list[int], tensor: Tensor
    ) -> fx.Node:
        """Concatenate the pieces of all starts, one of them written, and shuffle them into place."""
        dim, pieces = len(ahead), []
        for start in range(every.step):
            index = (*ahead, slice(start, None, every.step))
            piece = self.graph.call_function(operator.getitem, (whole, index))
            pieces.append(self._within(piece, cut, gone, tensor[index]) if start == every.start else piece)
        joined = self.graph.call_function(torch.cat, (pieces, dim))
        rows = self.graph.call_method("unflatten", (joined, dim, (every.step, -1)))
        columns = self.graph.call_method("transpose", (rows, dim, dim + 1))
        return self.graph.call_method("flatten", (columns, dim, dim + 1))

    def _fitted(self, region: fx.Node, gone: list[int], tensor: Tensor) -> fx.Node:
        """The written values, in the region's shape and type."""
        source = self.source
        if not isinstance(source, fx.Node) or not isinstance(self._example(source), Tensor):
            return self.graph.call_function(torch.full_like, (region, source))
        shape = list(self._example(source).shape)
        left = tensor.dim() - len(gone) - len(shape)  # dimensions that broadcasting adds in front
        for dim in gone:
            if dim - sum(other < dim for other in gone) >= left and shape:
                source = self.graph.call_method("unsqueeze", (source, dim - max(left, 0)))
                shape.insert(dim - max(left, 0), 1)
        # At other sizes, refuses values that do not fit.
        if tuple(shape) != tuple(tensor.shape) or not self.fixed:
            source = self.graph.call_method("expand_as", (source, region))
        return self.graph.call_method("type_as", (source, region))

    def _example(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        return self.stops[node] if node in self.stops else self.value(node)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bool
