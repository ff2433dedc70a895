"""Numbers that were computed from a channel count keep the value that they had with all channels.

    before   y / (c * h * w)      c = y.shape[1], of 64 channels
    after    y / (64 * h * w)     however many are kept

The batch size and the resolution still follow the input.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.errors import PassError
from smcp_fx.tracing.operations import readable_name, result_of
from smcp_fx.tracing.values import plain_lists

#: Queries that labels cannot answer: uniform labels share one place in memory.
_OF_MEMORY = {"stride", "storage_offset", "is_contiguous"}


def recomputed(node: fx.Node, recorded: Any, new: dict[str, Any]) -> Any:
    """Compute a size or another number from the sliced shapes that ``new`` holds.

    The recorded value stays if an operand is gone, or if it is not a number (a type, a device) and labels do
    not give it. `PassError` for a number that cannot be computed: it would count removed channels.
    """
    if str(getattr(node.target, "__name__", node.target)) in _OF_MEMORY:
        return recorded
    if node.op == "call_module" or any(new.get(source.name) is None for source in node.all_input_nodes):
        return recorded
    try:
        args, kwargs = plain_lists(fx.node.map_arg((node.args, node.kwargs), lambda n: new[n.name]))
        return result_of(node, None, args, kwargs)
    except Exception as error:  # whatever the model's own arithmetic raises for fewer channels
        if not _is_number(recorded):
            return recorded
        raise PassError(
            f"{node.name!r} ({readable_name(node)}) was {recorded} and cannot be computed for the channels "
            f"that are kept: {type(error).__name__}: {error}"
        ) from error


class OriginalNumbers:
    """``old`` and ``new`` map names of nodes to their values (labels, numbers) before and after slicing."""

    def __init__(self, graph: fx.Graph, old: dict[str, Any], new: dict[str, Any]) -> None:
        self.graph = graph
        self.old = old
        self.new = new
        self._known: dict[fx.Node, Any] = {}

    def put_into(self, node: fx.Node) -> list[str]:
        """Let the node read its original numbers; return a line for each change."""
        report = []
        for source in node.all_input_nodes:
            if not self._changed(source):
                continue
            original = {source: self._original(source)}
            node.args, node.kwargs = fx.node.map_arg(
                (node.args, node.kwargs), functools.partial(_exchanged, original)
            )
            report.append(f"{node.name}: {source.name} stays {self.old[source.name]}, as of all channels")
        return report

    def in_proportion(self, number: fx.Node, current: int, wanted: int) -> fx.Node:
        """Scale a number from ``current`` to ``wanted``, in proportion for other inputs (batch * heads)."""
        common = math.gcd(wanted, current)
        times, parts = wanted // common, current // common
        scaled = self._made(number, operator.mul, (number, times), current * times)
        return self._made(scaled, operator.floordiv, (scaled, parts), wanted)

    def _changed(self, node: fx.Node) -> bool:
        old = self.old.get(node.name)
        return _is_number(old) and old != self.new.get(node.name)

    def _original(self, number: fx.Node) -> Any:
        if number not in self._known:
            self._known[number] = self._restored(number)
        return self._known[number]

    def _restored(self, number: fx.Node) -> Any:
        """The original number: a node, a literal, or for a shape a tuple of both; else the recorded value."""
        old, new = self.old[number.name], self.new[number.name]
        source = number.args[0] if number.args else None
        if isinstance(source, fx.Node) and isinstance(self.old[source.name], Tensor):
            if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):  # the shape
                pairs = enumerate(zip(old, new, strict=True))
                made = operator.getitem
                return tuple(a if a != b else self._made(number, made, (number, i), a) for i, (a, b) in pairs)
            if number.target not in ("numel", "nelement", torch.numel):
                return old
            return self.in_proportion(number, new, old)
        target = math.prod if number.op == "call_method" and number.target == "numel" else number.target
        if not callable(target) or not all(_is_number(self.old[n.name]) for n in number.all_input_nodes):
            return old
        args, kwargs = fx.node.map_arg(
            (number.args, number.kwargs), lambda n: self._original(n) if self._changed(n) else n
        )
        if target is operator.getitem and isinstance(args[0], tuple):
            place: Any = args[1]
            return args[0][place]
        if not any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves((args, kwargs))):
            return old
        return self._made(number, target, args, old, kwargs)

    def _made(
        self, after: fx.Node, function: Any, args: tuple[Any, ...], value: Any, kwargs: Any = None
    ) -> fx.Node:
        """A new node, whose value does not change with the channels kept."""
        with self.graph.inserting_after(after):
            node = self.graph.call_function(function, args, kwargs)
        self.old[node.name] = self.new[node.name] = value
        return node


def _exchanged(values: dict[fx.Node, Any], node: fx.Node) -> Any:
    return values.get(node, node)


def _is_number(value: Any) -> bool:
    """Is it a number, or a shape?"""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, (int, float)) for part in parts)
