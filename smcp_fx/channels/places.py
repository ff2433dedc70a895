"""Indexing by tensors: by constants of the model, whose values are known, and by computed places."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.channels.propagation import Propagation
from smcp_fx.channels.trail import Call, ConstantRef, ParameterRef
from smcp_fx.tracing.operations import operation_name
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo

#: Operations that read or write at places.
_PLACED = set(
    """
gather getitem indexadd indexcopy indexfill indexreduce indexselect scatter scatteradd scatterreduce takealongdim
""".split()
)


def is_index(node: fx.Node) -> bool:
    """Do only indexing operations read the node's result, perhaps moved or copied? (Then its values are kept.)"""
    return all(
        user.target in (operator.getitem, torch.index_select, "index_select")
        if user.args[0] is not node
        else (has(operation_name(user, None), Trait.MOVES) or keeps_values(operation_name(user, None)))
        and is_index(user)
        for user in node.users
    )


def leads_to_places(node: fx.Node) -> bool:
    """Does any operation read the node's result, perhaps moved, as places: an index, or a scatter?"""
    return any(
        operation_name(user, None) in _PLACED
        if user.args[:1] != (node,)
        else has(operation_name(user, None), Trait.MOVES) and leads_to_places(user)
        for user in node.users
    )


def holds_places(value: Tensor, node: fx.Node) -> bool:
    """Are these integers that some operation reads, through the node, as places?"""
    return value.dtype in (torch.int64, torch.int32) and leads_to_places(node)


def keeps_values(name: str | None) -> bool:
    """Does the operation return the values of its operand, perhaps in a new tensor or another type?"""
    return name == "clone" or has(name, Trait.SAME)


def looks_up(table: ParameterRef, index: ConstantRef) -> bool:
    """Are rows of a parameter looked up many times? Then they are no channels."""
    return len(table.shape) > 1 and len(index.shape) == 1 and index.shape[0] > table.shape[0]


def at_any_place(run: Propagation, call: Call) -> Call:
    """Replace computed places by zeros if they index dimensions without channels; return the call.

    All places have the same labels there. Example: computed relative positions index a parameter.
    """
    table = call.args[0]
    if call.name == "indexselect" and isinstance(table, (Tensor, ParameterRef)):
        return _selected(run, call)
    if call.name != "getitem" or not isinstance(table, (Tensor, ParameterRef)):
        return call
    single = not isinstance(call.args[1], tuple)
    places = [call.args[1]] if single else list(call.args[1])
    nodes: list[Any] = [call.node.args[1]] if single else list(call.node.args[1])  # type: ignore[arg-type]
    if any(isinstance(place, ConstantRef) and place.value.dtype == torch.bool for place in places):
        return call
    rank, dim, dims = len(table.shape), 0, set()
    for at, (place, node) in enumerate(zip(places, nodes, strict=True)):
        if place is Ellipsis:
            dim = rank - sum(later is not None for later in places[at + 1 :])
            continue
        if isinstance(place, Tensor) and _is_computed(run, place, node):
            places[at] = ConstantRef(node.name, tuple(place.shape), torch.zeros_like(place))
            dims.add(dim)
        dim += place is not None
    labels = run.of(table, [d - rank for d in range(rank) if d not in dims]) if dims else None
    if labels is None or dims.intersection(run.varied(labels)):
        return call
    return replace(call, args=(labels, places[0] if single else tuple(places)))


def _selected(run: Propagation, call: Call) -> Call:
    """The same for `index_select`."""
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    node = call.node.kwargs.get("index", call.node.args[-1])
    rank = len(call.args[0].shape)
    if not (isinstance(index, Tensor) and isinstance(node, fx.Node) and _is_computed(run, index, node)):
        return call
    labels = run.of(call.args[0], [d - rank for d in range(rank) if d != dim % rank])
    if dim % rank in run.varied(labels):
        return call
    positions = ConstantRef(node.name, tuple(index.shape), torch.zeros_like(index))
    return replace(call, args=(labels, dim, positions), kwargs={})


def _is_computed(run: Propagation, labels: Tensor, node: fx.Node) -> bool:
    """Does the node compute places that are the same for all channels?"""
    value = run.values[node.name]
    return (
        isinstance(value, TensorInfo)
        and value.dtype in (torch.int64, torch.int32)
        and not bool((labels > 0).any())
    )
