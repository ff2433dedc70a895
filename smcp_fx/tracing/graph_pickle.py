"""Graphs in pickles: node by node, with functions by reference, so that nothing is traced again on loading."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from smcp_fx.errors import CheckpointError
from smcp_fx.tracing.modes import with_branches
from smcp_fx.tracing.values import NO_AUTOCAST

#: Notes on a node that change what its code does.
_KEPT_NOTES = ("is_wrapped", NO_AUTOCAST)


@dataclass(frozen=True)
class _Place:
    """A placeholder for the node of this number."""

    number: int


@dataclass(frozen=True)
class _Named:
    """A placeholder for the function that this module holds by this name."""

    module: str
    name: str


@dataclass(frozen=True)
class _Operator:
    """A placeholder for an operator of `torch.ops`, such as "torchvision.nms" or "aten.add.Tensor"."""

    name: str

    def find(self) -> Any:
        """Find the operator; importing the library of its name, if there is one, registers it."""
        operator: Any = torch.ops
        with contextlib.suppress(ImportError):
            importlib.import_module(self.name.partition(".")[0])
        for part in self.name.split("."):
            operator = getattr(operator, part)
        return operator


def listed(graph: fx.Graph, where: str) -> list[tuple[Any, ...]]:
    """The graph as plain data for `pickle`; see `rebuilt`. `CheckpointError` names a node that does not pickle."""
    places: dict[Any, Any] = {node: _Place(number) for number, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        args, kwargs = (fx.node.map_arg(part, places.__getitem__) for part in (node.args, node.kwargs))
        notes = {key: node.meta[key] for key in _KEPT_NOTES if key in node.meta}
        entry = (node.op, node.name, _by_reference(node.target), args, kwargs, notes)
        check_pickles(entry, f"{where}, node {node.name!r}")
        nodes.append(entry)
    return nodes


def _by_reference(target: Any) -> Any:
    """Name a function that pickle would not find: the `__qualname__` of `F.max_pool2d` is a closure's."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return _Operator(str(target))
    module, name = (getattr(target, key, None) for key in ("__module__", "__name__"))
    if (
        getattr(target, "__qualname__", name) == name
        or getattr(sys.modules.get(str(module)), str(name), None) is not target
    ):
        return target
    return _Named(str(module), str(name))


def check_pickles(value: Any, where: str) -> None:
    """Raise `CheckpointError` if `pickle` refuses it: functions and classes that no module holds by name."""
    try:
        pickle.Pickler(io.BytesIO()).dump(value)
    except Exception as error:  # what it raises depends on the object
        raise CheckpointError(
            f"{where} does not pickle ({error}): define the functions and classes that it uses at the top of a "
            "module. Or save the weights: state_dict() of the model, or of the prepared model."
        ) from error


def rebuilt(nodes: list[tuple[Any, ...]]) -> fx.Graph:
    """Inverse of `listed`."""
    graph = fx.Graph()
    made: list[fx.Node] = []

    def placed(value: Any) -> Any:
        return made[value.number] if isinstance(value, _Place) else value

    for op, name, target, args, kwargs, notes in nodes:
        if isinstance(target, _Named):
            target = getattr(importlib.import_module(target.module), target.name)
        elif isinstance(target, _Operator):
            target = target.find()
        args, kwargs = (fx.node.map_aggregate(part, placed) for part in (args, kwargs))
        made.append(graph.create_node(op, target, args, kwargs, name=name))
        made[-1].meta |= notes
    return with_branches(graph)
