"""Finds a graph's plain convolutions and linears on parameters that nothing else reads."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrize

from smcp_fx.calibration.layer_rows import Consumer
from smcp_fx.tracing.values import held

_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}
_CONVOLUTIONS = {
    F.conv1d: 1, F.conv2d: 2, F.conv3d: 3,
    F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3,
}  # fmt: skip


def consumer_of(module: fx.GraphModule, node: fx.Node) -> Consumer | None:
    """Return the layer of a node that is a plain convolution or linear on its own parameters, else None."""
    if node.op == "call_module":
        return _of_module(node, module.get_submodule(str(node.target)))
    if node.op == "call_function" and (node.target is F.linear or node.target in _CONVOLUTIONS):
        return _of_function(module, node)
    return None


def by_weight(module: fx.GraphModule) -> tuple[list[list[Consumer]], dict[str, str]]:
    """Return the graph's layers in run order, grouped by shared weight, and by path why others are left out.

    A layer is left out if its parameters have other readers, or are read in several ways.
    """
    consumers: dict[int, list[Consumer]] = {}
    for node in module.graph.nodes:
        consumer = consumer_of(module, node)
        if consumer is not None:
            consumers.setdefault(id(consumer.weight), []).append(consumer)
    reading = {consumer.node: consumer for uses in consumers.values() for consumer in uses}
    elsewhere = _read_elsewhere(module, reading)
    owners: dict[int, set[int]] = {}
    for consumer in reading.values():
        owners.setdefault(id(consumer.bias), set()).add(id(consumer.weight))
    kept, left = [], {}
    for uses in consumers.values():
        parameters = [use.weight for use in uses] + [use.bias for use in uses if use.bias is not None]
        if any(id(parameter) in elsewhere for parameter in parameters):
            why = "its parameters are read elsewhere, too"
        elif len({use.form for use in uses}) > 1:
            why = "its weight is used in several ways"
        elif any(use.bias is not None and len(owners[id(use.bias)]) > 1 for use in uses):
            why = "its bias is another layer's, too"
        else:
            kept.append(uses)
            continue
        left.update(dict.fromkeys((use.path for use in uses), why))
    return kept, left


def _of_module(node: fx.Node, layer: nn.Module) -> Consumer | None:
    x = node.args[0] if node.args else node.kwargs.get("input")
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    hooked = layer._forward_hooks or layer._forward_pre_hooks or parametrize.is_parametrized(layer)
    if not isinstance(x, fx.Node) or weight is None or hooked:
        return None
    path = str(node.target)
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return Consumer(node, path, x, weight, bias, 0)
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    kind = next((kind for kind in kinds if isinstance(layer, kind)), None)
    if (
        kind is None
        or type(layer).forward is not kind.forward
        or getattr(type(layer), "_conv_forward", None) is not getattr(kind, "_conv_forward", None)
    ):
        return None
    assert isinstance(layer, nn.modules.conv._ConvNd)
    rank, sizes = len(layer.kernel_size), (tuple(layer.stride), tuple(layer.dilation))
    pads = (
        tuple(int(length) for length in layer.padding for _ in range(2))
        if layer.transposed
        else tuple(layer._reversed_padding_repeated_twice)
    )
    return Consumer(
        node,
        path,
        x,
        weight,
        bias,
        rank,
        layer.groups,
        layer.transposed,
        *sizes,
        pads,
        _MODES[layer.padding_mode],
    )


def _of_function(module: fx.GraphModule, node: fx.Node) -> Consumer | None:
    names = ["input", "weight", "bias"]
    target: Any = node.target
    rank = _CONVOLUTIONS.get(target, 0)
    transposed = "transpose" in getattr(node.target, "__name__", "")
    if rank:
        names += [
            "stride",
            "padding",
            *(["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]),
        ]
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    source, weight, bias = (arguments.pop(name, None) for name in names[:3])
    read, added = (_parameter(module, value) for value in (weight, bias))
    settings: list[Any] = []
    fx.node.map_aggregate(tuple(arguments.values()), settings.append)
    if read is None or (bias is not None and added is None) or not isinstance(source, fx.Node):
        return None
    if any(isinstance(value, fx.Node) for value in settings):
        return None
    path = str(weight.target)
    if not rank:
        return Consumer(node, path, source, read, added, 0)
    stride, dilation = (_each(arguments.get(name, 1), rank) for name in ("stride", "dilation"))
    padding = arguments.get("padding", 0)
    kernel = read.shape[2:]
    pairs = []
    for dim in range(rank):
        if isinstance(padding, str):
            total = dilation[dim] * (kernel[dim] - 1) if padding == "same" else 0
            pairs.append((total // 2, total - total // 2))
        else:
            pairs.append((_each(padding, rank)[dim],) * 2)
    pads = tuple(length for pair in (pairs if transposed else pairs[::-1]) for length in pair)
    groups = int(arguments.get("groups", 1))
    return Consumer(node, path, source, read, added, rank, groups, transposed, stride, dilation, pads)


def attribute_of(module: nn.Module, node: Any) -> Any:
    """Return the value that a `get_attr` node reads; None for other nodes."""
    return held(module, str(node.target)) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def _parameter(module: nn.Module, node: Any) -> nn.Parameter | None:
    value = attribute_of(module, node)
    return value if isinstance(value, nn.Parameter) else None


def _read_elsewhere(module: fx.GraphModule, reading: dict[fx.Node, Consumer]) -> set[int]:
    """Return parameters that other nodes read, or that these layers read other than as weight and bias."""
    read: set[int] = set()
    for node in module.graph.nodes:
        if node.op == "call_module" and node not in reading:
            read.update(id(p) for p in module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            value = attribute_of(module, node)
            for user in node.users if isinstance(value, nn.Parameter) else ():
                layer = reading.get(user)
                if (
                    layer is None
                    or layer.input is node
                    or (value is not layer.weight and value is not layer.bias)
                ):
                    read.add(id(value))
    return read


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * rank if len(values) == 1 else values
