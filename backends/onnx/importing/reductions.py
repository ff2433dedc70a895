"""Operators that combine many elements: sums, softmax, searches, products, normalisation without weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import Rule, scalar, with_attributes
from smcp_fx.backends.onnx.importing.movement import reshape
from smcp_fx.backends.onnx.importing.sizes import Size

#: Before this opset, Softmax and others work on all axes from theirs on.
_OF_ONE_AXIS = 13


def _axes(call: Call) -> tuple[tuple[int, ...], bool]:
    """Return the axes to reduce, all by default, and whether they are kept with size 1."""
    return tuple(call.axes()) or tuple(range(call.rank or 0)), bool(call.attribute("keepdims", 1))


def _reduced(function: Callable[..., Any], *ahead: Any, prepare: Callable[..., Any] | None = None) -> Rule:
    """Return the rule ``function(x, *ahead, axes, keepdim)``; ``prepare`` is applied to ``x`` first."""

    def apply(b: Builder, call: Call) -> Any:
        x = call.inputs[0]
        if not call.axes() and call.attribute("noop_with_empty_axes", 0):
            return x
        return b.call(function, x if prepare is None else b.call(prepare, x), *ahead, *_axes(call))

    return apply


def _product(b: Builder, call: Call) -> Any:
    axes, keep = _axes(call)
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
        last = all(shape[axis + 1 :] == (1,) * (rank - axis - 1) for shape in b.shapes(x))
        if call.opset >= _OF_ONE_AXIS or last:
            return b.call(function, x, axis)
        flat = b.call(function, b.call(torch.flatten, x, axis), axis)
        return reshape(b, flat, [b.size(x, a) for a in range(rank)])

    return apply


def _top_k(b: Builder, call: Call) -> Any:
    count = scalar(call.input(1))
    if not isinstance(count, (int, Size)):
        raise call.refused("how many to take is computed from the data")
    largest, ordered = bool(call.attribute("largest", 1)), bool(call.attribute("sorted", 1))
    pair = b.call(torch.topk, call.inputs[0], count, call.axis(-1), largest, ordered)
    return [b.item(pair, 0), b.item(pair, 1)]


def _cumsum(b: Builder, call: Call) -> Any:
    if call.attribute("exclusive", 0) or call.attribute("reverse", 0):
        raise call.refused("exclusive or reverse")
    return b.call(torch.cumsum, call.inputs[0], int(call.constant(1)))


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
    "ReduceSumSquare": _reduced(torch.sum, prepare=torch.square),
    "ReduceL1": _reduced(torch.linalg.vector_norm, 1),
    "ReduceL2": _reduced(torch.linalg.vector_norm, 2),
    "ReduceProd": _product,
    "ArgMax": _extreme(torch.argmax),
    "ArgMin": _extreme(torch.argmin),
    "Softmax": _softmax(F.softmax),
    "LogSoftmax": _softmax(F.log_softmax),
    "TopK": _top_k,
    "Einsum": lambda b, call: b.call(torch.einsum, call.attribute("equation"), *call.inputs),
    "CumSum": _cumsum,
    "LpNormalization": with_attributes(F.normalize, p=2, axis=-1),
    "LRN": with_attributes(F.local_response_norm, size=None, alpha=1e-4, beta=0.75, bias=1.0),
    "GlobalAveragePool": lambda b, call: b.call(
        call.of_rank(F, "adaptive_avg_pool", (call.rank or 0) - 2), call.inputs[0], 1
    ),
    "GlobalMaxPool": lambda b, call: b.call(
        torch.amax, call.inputs[0], tuple(range(2, call.rank or 0)), True
    ),
    "GridSample": _grid_sample,
}
