"""The signature that identifies a block in a latency table: everything but its widths."""

from __future__ import annotations

import json
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.graph import RULES
from smcp_fx.channels.rules_movement import RULES as MOVEMENTS
from smcp_fx.channels.weight_views import is_layer, weight_of
from smcp_fx.tracing.operations import operation_of, readable_name
from smcp_fx.tracing.recurrent import recurrent
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.traits import Trait, operations_with
from smcp_fx.tracing.values import TensorInfo

#: Operations that move elements and compute nothing.
MOVES = set(MOVEMENTS) - {"cat", "stack", "hstack", "vstack", "pad", "getattr"}
#: Operations that pad.
PADS = operations_with(Trait.PADS)
#: Fields of modules that count channels, or that do not matter at inference.
_UNSIGNED = set(
    """
in_channels out_channels in_features out_features num_features num_channels num_groups num_parameters
normalized_shape embedding_dim input_size hidden_size training eps momentum track_running_stats inplace p
""".split()
)


def signature(
    traced: Traced,
    nodes: list[fx.Node],
    inputs: list[fx.Node],
    axes: dict[str, int | None],
    channels: ChannelGraph,
    read_before: tuple[int, ...],
    fed_by: tuple[str, ...],
    widths: int | None,
) -> str:
    """Return canonical JSON of everything but a block's widths, including sizes that are constants of the graph.

    ``inputs``: the nodes whose tensors ``nodes`` read; ``axes``: the channel axis of each, by name; ``read_before``
    and ``fed_by``: as in `FusedBlock`; ``widths``: how many are free, if it is not built alone.
    """
    place: dict[fx.Node, str] = {n: f"input{i}" for i, n in enumerate(inputs)}
    place.update({n: f"node{i}" for i, n in enumerate(nodes)})
    steps = []
    for node in nodes:
        operation = operation_of(traced.module, node) or readable_name(node)
        whole = _whole_groups(channels, node.name, operation)
        step: dict[str, Any] = {"operation": operation}
        step["from"] = [place.get(n, n.op) for n in node.all_input_nodes]
        if node.op == "call_module":
            step["module"] = _fields(traced.module.get_submodule(str(node.target)), bool(whole))
        elif node.target is recurrent:
            step["module"] = _fields(traced.module.get_submodule(str(node.args[0].target)))  # type: ignore[union-attr]
        if kernel := _kernel(traced, channels, node):
            step["kernel"] = kernel
        arguments = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: place.get(n, n.op)))
        step["arguments"] = arguments
        if operation in MOVES or operation not in RULES:
            step["shape"] = [
                list(v.shape)
                for v in pytree.tree_leaves(traced.values[node.name])
                if isinstance(v, TensorInfo)
            ]
        if whole:
            step["whole groups of"] = whole
        steps.append(step)
    shapes = []
    for node in inputs:
        info = traced.values[node.name]
        axis = axes[node.name]
        shapes.append([*("c" if d == axis else s for d, s in enumerate(info.shape)), str(info.dtype)])
    fixed = [
        list(labels.shape)
        for layer in channels.layers
        if layer.node in {n.name for n in nodes}
        for labels in (layer.in_labels, layer.out_labels)
        if not channels.width(labels).groups
    ]
    parts: dict[str, Any] = {"steps": steps, "inputs": shapes, "fixed": fixed}
    if read_before:
        parts["read before"] = read_before
    if fed_by:
        parts["fed by"] = fed_by
    if widths is not None:
        parts["widths"] = widths
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def _kernel(traced: Traced, channels: ChannelGraph, node: fx.Node) -> list[int]:
    """Return a functional weight's sizes beside its channels: a convolution's kernel, a stack's matrices."""
    if is_layer(node):
        weight = weight_of(node)
        return [] if weight is None else list(traced.values[weight.name].shape[2:])
    layer = next((layer for layer in channels.layers if layer.node == node.name), None)
    if layer is None or node.op == "call_module" or node.target is recurrent:
        return []
    return [n for dim, n in enumerate(layer.weight_shape) if dim not in (layer.in_dim, layer.out_dim)]


def _whole_groups(channels: ChannelGraph, node: str, operation: str) -> list[int]:
    """Return the channels per group if whole groups go, as widths do not tell the number of groups."""
    trail = channels.trail
    if operation == "groupnorm" and node in trail.grouped:
        groups, labels = trail.grouped[node]
        return [labels.numel() // groups]
    layers = (layer for layer in channels.layers if layer.node == node and node in trail.turned)
    return next(([s.numel() // x.groups for s in (x.input_channels, x.output_channels)] for x in layers), [])


def _fields(module: nn.Module, whole: bool = False) -> dict[str, str]:
    """Return a module's identifying fields. ``whole``: whole groups go, so that their number is a width."""
    fields = {"class": type(module).__name__}
    depthwise = getattr(module, "groups", 1) == getattr(module, "in_channels", 0)
    groups = "depthwise" if depthwise else "a width" if whole else None
    for name, value in sorted(vars(module).items()):
        simple = isinstance(value, (int, float, str, bool, tuple, type(None)))
        if simple and not name.startswith("_") and name not in _UNSIGNED:
            of_groups = name in ("groups", "num_groups") and groups and value > 1
            fields[name] = str(groups if of_groups else repr(value))
    fields["bias"] = str(getattr(module, "bias", None) is not None)
    return fields
