"""Limits on the widths of named layers, as counts that their groups may keep."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from smcp_fx.channels.graph import ChannelGraph
from smcp_fx.channels.trail import Layer
from smcp_fx.config import WidthLimit, names
from smcp_fx.errors import InputError

#: Tolerance for shares, which are products of floats.
_ROUNDING = 1e-9


def limit_widths(channels: ChannelGraph, widths: Iterable[str]) -> None:
    """Remove the groups' counts at which a layer would break one of these limits.

    `InputError` if a limit names no layer, if a layer cannot meet it, or if limits contradict each other.
    """
    for limit in map(WidthLimit.of, widths):
        layers = [layer for layer in channels.layers if names(limit.pattern, layer.path)]
        if not layers:
            raise InputError(
                f"widths: {limit.text!r} names no convolution or linear of this network; it has "
                f"{', '.join(layer.path for layer in channels.layers[:6])}, ..."
            )
        free = [_limit(channels, limit, layer) for layer in layers]
        if not any(free) and limit.sign != ">=":
            raise InputError(
                f"widths: {limit.text!r} names layers whose outputs must all stay: {_why(channels, layers[0])}"
            )


def _limit(channels: ChannelGraph, limit: WidthLimit, layer: Layer) -> bool:
    """Limit the groups of a layer's outputs; False if all outputs must stay."""
    labels = torch.unique(layer.output_channels)  # a recurrent layer repeats each output once a gate
    units = channels.units.of(labels)
    of = torch.where(units >= 0, channels.group_of_unit[units.clamp(min=0)], -1)
    indices, counts = (values.tolist() for values in torch.unique(of, return_counts=True))
    free = {i: n for i, n in zip(indices, counts, strict=True) if i >= 0 and channels.groups[i].free}
    full, open_ = labels.numel(), sum(free.values())
    named = limit.sign == "=" or (limit.sign == ">=" and limit.pattern == layer.path)
    if named and not limit.is_share and limit.number > full:  # narrow layers of a pattern stay whole
        raise InputError(f"widths: {limit.text!r} asks for more than the {full} channels of {layer.path!r}")
    wanted = limit.number * full if limit.is_share else min(limit.number, full)
    for index in free:
        group = channels.groups[index]
        share = max(wanted - (full - open_), 0) / open_ * group.size
        if limit.sign == ">=":
            kept = [count for count in group.choices if count >= math.ceil(share - _ROUNDING)]
        elif limit.sign == "<=":
            kept = [count for count in group.choices if count <= math.floor(share + _ROUNDING)]
        else:
            nearest = min(group.permitted, key=lambda count: (abs(count - share), -count))
            kept = [count for count in group.choices if count == nearest]
        limits = (*group.limits, *((limit.text,) if limit.text not in group.limits else ()))
        if not kept:
            raise InputError(
                f"widths: {' and '.join(map(repr, limits))} leave group {group.name!r} no count; of its "
                f"{group.size} units, multiples of {channels.multiple} channels allow "
                f"{', '.join(map(str, group.permitted[:6]))}{', ...' * (len(group.permitted) > 6)}"
            )
        channels.replace_group(index, replace(group, limited=tuple(kept), limits=limits))
    return bool(free)


def _why(channels: ChannelGraph, layer: Layer) -> str:
    units = channels.units.of(layer.output_channels)
    index = int(channels.group_of_unit[units[0]]) if int(units[0]) >= 0 else -1
    pinned = channels.groups[index].pinned if index >= 0 else ()
    return f"of {layer.path!r}, {pinned[0]}" if pinned else f"{layer.path!r}"
