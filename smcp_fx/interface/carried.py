"""Attributes of a model that are plain data; graphs made from the model carry them on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

_PLAIN = (bool, int, float, str, type(None))
#: The methods that timm's optimisers call, and their arguments; the answers are plain data, named "answers".
_ASKED: dict[str, tuple[dict[str, bool], ...]] = {
    "group_matcher": ({"coarse": False}, {"coarse": True}),
    "no_weight_decay": ({},),
}
_ANSWERS = "answers"
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
    answers = {name: said for name in _ASKED if (said := _answers(model, name)) is not None}
    info = getattr(model, "feature_info", None)
    features = [getattr(info, "info", None), [*(getattr(info, "out_indices", None) or ())]]
    if features[0] and is_plain(features):  # of a backbone that returns features
        answers["feature_info"] = features
    return ({_ANSWERS: answers} if answers else {}) | {
        name: value
        for name, value in own.items()
        if name not in _OF_GRAPHS and not name.startswith("_") and is_plain(value)
    }


def _answers(model: nn.Module, name: str) -> list[Any] | None:
    method = getattr(model, name, None)
    if not callable(method):
        return None
    try:
        said = [method(**options) for options in _ASKED[name]]
    except Exception:  # another method of this name
        return None
    said = [sorted(one) if isinstance(one, (set, frozenset)) else one for one in said]
    return said if is_plain(said) else None


class Answer:
    """A method of the original whose answers are known."""

    def __init__(self, said: list[Any], is_set: bool) -> None:
        self.said, self.is_set = said, is_set

    def __call__(self, coarse: bool = False) -> Any:
        """As the original's."""
        said = self.said[coarse] if coarse and len(self.said) > 1 else self.said[0]
        return set(said) if self.is_set else copy.deepcopy(said)


def _answering(name: str, said: list[Any]) -> Any:
    if name != "feature_info":
        return Answer(said, name == "no_weight_decay")
    try:
        from timm.models import FeatureInfo
    except ImportError:
        return None
    return FeatureInfo(copy.deepcopy(said[0]), tuple(said[1]))


def carry(module: fx.GraphModule, attributes: Mapping[str, Any]) -> None:
    """Set attributes on a graph module, so that its copies have them, too."""
    carried = module.meta.setdefault(_PRESERVED, {})
    for name, value in attributes.items():
        if not hasattr(module, name):
            carried[name] = copy.deepcopy(value)
            setattr(module, name, carried[name])
    for name, said in attributes.get(_ANSWERS, {}).items():
        if (answering := _answering(name, said)) is not None:
            carried[name] = answering
            setattr(module, name, answering)


def carried_attributes(module: fx.GraphModule) -> dict[str, Any]:
    """The attributes that `carry` set, less the objects that it made from answers."""
    attributes: dict[str, Any] = module.meta.get(_PRESERVED, {})
    return {name: value for name, value in attributes.items() if name not in attributes.get(_ANSWERS, {})}


def without_answers(state: dict[str, Any]) -> dict[str, Any]:
    """A graph module's attributes without those that only this library or timm can unpickle."""
    meta = dict(state.get("meta", {}))
    carried = meta.get(_PRESERVED, {})
    answers = carried.get(_ANSWERS, {})
    meta[_PRESERVED] = {name: value for name, value in carried.items() if name not in answers}
    return {name: meta if name == "meta" else value for name, value in state.items() if name not in answers}


def is_plain(value: Any) -> bool:
    """Is a value a number, a text, or a container of these?"""
    if isinstance(value, Mapping):
        return type(value) is dict and all(is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (tuple, list):
        return all(is_plain(item) for item in value)
    return type(value) in _PLAIN
