"""Operators with weights, as the layers of torch.nn: convolutions, linears, norms, pooling."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smcp_fx.backends.onnx.importing.building import Builder, module_path
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import Rule
from smcp_fx.backends.onnx.importing.size_arithmetic import combined


def _windows(b: Builder, call: Call, kernel: list[int]) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """Return the input, padded if its two ends differ, and the strides, remaining paddings and dilations."""
    rank, x = len(kernel), call.inputs[0]
    strides = list(call.attribute("strides", [1] * rank))
    dilations = list(call.attribute("dilations", [1] * rank))
    written = list(call.attribute("kernel_shape", kernel))
    if not len(strides) == len(dilations) == rank == (call.rank or 0) - 2 or written != kernel:
        raise call.refused(
            f"strides {strides}, dilations {dilations} or kernel_shape {written} do not fit a window {kernel}"
        )
    automatic = call.attribute("auto_pad", "NOTSET")
    if automatic.startswith("SAME"):
        begins, ends = [], []
        for axis in range(rank):
            reach = (kernel[axis] - 1) * dilations[axis] + 1
            total = _same_padding(b, b.size(x, axis + 2), reach, strides[axis])
            small = combined(b, operator.floordiv, total, 2)
            large = combined(b, operator.sub, total, small)
            begins.append(small if automatic == "SAME_UPPER" else large)
            ends.append(large if automatic == "SAME_UPPER" else small)
    else:
        pads = list(call.attribute("pads", [0] * 2 * rank)) if automatic != "VALID" else [0] * 2 * rank
        begins, ends = pads[:rank], pads[rank:]
    if all(isinstance(p, int) and p == q for p, q in zip(begins, ends, strict=True)):
        return x, (tuple(strides), tuple(begins), tuple(dilations))
    value = float("-inf") if call.kind == "MaxPool" else 0.0
    flat = tuple(p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair)
    return b.call(F.pad, x, flat, "constant", value), (tuple(strides), (0,) * rank, tuple(dilations))


def _same_padding(b: Builder, size: Any, reach: int, stride: int) -> Any:
    if stride == 1:
        return reach - 1
    over = combined(b, operator.mod, size, stride)  # max(reach - (size % stride or stride), 0)
    if isinstance(over, int):
        return max(reach - (over or stride), 0)
    steps = combined(b, operator.floordiv, combined(b, operator.add, size, stride - 1), stride)
    needed = combined(
        b, operator.add, combined(b, operator.mul, combined(b, operator.sub, steps, 1), stride), reach
    )
    return combined(b, max, combined(b, operator.sub, needed, size), 0)


def _conv(b: Builder, call: Call) -> Any:
    weight, bias, groups = call.inputs[1], call.input(2), call.attribute("group", 1)
    kernel = list(b.shapes(weight)[0][2:])
    x, windows = _windows(b, call, kernel)
    if not isinstance(weight, Tensor) or not isinstance(bias, (Tensor, type(None))):
        return b.call(call.of_rank(F, "conv", len(kernel)), x, weight, bias, *windows, groups)
    layer = call.of_rank(nn, "Conv", len(kernel))(
        weight.shape[1] * groups, weight.shape[0], tuple(kernel), *windows, groups, bias is not None,
        device="meta",
    )  # fmt: skip
    return _called(b, call, layer, x, weight=weight, bias=bias)


def _conv_transpose(b: Builder, call: Call) -> Any:
    weight, bias, groups = call.constant(1), call.input(2), call.attribute("group", 1)
    kernel, rank = list(weight.shape[2:]), weight.dim() - 2
    strides, dilations = call.attribute("strides", [1] * rank), call.attribute("dilations", [1] * rank)
    extra = list(call.attribute("output_padding", [0] * rank))
    pads = list(call.attribute("pads", [0] * 2 * rank))
    if call.attribute("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in call.attributes:
        raise call.refused("auto_pad or output_shape: export it with explicit pads")
    begins, ends = pads[:rank], pads[rank:]
    layer = call.of_rank(nn, "ConvTranspose", rank)(
        weight.shape[0], weight.shape[1] * groups, tuple(kernel), tuple(strides),
        tuple(begins) if begins == ends else 0, tuple(extra), groups, bias is not None, tuple(dilations),
        device="meta",
    )  # fmt: skip
    full = _called(b, call, layer, call.inputs[0], weight=weight, bias=bias)
    if begins == ends:
        return full
    cut = tuple(-p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair)
    return b.call(F.pad, full, cut)


def _called(b: Builder, call: Call, layer: nn.Module, x: Any, **weights: Tensor | None) -> Any:
    """Call a layer with these weights; layers with the same matrix share it, and a bias that both use.

    Layers share no other vectors: exporters write equal vectors, such as zeros, once for all layers.
    """
    matrix = weights["weight"]
    for name, value in weights.items():
        if value is not None:
            own = getattr(layer, name)
            if tuple(own.shape) != tuple(value.shape):
                raise call.refused(f"its {name} is of sizes {tuple(value.shape)}, not {tuple(own.shape)}")
            held = nn.Parameter(value.clone() if value.dim() == 1 else value)
            if matrix is not None and matrix.dim() > 1:
                *_, held = b.shared.setdefault((id(matrix), id(value)), (matrix, value, held))
            setattr(layer, name, held)
    return b.module(module_path(call, b.name_of(weights["weight"])), layer, x)


def _gemm(b: Builder, call: Call) -> Any:
    x, weight, bias = call.inputs[0], call.input(1), call.input(2)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if call.attribute("transA", 0):
        x = b.call(torch.permute, x, (1, 0))
    if not isinstance(weight, Tensor):
        weight = b.call(torch.permute, weight, (1, 0)) if call.attribute("transB", 0) else weight
        y = b.call(torch.matmul, x, weight)
        y = y if alpha == 1 else b.call(operator.mul, y, alpha)
        if bias is None:
            return y
        return b.call(operator.add, y, bias if beta == 1 else b.call(operator.mul, bias, beta))
    if not call.attribute("transB", 0):
        weight = b.name(weight.T.contiguous(), b.name_of(weight))
    weight = weight if alpha == 1 else b.name(alpha * weight, b.name_of(weight))
    if isinstance(bias, Tensor) and bias.numel() in (1, weight.shape[0]):
        bias = (bias if beta == 1 else beta * bias).reshape(-1).expand(weight.shape[0]).clone()
        return linear(b, call, x, weight, bias)
    y = linear(b, call, x, weight, None)
    return y if bias is None else b.call(operator.add, y, bias)


def linear(b: Builder, call: Call, x: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """Call a linear layer; the weight is [out, in]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return _called(b, call, layer, x, weight=weight, bias=bias)


