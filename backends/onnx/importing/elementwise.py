"""Operators that compute each element by itself: one line each where torch has the operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.interface import DTYPES
from smcp_fx.backends.onnx.importing.sizes import SizeArray

Rule = Callable[[Builder, Call], Any]

_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish, "IsNaN": torch.isnan,
    "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal,
    "Relu": F.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Sinh": torch.sinh, "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh, "IsInf": torch.isinf,
}  # fmt: skip
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Pow": operator.pow, "Equal": operator.eq,
    "Greater": operator.gt, "GreaterOrEqual": operator.ge, "Less": operator.lt, "LessOrEqual": operator.le,
}  # fmt: skip
_LOGIC = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}
_SIXTH = 1 / 6
_SELU = {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}


def scalar(value: Any) -> Any:
    """Return a constant of one element as a number, which broadcasts the same."""
    if isinstance(value, SizeArray) and value.values.size == 1:
        return value.flat[0]
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool:
        return value.item()
    return value


def operands(b: Builder, call: Call) -> list[Any]:
    """Return the inputs; one-element constants become numbers if a computed input has at least their rank."""
    long = [isinstance(v, SizeArray) and v.values.size > 1 for v in call.inputs]
    values = [b.tensor(v) if several else v for v, several in zip(call.inputs, long, strict=True)]
    ranks = [b.rank(value) or 0 for value in values]
    if not any(isinstance(value, fx.Node) for value in values):
        return [scalar(v) if isinstance(v, SizeArray) else v for v in values]
    highest = max(rank for rank, value in zip(ranks, values, strict=True) if isinstance(value, fx.Node))
    return [
        scalar(v) if not isinstance(v, fx.Node) and rank <= highest else v
        for rank, v in zip(ranks, values, strict=True)
    ]


def _numbers(function: Callable[..., Any]) -> Rule:
    return lambda b, call: b.call(function, *operands(b, call))


def _div(b: Builder, call: Call) -> Any:
    left, right = operands(b, call)
    whole = not b.dtype(call.inputs[0]).is_floating_point
    if whole:
        return b.call(torch.div, left, right, rounding_mode="trunc")
    return b.call(operator.truediv, left, right)


def _mod(b: Builder, call: Call) -> Any:
    return b.call(torch.fmod if call.attribute("fmod", 0) else torch.remainder, *operands(b, call))


def _folded(function: Callable[..., Any]) -> Rule:
    """Return a rule that applies a function of two operands to all operands in turn."""
    return lambda b, call: reduce(lambda left, right: b.call(function, left, right), call.inputs)


def _mean(b: Builder, call: Call) -> Any:
    return b.call(operator.truediv, _folded(operator.add)(b, call), len(call.inputs))


def _clip(b: Builder, call: Call) -> Any:
    lower, upper = (
        float(call.attributes[name]) if name in call.attributes else scalar(call.input(position))
        for name, position in (("min", 1), ("max", 2))
    )
    x = call.inputs[0]
    if isinstance(lower, (int, float)) and lower <= torch.finfo(torch.float32).min:
        lower = None
    if isinstance(upper, (int, float)) and upper >= torch.finfo(torch.float32).max:
        upper = None
    if lower is None and upper is None:
        return x
    if lower == 0 and (upper is None or upper == 6):
        return b.call(F.relu if upper is None else F.relu6, x)
    return b.call(torch.clamp, x, lower, upper)


def _hard_sigmoid(b: Builder, call: Call) -> Any:
    slope, offset = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    x = call.inputs[0]
    if math.isclose(slope, _SIXTH, rel_tol=1e-6) and offset == 0.5:
        return b.call(F.hardsigmoid, x)
    return b.call(torch.clamp, b.call(operator.add, b.call(operator.mul, x, slope), offset), 0.0, 1.0)


def _prelu(b: Builder, call: Call) -> Any:
    x, slope = call.inputs
    if isinstance(slope, Tensor) and slope.numel() == 1:
        return b.call(F.leaky_relu, x, slope.item())
    if isinstance(slope, Tensor) and (call.rank, slope.numel()) == (slope.dim() + 1, slope.shape[0]):
        return b.call(F.prelu, x, b.name(slope.reshape(-1), b.name_of(slope)))
    positive = b.call(F.relu, x)
    return b.call(operator.add, positive, b.call(operator.mul, b.call(operator.sub, x, positive), slope))


def with_attributes(function: Callable[..., Any], **defaults: float | None) -> Rule:
    """Return a rule for one operand and attributes, which the function takes by position in this order."""
    return lambda b, call: b.call(
        function, call.inputs[0], *(call.attribute(name, value) for name, value in defaults.items())
    )


def _selu(b: Builder, call: Call) -> Any:
    alpha, gamma = (call.attribute(name, usual) for name, usual in _SELU.items())
    if np.allclose((alpha, gamma), tuple(_SELU.values()), rtol=1e-6, atol=0):
        return b.call(F.selu, call.inputs[0])
    return b.call(operator.mul, b.call(F.elu, call.inputs[0], alpha), gamma)


def _cast(b: Builder, call: Call) -> Any:
    to = call.attribute("to", 0)
    if to not in DTYPES:
        raise call.refused("a cast to a type that cannot be imported")
    return _as(b, call.inputs[0], DTYPES[to])


def _as(b: Builder, x: Any, kind: torch.dtype) -> Any:
    return x if b.dtype(x) == kind else b.method("to", x, kind)


def _where(b: Builder, call: Call) -> Any:
    condition, *chosen = call.inputs
    single = isinstance(condition, Tensor) and condition.numel() == 1
    if single and b.shapes(chosen[0]) == b.shapes(chosen[1]):
        return chosen[0] if bool(condition) else chosen[1]
    return b.call(torch.where, condition, *chosen)


ELEMENTWISE: dict[str, Rule] = {
    **{name: with_attributes(function) for name, function in _UNARY.items()},
    **{name: _numbers(function) for name, function in ARITHMETIC.items()},
    **{name: _folded(function) for name, function in _LOGIC.items()},
    "Div": _div,
    "Mod": _mod,
    "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum),
    "Sum": _folded(operator.add),
    "Mean": _mean,
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "PRelu": _prelu,
    "Gelu": lambda b, call: b.call(F.gelu, call.inputs[0], approximate=call.attribute("approximate", "none")),
    "LeakyRelu": with_attributes(F.leaky_relu, alpha=0.01),
    "Elu": with_attributes(F.elu, alpha=1.0),
    "Celu": with_attributes(F.celu, alpha=1.0),
    "Selu": _selu,
    "Cast": _cast,
    "CastLike": lambda b, call: _as(b, call.inputs[0], b.dtype(call.inputs[1])),
    "Where": _where,
    "Identity": lambda b, call: call.inputs[0],
    "Dropout": lambda b, call: call.inputs[0],
}
