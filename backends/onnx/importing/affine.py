"""Folds constants that multiply or shift the result of a convolution or linear layer into its weights."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.network import VALUE

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def tensor_of(b: Builder, value: Any) -> Tensor | None:
    """Return the floating-point constant that a node holds; None for other nodes."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, name = str(value.target).rpartition(".")
    tensor = getattr(b.root.get_submodule(owner), name)
    return tensor.detach() if isinstance(tensor, Tensor) and tensor.is_floating_point() else None


def fold_affine(b: Builder, outputs: list[Any]) -> None:
    """layer(x) * weight + bias, of one number per channel -> layer(x), if nothing else reads its result."""
    calls = [node.target for node in b.graph.nodes if node.op == "call_module"]
    weights = [id(p) for module in b.root.modules() for p in module._parameters.values()]
    for node in list(b.graph.nodes):
        while node.op == "call_module" and calls.count(node.target) == 1 and node not in outputs:
            layer = b.root.get_submodule(str(node.target))
            reader = next(iter(node.users)) if len(node.users) == 1 else None
            foldable = isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear))
            if reader is None or not foldable or weights.count(id(layer.weight)) > 1:
                break
            value = _per_channel(b, node, reader, layer)
            if value is None or not _fold(reader, layer, value):
                break
            if VALUE in reader.meta:
                node.meta[VALUE] = reader.meta[VALUE]
            reader.replace_all_uses_with(node)
            outputs[:] = [node if output is reader else output for output in outputs]
            b.graph.erase_node(reader)


def _per_channel(b: Builder, node: fx.Node, reader: fx.Node, layer: Any) -> Tensor | None:
    """Return the constant that the reader combines the layer's result with, [channels]."""
    either = (operator.add, operator.mul)
    if reader.target not in (*either, operator.sub, operator.truediv):
        return None
    if reader.args[0] is not node and reader.target not in either:
        return None
    other = reader.args[1] if reader.args[0] is node else reader.args[0]
    (shape, _), channels = b.shapes(node), layer.weight.shape[0]
    if isinstance(layer, _TRANSPOSED):
        channels = layer.out_channels
    if isinstance(other, (int, float)):
        return torch.full((channels,), float(other))
    value = tensor_of(b, other)
    if value is None or value.numel() != channels or value.dim() > len(shape):
        return None
    trailing = 0 if isinstance(layer, nn.Linear) else len(shape) - 2
    sizes = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
    at = len(shape) - 1 - trailing
    return value.reshape(-1) if sizes[at] == channels else None


def _fold(reader: fx.Node, layer: Any, value: Tensor) -> bool:
    """Fold the constant into the layer; return False if that is impossible."""
    with torch.no_grad():
        bias = torch.zeros_like(value) if layer.bias is None else layer.bias.detach().clone()
        if reader.target in (operator.add, operator.sub):
            bias = bias + value if reader.target is operator.add else bias - value
        else:
            factor = value if reader.target is operator.mul else 1 / value
            if not bool(factor.isfinite().all()):
                return False
            layer.weight = nn.Parameter(_scaled(layer, factor))
            bias = bias * factor
        if layer.bias is not None or reader.target in (operator.add, operator.sub):
            layer.bias = nn.Parameter(bias)
    return True


def _scaled(layer: Any, factor: Tensor) -> Tensor:
    weight: Tensor = layer.weight.detach()
    rest = (1,) * (weight.dim() - 2)
    if not isinstance(layer, _TRANSPOSED):
        return weight * factor.reshape(-1, 1, *rest)
    parts = factor.reshape(layer.groups, 1, -1, *rest)  # [in, out / groups, ...], the groups' inputs in turn
    grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
    return (grouped * parts).reshape(weight.shape)