def _matmul(b: Builder, call: Call) -> Any:
    x, weight = call.inputs
    if isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(x, Tensor):
        return linear(b, call, x, b.name(weight.T.contiguous(), b.name_of(weight)), None)
    return b.call(torch.matmul, x, weight)


def _batch_norm(b: Builder, call: Call) -> Any:
    weight, bias, mean, var = (call.constant(position) for position in range(1, 5))
    if call.attribute("training_mode", 0):
        raise call.refused(
            "it normalises by the batch, as in training: export the network after model.eval()"
        )
    epsilon, momentum = call.attribute("epsilon", 1e-5), call.attribute("momentum", 0.9)
    layer: Any = call.of_rank(nn, "BatchNorm", max((call.rank or 0) - 2, 1))(
        weight.numel(), epsilon, 1 - momentum
    )
    if any(value.shape != (weight.numel(),) for value in (bias, mean, var)):
        raise call.refused("its weights are of different sizes")
    layer.running_mean, layer.running_var = mean.clone(), var.clone()
    return _called(b, call, layer.eval(), call.inputs[0], weight=weight, bias=bias)


def _instance_norm(b: Builder, call: Call) -> Any:
    weight = call.constant(1)
    layer = call.of_rank(nn, "InstanceNorm", (call.rank or 0) - 2)(
        weight.numel(), call.attribute("epsilon", 1e-5), affine=True
    )
    return _called(b, call, layer, call.inputs[0], weight=weight, bias=call.constant(2))


def _layer_norm(b: Builder, call: Call) -> Any:
    axis, weight = call.axis(-1), call.constant(1)
    if len(call.proto.output) > 1 and any(call.proto.output[1:]):
        raise call.refused("its mean or deviation is read")
    shape = b.shapes(call.inputs[0])[0][axis:]
    bias = call.constant(2) if call.has(2) else None
    layer = nn.LayerNorm(shape, call.attribute("epsilon", 1e-5), bias=bias is not None)
    expanded = weight.expand(shape).contiguous() if weight.shape != shape else weight
    return _called(b, call, layer, call.inputs[0], weight=b.name(expanded, b.name_of(weight)), bias=bias)


def _rms_norm(b: Builder, call: Call) -> Any:
    axis, weight = call.axis(-1), call.constant(1)
    layer = nn.RMSNorm(b.shapes(call.inputs[0])[0][axis:], call.attribute("epsilon", 1e-5))
    return _called(b, call, layer, call.inputs[0], weight=weight)


def _group_norm(b: Builder, call: Call) -> Any:
    weight, bias, groups = call.constant(1), call.constant(2), call.attribute("num_groups")
    channels = b.shapes(call.inputs[0])[0][1]
    if weight.numel() == groups != channels:  # one per group before opset 21
        weight, bias = (b.name(v.repeat_interleave(channels // groups), b.name_of(v)) for v in (weight, bias))
    layer = nn.GroupNorm(groups, channels, call.attribute("epsilon", 1e-5))
    return _called(b, call, layer, call.inputs[0], weight=weight, bias=bias)


def _max_pool(b: Builder, call: Call) -> Any:
    kernel = list(call.attribute("kernel_shape"))
    if len(call.proto.output) > 1 and call.proto.output[1]:
        raise call.refused("its indices are read")
    x, (strides, padding, dilations) = _windows(b, call, kernel)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        flat = tuple(p for pad in reversed(padding) for p in (pad, pad))
        x, padding = b.call(F.pad, x, flat, "constant", float("-inf")), (0,) * len(kernel)
    pool, ceil = call.of_rank(F, "max_pool", len(kernel)), bool(call.attribute("ceil_mode", 0))
    return b.call(pool, x, tuple(kernel), strides, padding, dilations, ceil)


def _average_pool(b: Builder, call: Call) -> Any:
    kernel, counted = list(call.attribute("kernel_shape")), bool(call.attribute("count_include_pad", 0))
    x, (strides, padding, dilations) = _windows(b, call, kernel)
    if any(d != 1 for d in dilations) or (x is not call.inputs[0] and not counted):
        raise call.refused("dilations, or padding that differs at the two ends and is not counted")
    ceil = bool(call.attribute("ceil_mode", 0))
    pool = call.of_rank(F, "avg_pool", len(kernel))
    return b.call(pool, x, tuple(kernel), strides, padding, ceil, counted)


LAYERS: dict[str, Rule] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
}
