"""Tensors that a forward computes from sizes alone: position encodings of sines, coordinates, decay factors.

Combined with features, such a tensor has one value a channel. It is computed at full width; then the values of the
kept channels are selected.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from smcp_fx.tracing.aliases import sources
from smcp_fx.tracing.operations import operation_name, writes_in_place
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import OPAQUE, TensorInfo, has_tensors


def made_tensors(
    module: fx.GraphModule, values: Mapping[str, Any], unread: Collection[str]
) -> dict[str, set[str] | None]:
    """Return the nodes that compute tensors from sizes alone, by name.

    Tensors of one value are left out, as they are made as wide as needed, unless another tensor is computed from
    them (`zeros_like(state)`). If a node of real or complex numbers has readers outside the computation, its users
    inside are returned with it; other nodes come with None. ``unread``: nodes that do not count as users.
    """
    tensors = {name for name, value in values.items() if has_tensors(value)}
    made: dict[fx.Node, bool] = {}
    touched: set[fx.Node] = set()  # what a write may change
    for node in module.graph.nodes:
        inputs = [n for n in _read(node) if n.name in tensors]
        made[node] = (
            node.op in ("call_function", "call_method")
            and OPAQUE not in node.meta
            and node.name in tensors
            and all(made[n] for n in inputs)
        )
        if writes_in_place(node, module):
            _touch(node, made, module, touched)
        if node.target is operator.setitem and not all(made[n] for n in inputs):
            filled: set[fx.Node] = set()  # it holds features from here on
            _touch(node.args[0], made, module, filled)
            made.update(dict.fromkeys(filled, False))
            touched |= filled
    made_for: dict[str, set[str] | None] = {}
    for node, here in made.items():
        alone = has(operation_name(node, None), Trait.FILLS) and not any(made[user] for user in node.users)
        if not here or node in touched or alone:
            continue
        value = values[node.name]
        numbers = isinstance(value, TensorInfo) and value.is_continuous
        readers = {user.name for user in node.users if not made[user] and user.name not in unread}
        among = {user.name for user in node.users if made[user]}
        made_for[node.name] = among if numbers and readers else None
    return made_for


def _read(node: fx.Node) -> list[fx.Node]:
    """The operands whose values the node reads: `like.new_zeros(1)` and `x.type_as(like)` only read the type."""
    name = operation_name(node, None)
    if node.op == "call_method" and has(name, Trait.FILLS):
        return [n for n in node.all_input_nodes if n is not node.args[0]]
    if name in ("typeas", "to"):
        return [n for n in node.all_input_nodes if n is node.args[0]]
    return node.all_input_nodes


def _touch(
    node: fx.Node, made: Mapping[fx.Node, bool], module: fx.GraphModule, touched: set[fx.Node]
) -> None:
    """Add the node and the tensors whose memory it may share.

    Of a tensor computed from sizes, add what it is computed from, too: one and its copy must be equally wide.
    """
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in touched:
            touched.add(one)
            todo += one.all_input_nodes if made[one] else sources(one, module)
