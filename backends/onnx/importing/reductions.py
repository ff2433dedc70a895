"""Operators that put many elements into one: sums, softmax, searches, products, normalisation without weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import Rule, scalar
from smcp_fx.backends.onnx.importing.movement import reshape
from smcp_fx.backends.onnx.importing.sizes import Size

#: Softmax and others look at all axes from theirs on, before this opset.
_OF_ONE_AXIS = 13


def _reduced(function: Callable[..., Any], prepare: Callable[..., Any] | None = None) -> Rule:
    """``function(x, axes, keepdim)``; ``prepare`` is applied to each element before."""

    def apply(b: Builder, call: Call) -> Any:
        x, axes = call.inputs[0], call.axes()
        if not axes:
            if call.attribute("noop_with_empty_axes", 0):
                return x
            axes = list(range(call.rank or 0))
        if prepare is not None:
            x = b.call(prepare, x)
        return b.call(function, x, tuple(axes), bool(call.attribute("keepdims", 1)))

    return apply


def _norm(order: int) -> Rule:
    def apply(b: Builder, call: Call) -> Any:
        axes = tuple(call.axes()) or tuple(range(call.rank or 0))
        return b.call(
            torch.linalg.vector_norm, call.inputs[0], order, axes, bool(call.attribute("keepdims", 1))
        )

    return apply


def _product(b: Builder, call: Call) -> Any:
    axes, keep = call.axes() or list(range(call.rank or 0)), bool(call.attribute("keepdims", 1))
    return reduce(lambda x, axis: b.call(torch.prod, x, axis, keep), reversed(axes), call.inputs[0])


def _extreme(function: Callable[..., Any]) -> Rule:
    def apply(b: Builder, call: Call) -> Any:
        if call.attribute("select_last_index", 0):
            raise call.refused("select_last_index")
        return b.call(function, call.inputs[0], call.axis(0), bool(call.attribute("keepdims", 1)))

    return apply


def _softmax(function: Callable[..., Any]) -> Rule:
    def apply(b: Builder, call: Call) -> Any:
        x, rank = call.inputs[0], call.rank or 0
        axis = call.axis(-1 if call.opset >= _OF_ONE_AXIS else 1)
        if (
            call.opset >= _OF_ONE_AXIS
            or axis == rank - 1
            or all(shape[axis + 1 :] == (1,) * (rank - axis - 1) for shape in b.shapes(x))
        ):
            return b.call(function, x, axis)
        flat = b.call(function, b.call(torch.flatten, x, axis), axis)
        return reshape(b, flat, [b.size(x, a) for a in range(rank)])

    return apply


def _top_k(b: Builder, call: Call) -> Any:
    count = scalar(call.input(1))
    if not isinstance(count, (int, Size)):
        raise call.refused("how many to take is computed from the data")
    largest, ordered = bool(call.attribute("largest", 1)), bool(call.attribute("sorted", 1))
    found = b.call(torch.topk, call.inputs[0], count, call.axis(-1), largest, ordered)
    return [b.item(found, 0), b.item(found, 1)]


def _einsum(b: Builder, call: Call) -> Any:
    return b.call(torch.einsum, call.attribute("equation"), *call.inputs)


def _cumsum(b: Builder, call: Call) -> Any:
    if call.attribute("exclusive", 0) or call.attribute("reverse", 0):
        raise call.refused("exclusive or reverse")
    return b.call(torch.cumsum, call.inputs[0], int(call.constant(1)))


def _normalize(b: Builder, call: Call) -> Any:
    return b.call(F.normalize, call.inputs[0], float(call.attribute("p", 2)), call.axis(-1))


def _response_norm(b: Builder, call: Call) -> Any:
    size, alpha = call.attribute("size"), call.attribute("alpha", 1e-4)
    return b.call(
        F.local_response_norm,
        call.inputs[0],
        size,
        alpha,
        call.attribute("beta", 0.75),
        call.attribute("bias", 1.0),
    )


def _global(function: Callable[..., Any]) -> Rule:
    def apply(b: Builder, call: Call) -> Any:
        spatial = (call.rank or 0) - 2
        return b.call(function, call.inputs[0], tuple(range(2, 2 + spatial)), True)

    return apply


def _global_average(b: Builder, call: Call) -> Any:
    pools = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}
    if call.rank not in pools:
        raise call.refused(f"a value of rank {call.rank}")
    return b.call(pools[call.rank], call.inputs[0], 1)


def _grid_sample(b: Builder, call: Call) -> Any:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        call.attribute("mode", "linear"), call.attribute("mode")
    )
    aligned = bool(call.attribute("align_corners", 0))
    return b.call(
        F.grid_sample, *call.inputs, mode=mode or "bilinear",
        padding_mode=call.attribute("padding_mode", "zeros"), align_corners=aligned,
    )  # fmt: skip


REDUCTIONS: dict[str, Rule] = {
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin),
    "ReduceLogSumExp": _reduced(torch.logsumexp),
    "ReduceSumSquare": _reduced(torch.sum, torch.square),
    "ReduceL1": _norm(1),
    "ReduceL2": _norm(2),
    "ReduceProd": _product,
    "ArgMax": _extreme(torch.argmax),
    "ArgMin": _extreme(torch.argmin),
    "Softmax": _softmax(F.softmax),
    "LogSoftmax": _softmax(F.log_softmax),
    "TopK": _top_k,
    "Einsum": _einsum,
    "CumSum": _cumsum,
    "LpNormalization": _normalize,
    "LRN": _response_norm,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global(torch.amax),
    "GridSample": _grid_sample,
}
