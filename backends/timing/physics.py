"""A lower bound on the latency of convolutions: their multiply-adds at the processor's peak.

Good kernels stay far above it, so a timing below it has gone wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

#: Multiply-adds of single precision per cycle of one core, by flag in /proc/cpuinfo; the first flag present
#: counts. There are two units for fused multiply-adds, each as wide as a vector (512, 256, 128 bits).
_A_CYCLE = {"avx512f": 32, "avx": 16, "sse2": 8}
#: On other processors: an outer product of two vectors of 512 bits each cycle (SME).
_A_CYCLE_ELSEWHERE = 256
#: Cycles per second: more than any processor on sale reaches. (The system's maximum may leave out boosts.)
_FASTEST_HZ = 6.5e9
_CPU_INFO = Path("/proc/cpuinfo")


def least_ms(model: onnx.ModelProto, threads: int) -> float:
    """Return the least ms that the model's products of single precision need on ``threads`` cores."""
    return 1e3 * multiply_adds(model) / (threads * peak())


@functools.cache
def peak() -> float:
    """Return how many multiply-adds of single precision a core can do per second at most."""
    flags = _flags(_CPU_INFO.read_text()) if _CPU_INFO.exists() else set()
    return _FASTEST_HZ * next(
        (count for flag, count in _A_CYCLE.items() if flag in flags), _A_CYCLE_ELSEWHERE
    )


def _flags(info: str) -> set[str]:
    lines = (line.partition(":") for line in info.splitlines())
    return {flag for name, _, value in lines if name.strip() == "flags" for flag in value.split()}


def multiply_adds(model: onnx.ModelProto) -> int:
    """Count the multiply-adds of convolutions and linears of known weights (single precision) and shapes.

    Products with padding do not count, as kernels skip them: a 3 x 3 convolution of a map of one pixel does a
    ninth of its FLOPs. Unknown layers count as 0, so the sum is a lower bound.
    """
    weights = {
        weight.name: tuple(weight.dims)
        for weight in model.graph.initializer
        if weight.data_type == TensorProto.FLOAT
    }
    shapes = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)
    }
    return sum(_of_node(node, weights, shapes) for node in model.graph.node)


def _of_node(
    node: onnx.NodeProto, weights: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    weight = weights.get(node.input[1]) if len(node.input) > 1 else None
    if weight is None:
        return 0
    if node.op_type in ("Conv", "ConvTranspose"):
        read, made = (shapes.get(name, ()) for name in (node.input[0], node.output[0]))
        if node.op_type == "ConvTranspose":
            read, made = made, read  # a convolution's gradient: input and output swap
        if len(read) != len(weight) or len(made) != len(weight):
            return 0
        channels = weight[0] * weight[1]
        return made[0] * channels * math.prod(_taps(node, weight[2:], read[2:], made[2:]))
    if node.op_type in ("Gemm", "MatMul") and len(weight) == 2:
        given = shapes.get(node.input[0], ())
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        rows = given[1:] if transposed else given[:-1]
        return math.prod(rows) * math.prod(weight) if given else 0
    return 0


def _taps(
    node: onnx.NodeProto, kernel: tuple[int, ...], read: tuple[int, ...], made: tuple[int, ...]
) -> list[int]:
    """Return, by dimension, how many pairs of an output position and a kernel weight read no padding."""
    given = {a.name: list(a.ints) for a in node.attribute}
    if any(a.name == "auto_pad" and a.s not in (b"", b"NOTSET") for a in node.attribute):
        return [0]
    ones = [1] * len(kernel)
    strides, dilations = given.get("strides", ones), given.get("dilations", ones)
    pads = given.get("pads", [0] * 2 * len(kernel))
    found = []
    for k, n, m, stride, dilation, pad in zip(kernel, read, made, strides, dilations, pads, strict=False):
        places = stride * np.arange(m)[:, None] + dilation * np.arange(k) - pad
        found.append(int(((places >= 0) & (places < n)).sum()))
    return found
