"""Shape arithmetic of a file: done at once if sizes are fixed, by nodes of the graph if they are open."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import ARITHMETIC, Rule
from smcp_fx.backends.onnx.importing.interface import DTYPES
from smcp_fx.backends.onnx.importing.sizes import Size, SizeArray, array_of, as_array, as_value


def combined(builder: Builder, function: Callable[..., Any], *operands: Any) -> Any:
    """Apply a function of numbers: now if all are known, in the graph if one is a `Size`."""
    if not any(isinstance(operand, Size) for operand in operands):
        return function(*operands)
    at = tuple(function(*(o.at[i] if isinstance(o, Size) else o for o in operands)) for i in (0, 1))
    if isinstance(at[0], bool) and at[0] == at[1]:
        return at[0]
    node = builder.graph.call_function(
        function, tuple(o.node if isinstance(o, Size) else o for o in operands)
    )
    return Size(node, (at[0], at[1]))


def _elementwise(function: Callable[..., Any]) -> Rule:
    def apply(builder: Builder, call: Call) -> Any:
        arrays = np.broadcast_arrays(*(as_array(value) for value in call.inputs))
        rows = zip(*(array.reshape(-1) for array in arrays), strict=True)
        found = array_of((combined(builder, function, *row) for row in rows), arrays[0].shape)
        return as_value(found, torch.bool if function in _COMPARISONS else call.inputs[0].dtype)

    return apply


def _div(builder: Builder, call: Call) -> Any:
    whole = not call.inputs[0].dtype.is_floating_point
    return _elementwise(operator.floordiv if whole else operator.truediv)(builder, call)


def _cast(builder: Builder, call: Call) -> Any:
    kind, value = DTYPES[call.attribute("to", 0)], call.inputs[0]
    values = value.values
    if value.dtype.is_floating_point and not kind.is_floating_point:
        values = array_of((combined(builder, int, v) for v in value.flat), values.shape)
    return as_value(values, kind)


def _moved(rule: Rule) -> Rule:
    """Apply a rule that only moves elements to the sizes' places in a list, then look the sizes up."""

    def apply(builder: Builder, call: Call) -> Any:
        whole = len(call.inputs) if call.kind == "Concat" else 1
        if not any(isinstance(value, SizeArray) for value in call.inputs[:whole]):
            return rule(builder, call)
        every, places = list[Any](), list[Tensor]()
        for array in map(as_array, call.inputs[:whole]):
            places.append(torch.arange(len(every), len(every) + array.size).reshape(array.shape))
            every += array.reshape(-1).tolist()
        found = rule(builder, replace(call, inputs=[*places, *call.inputs[whole:]]))
        parts = [
            as_value(
                array_of((every[i] for i in at.flatten().tolist()), tuple(at.shape)), call.inputs[0].dtype
            )
            for at in (found if isinstance(found, list) else [found])
        ]
        return parts if isinstance(found, list) else parts[0]

    return apply


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
_OPERATORS: dict[str, Rule] = {
    **{kind: _elementwise(function) for kind, function in ARITHMETIC.items()},
    "Div": _div,
    "Mod": _elementwise(operator.mod),
    "Neg": _elementwise(operator.neg),
    "Floor": _elementwise(math.floor),
    "Ceil": _elementwise(math.ceil),
    "Sqrt": _elementwise(math.sqrt),
    "Min": _elementwise(min),
    "Max": _elementwise(max),
    "Cast": _cast,
    "ReduceProd": _product,
    "Where": _where,
}
_MOVES = frozenset(
    "Concat Expand Flatten Gather Reshape Slice Split Squeeze Tile Transpose Unsqueeze".split()
)


def rule_of_sizes(kind: str, rule: Rule) -> Rule:
    """Return an operator's rule for arrays of sizes; without one, ``rule``, which sees numbers or tensors."""
    return _OPERATORS.get(kind) or (_moved(rule) if kind in _MOVES else rule)
