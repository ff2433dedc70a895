"""Shape arithmetic of a file: done at once where sizes are fixed, by nodes of the graph where they are open."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.interface import DTYPES
from smcp_fx.backends.onnx.importing.sizes import Size, array_of, as_array, as_value


def combined(builder: Builder, function: Callable[..., Any], *operands: Any) -> Any:
    """Apply a function of numbers: now where they are all known, in the graph where one is a `Size`."""
    if not any(isinstance(operand, Size) for operand in operands):
        return function(*operands)
    at = tuple(function(*(o.at[i] if isinstance(o, Size) else o for o in operands)) for i in (0, 1))
    if isinstance(at[0], bool) and at[0] == at[1]:
        return at[0]
    node = builder.graph.call_function(
        function, tuple(o.node if isinstance(o, Size) else o for o in operands)
    )
    return Size(node, (at[0], at[1]))


def _elementwise(function: Callable[..., Any]) -> Callable[[Builder, Call], Any]:
    def apply(builder: Builder, call: Call) -> Any:
        arrays = np.broadcast_arrays(*(as_array(value) for value in call.inputs))
        rows = zip(*(array.reshape(-1) for array in arrays), strict=True)
        found = array_of((combined(builder, function, *row) for row in rows), arrays[0].shape)
        return as_value(found, _dtype_of(call, function))

    return apply


def _dtype_of(call: Call, function: Callable[..., Any]) -> torch.dtype:
    if function in _COMPARISONS:
        return torch.bool
    found: torch.dtype = next(value.dtype for value in call.inputs)
    return found


def _div(builder: Builder, call: Call) -> Any:
    whole = not call.inputs[0].dtype.is_floating_point
    return _elementwise(operator.floordiv if whole else operator.truediv)(builder, call)


def _cast(builder: Builder, call: Call) -> Any:
    kind, value = DTYPES[call.attribute("to", 0)], call.inputs[0]
    values = value.values
    if value.dtype.is_floating_point and not kind.is_floating_point:
        values = array_of((combined(builder, int, v) for v in value.flat), values.shape)
    return as_value(values, kind)


def _gather(builder: Builder, call: Call) -> Any:
    data, indices = as_array(call.inputs[0]), call.constant(1)
    return as_value(
        np.asarray(np.take(data, indices.numpy(), call.attribute("axis", 0)), object), call.inputs[0].dtype
    )


def _slice(builder: Builder, call: Call) -> Any:
    starts, ends, axes, steps = call.slice_arguments()
    data = as_array(call.inputs[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        keys: list[Any] = [slice(None)] * data.ndim
        keys[axis] = slice(start, end, step)
        data = data[tuple(keys)]
    return as_value(data, call.inputs[0].dtype)


def _concat(builder: Builder, call: Call) -> Any:
    arrays = [as_array(value) for value in call.inputs]
    return as_value(np.concatenate(arrays, call.attribute("axis", 0)), call.inputs[0].dtype)


def _unsqueeze(builder: Builder, call: Call) -> Any:
    return as_value(np.expand_dims(as_array(call.inputs[0]), tuple(call.new_axes())), call.inputs[0].dtype)


def _squeeze(builder: Builder, call: Call) -> Any:
    axes = call.axes()
    values = as_array(call.inputs[0])
    found = np.squeeze(values, tuple(axes) if axes else None)
    return as_value(array_of(np.asarray(found, object).reshape(-1), found.shape), call.inputs[0].dtype)


def _reshape(builder: Builder, call: Call) -> Any:
    return as_value(as_array(call.inputs[0]).reshape(tuple(call.constant(1).tolist())), call.inputs[0].dtype)


def _transpose(builder: Builder, call: Call) -> Any:
    return as_value(as_array(call.inputs[0]).transpose(call.attribute("perm")), call.inputs[0].dtype)


def _product(builder: Builder, call: Call) -> Any:
    factors = as_array(call.inputs[0]).reshape(-1)
    total = functools.reduce(lambda a, b: combined(builder, operator.mul, a, b), factors, 1)
    keep = call.attribute("keepdims", 1)
    return as_value(array_of([total], (1,) if keep else ()), call.inputs[0].dtype)


def _where(builder: Builder, call: Call) -> Any:
    condition = call.inputs[0]
    if not isinstance(condition, Tensor):
        raise call.refused("a shape is chosen by another shape that is open")
    arrays = np.broadcast_arrays(*(as_array(value) for value in call.inputs))
    chosen = [a if c else b for c, a, b in zip(*(array.reshape(-1) for array in arrays), strict=True)]
    return as_value(array_of(chosen, arrays[0].shape), call.inputs[1].dtype)


_COMPARISONS = (operator.eq, operator.lt, operator.gt, operator.le, operator.ge)
#: Operators on arrays that hold sizes; what is not here sees them as numbers or as tensors.
SIZE_OPERATORS: dict[str, Callable[[Builder, Call], Any]] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _div,
    "Mod": _elementwise(operator.mod),
    "Neg": _elementwise(operator.neg),
    "Floor": _elementwise(math.floor),
    "Ceil": _elementwise(math.ceil),
    "Sqrt": _elementwise(math.sqrt),
    "Min": _elementwise(min),
    "Max": _elementwise(max),
    "Equal": _elementwise(operator.eq),
    "Less": _elementwise(operator.lt),
    "Greater": _elementwise(operator.gt),
    "LessOrEqual": _elementwise(operator.le),
    "GreaterOrEqual": _elementwise(operator.ge),
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ReduceProd": _product,
    "Where": _where,
    "Identity": lambda builder, call: call.inputs[0],
}
