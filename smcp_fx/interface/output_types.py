"""Give outputs the container types that the original model returns.

fx writes every kind of dictionary as a plain one. A call at the graph's end restores what callers rely on
(`.logits` and `[0]` of a `ModelOutput`, the class of an `OrderedDict`):

    before   return {"logits": fc}
    after    out = ImageClassifierOutput(logits=fc); return out
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from typing import Any

from torch import fx

from smcp_fx.tracing.modes import is_by_mode


def keep_output_types(graph: fx.Graph, returned: Any) -> None:
    """Rebuild the dictionaries of the graph's output as the classes that ``returned``, the model's output, has.

    Only `OrderedDict` and dictionaries that are dataclasses are rebuilt: how others are made is not known.
    """
    end = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        end.args = (_rebuilt(graph, end.args[0], returned),)


def _rebuilt(graph: fx.Graph, value: Any, returned: Any) -> Any:
    if isinstance(value, fx.Node) and is_by_mode(value):
        with graph.inserting_before(value):  # what training alone returns is of the same class
            sides = [_rebuilt(graph, side, returned) for side in value.args[1:]]
        value.args = (value.args[0], *sides)
        return value
    if isinstance(value, dict) and isinstance(returned, dict):
        values = {key: _rebuilt(graph, value[key], returned.get(key)) for key in value}
        kind = type(returned)
        if kind is OrderedDict:
            return graph.call_function(OrderedDict, (list(values.items()),))
        if dataclasses.is_dataclass(kind) and values.keys() <= {f.name for f in dataclasses.fields(kind)}:
            return graph.call_function(kind, (), values)
        return values
    if (
        isinstance(value, (list, tuple))
        and isinstance(returned, (list, tuple))
        and len(value) == len(returned)
    ):
        parts = [_rebuilt(graph, a, b) for a, b in zip(value, returned, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def plain_containers(graph: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """A copy with plain containers in place of the user's classes, and the replacements: {class: kind}.

    A named tuple becomes a tuple; a dataclass and a dictionary of another class than `OrderedDict` become a dict.
    """
    copied, became = copy.deepcopy(graph), dict[str, str]()
    for node in reversed(copied.nodes):
        kind = _plain_kind(node)
        if kind is None:
            continue
        called: Any = node.target
        try:
            fields = inspect.signature(called).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            continue
        if kind is tuple:
            fields.apply_defaults()
        values = tuple(fields.arguments.values()) if kind is tuple else dict(fields.arguments)
        _put(values, node)
        copied.erase_node(node)
        became[f"{called.__module__}.{called.__qualname__}"] = kind.__name__
    return copied, became


def _put(values: Any, node: fx.Node) -> None:
    """Replace the node by these values in its users' arguments."""

    def placed(leaf: fx.Node) -> Any:
        return values if leaf is node else leaf

    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(user.args, placed), fx.node.map_arg(user.kwargs, placed)


def _plain_kind(node: fx.Node) -> type | None:
    kind = node.target if node.op == "call_function" else None
    if not isinstance(kind, type) or kind in (dict, tuple, list, OrderedDict):
        return None
    if issubclass(kind, tuple):
        return tuple if hasattr(kind, "_fields") else None
    return dict if dataclasses.is_dataclass(kind) else None
