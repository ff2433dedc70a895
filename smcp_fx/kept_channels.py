"""Which channels of each module are kept, and which attributes of the original still hold for the smaller model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Layer
from smcp_fx.passes.sliced_labels import Sliced

#: Module path: positions of the input and of the output channels that are kept, among the original's.
Kept = dict[str, tuple[list[int], list[int]]]

#: The key of a model's `Cut`: in the ``meta`` of a graph, which its copies have too, else in its ``vars``.
_CUT = "_smcp_cut"
#: Parameter: the kept positions along each dimension that lost some.
Cut = dict[str, dict[int, Tensor]]
#: Module path: the input channels before and now, and the output channels, in the order in which layers run.
Widths = dict[str, tuple[tuple[int, int], tuple[int, int]]]
#: Attributes that hold the widths of features.
WIDTHS = ("num_features", "head_hidden_size", "in_features", "hidden_size", "embed_dim", "feature_info")
#: Attributes about classes and images, which stay whatever numbers they hold.
_OF_THE_TASK = {"num_classes", "pretrained_cfg", "default_cfg", "answers"}


def kept_channels(channels: ChannelGraph, keep: Tensor) -> Kept:
    """Return the kept channels of each convolution, linear and batch norm; ``keep``: a bool per unit."""
    sliced = Sliced(channels, keep.cpu() | ~channels.free_units)
    kept: Kept = {}
    for layer in channels.layers:
        ins, outs = (
            sliced.positions(side).tolist() for side in (layer.input_channels, layer.output_channels)
        )
        units = _units(layer)
        # The first of a recurrent layer's weights gives its input channels.
        if units < layer.output_channels.numel():
            kept.setdefault(_module_of(layer), (ins, [row for row in outs if row < units]))
        else:
            kept[_module_of(layer)] = (ins, outs)
    for norm in channels.trail.norms:
        through = sliced.positions(norm.labels).tolist()
        kept[norm.path] = (through, through)
    return kept


def note_cut(module: nn.Module, cut: Cut | None) -> None:
    """Record in a smaller model, and so in its copies, what was cut from each parameter."""
    if cut is not None:
        (module.meta if isinstance(module, fx.GraphModule) else vars(module))[_CUT] = cut


def cut_of(module: nn.Module) -> Cut | None:
    """The cut that `note_cut` recorded; None without one."""
    cut: Cut | None = (module.meta if isinstance(module, fx.GraphModule) else vars(module)).get(_CUT)
    return cut


def still_true(attributes: Mapping[str, Any], channels: ChannelGraph, kept: Kept) -> dict[str, Any]:
    """The attributes with new `WIDTHS`; others that hold a changed number are dropped, but `_OF_THE_TASK`."""
    widths: Widths = {}
    for layer in channels.layers:
        path, (ins, outs) = _module_of(layer), kept[_module_of(layer)]
        sides = (layer.input_channels.numel(), len(ins)), (_units(layer), len(outs))
        widths.setdefault(path, sides)  # the first of a recurrent layer's weights gives its inputs
    changed = {old for sides in widths.values() for old, new in sides if old != new}
    values = {name: renumbered(name, value, widths) for name, value in attributes.items()}
    return {
        name: value
        for name, value in values.items()
        if name in _OF_THE_TASK or name in WIDTHS or not changed.intersection(_numbers(value))
    }


def renumbered(name: str, value: Any, widths: Widths, path: str = "") -> Any:
    """The new value of an attribute of the module at ``path``: a width that `WIDTHS` names, or the old value.

    A width becomes that of the last layer inside that read as many channels, else of one that gave as many.
    In timm's ``feature_info``, each module's output channels are updated. A width that no layer had stays.
    """
    if name == "feature_info" and isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return [
            {**one, "num_chs": _now(one["num_chs"], widths, str(one.get("module", "")), (1,))}
            if type(one.get("num_chs")) is int
            else one
            for one in value
        ]
    return _now(value, widths, path, (0, 1)) if name in WIDTHS and type(value) is int else value


def _now(old: int, widths: Widths, path: str, sides: tuple[int, ...]) -> int:
    inside = {name: pair for name, pair in widths.items() if not path or f"{name}.".startswith(f"{path}.")}
    for pairs in (inside, widths):
        for side in sides:
            same = [pair[side][1] for pair in pairs.values() if pair[side][0] == old]
            if same:
                return same[-1] if pairs is inside else same[0]
    return old


def _module_of(layer: Layer) -> str:
    """The module that holds a layer's weight; the weight's own name if the model itself holds it."""
    return layer.path if layer.path != layer.weight else layer.weight.rpartition(".")[0] or layer.weight


def _units(layer: Layer) -> int:
    """The number of output channels; in a recurrent layer, of hidden units, each a row of every gate."""
    return int(torch.unique(layer.output_channels).numel())


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif type(value) is int:
        yield value
