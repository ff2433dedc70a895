"""Tensors that a forward computes from sizes alone: position encodings of sines, coordinates, decay factors.

Where one meets features it has a value for each of their channels. It is computed at full width, and those of the
channels that are kept are selected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from smcp_fx.tracing.operations import operation_name, writes_in_place
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import OPAQUE, TensorInfo


def made_tensors(
    module: fx.GraphModule, values: Mapping[str, Any], unread: Collection[str]
) -> dict[str, set[str] | None]:
    """The nodes of such computations; for those with real numbers that others read, the users that are such, too.

    ``unread``: nodes that do not count as users. Tensors of one value are left out: they are made as wide as needed.
    """
    made: dict[fx.Node, bool] = {}
    touched: set[fx.Node] = set()  # a write into a tensor may show in all that it was made from
    for node in module.graph.nodes:
        inputs = [n for n in node.all_input_nodes if _tensors(values.get(n.name))]
        made[node] = (
            node.op in ("call_function", "call_method")
            and OPAQUE not in node.meta
            and bool(_tensors(values.get(node.name)))
            and all(made[n] for n in inputs)
        )
        if writes_in_place(node, module):
            touched.update(_above(node))
    found: dict[str, set[str] | None] = {}
    for node, here in made.items():
        if not here or node in touched or has(operation_name(node, None), Trait.FILLS):
            continue
        value = values[node.name]
        real = isinstance(value, TensorInfo) and value.dtype.is_floating_point
        readers = {user.name for user in node.users if not made[user] and user.name not in unread}
        found[node.name] = {user.name for user in node.users if made[user]} if real and readers else None
    return found


def _tensors(value: Any) -> list[TensorInfo]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TensorInfo)]


def _above(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is computed from: a write into it may show in those."""
    found, left = {node: None}, [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in found:
                found[source] = None
                left.append(source)
    return list(found)


def only_asserted(graph: fx.Graph) -> set[str]:
    """Nodes that only an assertion reads: it asks of the channels that are left what it asked of all."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        read = bool(node.users) and all(user.name in found for user in node.users)
        if node.target is torch._assert or (read and node.op in ("call_function", "call_method")):
            found.add(node.name)
    return found
