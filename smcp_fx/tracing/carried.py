"""Attributes of a model that are plain data, and that graphs made of it carry on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

_PLAIN = (bool, int, float, str, type(None))
_OF_GRAPHS = {*vars(fx.GraphModule(nn.Module(), fx.Graph())), *dir(fx.GraphModule), "kept", "widths"}
#: Where `torch.fx` looks for attributes that copies of a graph module keep.
_PRESERVED = "_user_preserved_attributes"


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """The model's and its classes' own attributes that are plain data: numbers, texts, and containers of these."""
    own: dict[str, Any] = {}
    for kind in reversed(type(model).__mro__):
        if not issubclass(nn.Module, kind):
            own.update(vars(kind))
    own.update(vars(model))
    return {
        name: value
        for name, value in own.items()
        if name not in _OF_GRAPHS and not name.startswith("_") and is_plain(value)
    }


def carry(module: fx.GraphModule, attributes: Mapping[str, Any]) -> None:
    """Set attributes on a graph module, so that its copies have them, too."""
    carried = module.meta.setdefault(_PRESERVED, {})
    for name, value in attributes.items():
        if not hasattr(module, name):
            carried[name] = copy.deepcopy(value)
            setattr(module, name, carried[name])


def carried_attributes(module: fx.GraphModule) -> dict[str, Any]:
    """What `carry` set."""
    return dict(module.meta.get(_PRESERVED, {}))


def is_plain(value: Any) -> bool:
    """Is a value a number, a text, or a container of these?"""
    if isinstance(value, Mapping):
        return type(value) is dict and all(is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (tuple, list):
        return all(is_plain(item) for item in value)
    return type(value) in _PLAIN
