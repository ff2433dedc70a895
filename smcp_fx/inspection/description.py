"""A network's channel graph described in plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.analysis import analyse
from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.groups import Group
from smcp_fx.channels.trail import Layer
from smcp_fx.config import PruningConfig
from smcp_fx.interface.example_inputs import default_inputs, first_convolution
from smcp_fx.zoo.models import network_and_inputs

#: Usual image sides of known architectures, tried before the smallest side that works.
_SIDES = {1: (224,), 2: (224, 299), 3: (112,)}


@dataclass(frozen=True)
class Inspection:
    """A network's channel graph, the model's name, and the shapes of the inputs that it was traced with.

    ``regions``: the traced parts of a model that could not be traced whole; ``untraced``: reasons, by path.
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    channels: ChannelGraph
    regions: tuple[str, ...] = ()
    untraced: Mapping[str, str] = field(default_factory=dict)


def inspect_model(
    spec: str,
    *,
    input_size: str | None = None,
    multiple: int = 8,
    exclude: tuple[str, ...] = (),
    widths: tuple[str, ...] = (),
) -> Inspection:
    """Build a model, trace it and derive its channel graph.

    ``spec``: as for `build_model`; ``input_size``: "160" (a side), "3x160x160" (one input without its batch)
    or "4x3x160x160"; for an ONNX file, as for `read_network`. Raises `InputError` for models and sizes that
    do not fit, `TraceError` for models that cannot be traced, not even in parts.
    """
    model, example = network_and_inputs(spec, input_size)
    inputs = example or _usual_inputs(model)
    analysis = analyse(model, inputs, config=PruningConfig(multiple=multiple, exclude=exclude, widths=widths))
    shapes = tuple(tuple(value.shape) for value in inputs if isinstance(value, Tensor))
    regions = () if analysis.joined is None else tuple(region.path for region in analysis.joined.regions)
    untraced = {} if analysis.joined is None else analysis.joined.stopped
    return Inspection(spec, shapes, analysis.channels, regions, untraced)


def _usual_inputs(model: nn.Module) -> tuple[Any, ...]:
    first = first_convolution(model)
    return default_inputs(model, () if first is None else _SIDES[len(first.kernel_size)])


def describe(inspection: Inspection) -> dict[str, Any]:
    """Return everything as plain JSON values.

    ``layers`` in the order they run, each once; ``groups`` as in a compile report, with ``permitted`` counts
    and ``channels``: [path, "in" or "out", channels per unit there]; ``pinned``: a summary of the reasons
    that keep units; ``regions`` and ``untraced`` as in `Inspection`.
    """
    channels = inspection.channels
    return {
        "model": inspection.name,
        "inputs": [list(shape) for shape in inspection.inputs],
        "regions": list(inspection.regions),
        "untraced": dict(inspection.untraced),
        "free_share": channels.free_share,
        "freedom": channels.freedom,
        "layers": [layer_record(channels, layer) for layer in unique_layers(channels)],
        "groups": [group_record(group) for group in channels.groups],
        "pinned": [
            {"reason": reason, "groups": groups, "units": units}
            for reason, groups, units in pinned_summary(channels)
        ],
    }


def unique_layers(channels: ChannelGraph) -> list[Layer]:
    """Return the layers in the order they run, without repeated calls."""
    layers: dict[str, Layer] = {}
    for layer in channels.layers:
        layers.setdefault(layer.path, layer)
    return list(layers.values())


def groups_of(channels: ChannelGraph, labels: Tensor) -> dict[str, int]:
    """Return the number of these 1-D labels' channels in each group, by name; "" counts the others."""
    units = channels.units.of(labels)
    indices = torch.where(units >= 0, channels.group_of_unit[units.clamp(min=0)], units.new_tensor(-1))
    counts = Counter(indices.tolist())
    return {channels.groups[i].name if i >= 0 else "": n for i, n in sorted(counts.items())}


def layer_record(channels: ChannelGraph, layer: Layer) -> dict[str, Any]:
    """Return a layer as plain values; ``in_group`` and ``out_group`` are lists of names."""
    return {
        "path": layer.path,
        "kind": layer.kind,
        "groups": layer.groups,
        "in_channels": layer.input_channels.numel(),
        "out_channels": layer.output_channels.numel(),
        "weight_shape": list(layer.weight_shape),
        "in_shape": list(layer.in_shape),
        "out_shape": list(layer.out_shape),
        "in_group": [name for name in groups_of(channels, layer.input_channels) if name],
        "out_group": [name for name in groups_of(channels, layer.output_channels) if name],
    }


def group_record(group: Group) -> dict[str, Any]:
    """Return a group as plain values."""
    return {
        "name": group.name,
        "size": group.size,
        "permitted": list(group.choices),
        "limits": list(group.limits),
        "pinned": list(group.pinned),
        "producers": list(group.producers),
        "consumers": list(group.consumers),
        "channels": [[path, side, count] for (path, side), count in group.channels.items()],
    }


def pinned_summary(channels: ChannelGraph) -> list[tuple[str, int, int]]:
    """Return (reason, groups, units) for each reason why units must stay, most units first."""
    groups: Counter[str] = Counter()
    units: Counter[str] = Counter()
    for group in channels.groups:
        for reason in group.pinned:
            groups[reason] += 1
            units[reason] += group.size
    return [(reason, groups[reason], count) for reason, count in units.most_common()]
