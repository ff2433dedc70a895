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

#: Where a model holds what was cut of its parameters: a graph in its ``meta``, which its copies have, too.
_CUT = "_smcp_cut"
#: Parameter: the kept positions along each dimension that lost some.
Cut = dict[str, dict[int, Tensor]]
#: Attributes that tell of classes and images, whatever numbers they hold.
_OF_THE_TASK = {"num_classes", "pretrained_cfg", "default_cfg"}


def kept_channels(channels: ChannelGraph, keep: Tensor) -> Kept:
    """Return what is kept of each convolution, linear and batch norm; ``keep``: a bool for every unit."""
    sliced = Sliced(channels, keep.cpu() | ~channels.free_units)
    kept: Kept = {}
    for layer in channels.layers:
        ins, outs = (
            sliced.positions(side).tolist() for side in (layer.input_channels, layer.output_channels)
        )
        units = _units(layer)
        if (
            units < layer.output_channels.numel()
        ):  # of a recurrent layer's weights the first says what it reads
            kept.setdefault(_module_of(layer), (ins, [row for row in outs if row < units]))
        else:
            kept[_module_of(layer)] = (ins, outs)
    for norm in channels.trail.norms:
        through = sliced.positions(norm.labels).tolist()
        kept[norm.path] = (through, through)
    return kept


def note_cut(module: nn.Module, cut: Cut | None) -> None:
    """Let a smaller model, and its copies, know what was cut of each parameter."""
    if cut is not None:
        (module.meta if isinstance(module, fx.GraphModule) else vars(module))[_CUT] = cut


def cut_of(module: nn.Module) -> Cut | None:
    """What `note_cut` has noted; None for a model that knows nothing of it."""
    found: Cut | None = (module.meta if isinstance(module, fx.GraphModule) else vars(module)).get(_CUT)
    return found


def still_true(attributes: Mapping[str, Any], channels: ChannelGraph, kept: Kept) -> dict[str, Any]:
    """The attributes that hold no number of channels which is another one now (timm's ``num_features``)."""
    changed = set()
    for layer in channels.layers:
        units, (ins, outs) = _units(layer), kept[_module_of(layer)]
        changed |= {units} if units != len(outs) else set()
        if units == layer.output_channels.numel() and layer.input_channels.numel() != len(ins):
            changed.add(layer.input_channels.numel())
    return {
        name: value
        for name, value in attributes.items()
        if name in _OF_THE_TASK or not changed.intersection(_numbers(value))
    }


def _module_of(layer: Layer) -> str:
    """The module that holds a layer's weight; the weight's own name where that is the model."""
    return layer.path if layer.path != layer.weight else layer.weight.rpartition(".")[0] or layer.weight


def _units(layer: Layer) -> int:
    """Its output channels, of a recurrent layer its hidden units, each of which is a row of every gate."""
    return int(torch.unique(layer.output_channels).numel())


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif type(value) is int:
        yield value
