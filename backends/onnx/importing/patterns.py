"""Reassembles the operations that exporters decompose: activations, norms, factors and summands of layers.

Repair fits whole norms and layers, and runtimes have kernels for whole activations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from smcp_fx.backends.onnx.importing.affine import fold_affine, tensor_of
from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.network import VALUE


def recognise(b: Builder, outputs: list[Any]) -> None:
    """Replace the recognised patterns in the builder's graph and in ``outputs``."""
    for find in (_activation, _layer_norm, _group_norm):
        for node in list(b.graph.nodes):
            if node.graph is not b.graph or node._erased:
                continue
            with b.graph.inserting_before(node):
                replacement = find(b, node)
            if replacement is None:
                continue
            replacement.meta[VALUE] = node.meta.get(VALUE, "")
            b.examples[replacement] = b.examples[node]
            node.replace_all_uses_with(replacement)
            outputs[:] = [replacement if value is node else value for value in outputs]
            _drop(b, node, outputs)
    fold_affine(b, outputs)


def _drop(b: Builder, node: Any, outputs: list[Any]) -> None:
    """Erase a node that nothing reads, then each of its operands that nothing else reads."""
    if node.users or node in outputs or node.op == "placeholder":
        return
    sources = node.all_input_nodes
    b.graph.erase_node(node)
    for source in sources:
        _drop(b, source, outputs)


# ---- activations ------------------------------------------------------------------------------------------


def _activation(b: Builder, node: Any) -> fx.Node | None:
    """x * sigmoid(x), x * relu6(x + 3) / 6, x / 2 * (1 + erf(x / sqrt(2))), and the like."""
    if node.target not in (operator.mul, operator.truediv):
        return None
    factor, parts = _product(node)
    if len(parts) == 1 and parts[0].target is F.relu6 and _close(factor, 1 / 6):
        x, shift = _sum(parts[0].args[0])
        return b.graph.call_function(F.hardsigmoid, (x,)) if x is not None and shift == 3 else None
    if len(parts) != 2:
        return None
    for x, gate in (parts, parts[::-1]):
        for function, scale, fits in _GATES:
            if _close(factor, scale) and fits(gate, x):
                return b.graph.call_function(function, (x,))
        if _close(factor, 0.5) and _is_tanh_gate(gate, x):
            return b.graph.call_function(F.gelu, (x,), {"approximate": "tanh"})
    return None


def _is_erf_gate(gate: Any, x: Any) -> bool:
    inner, one = _sum(gate)
    if inner is None or one != 1 or inner.target is not torch.erf:
        return False
    factor, parts = _product(inner.args[0])
    return parts == [x] and _close(factor, math.sqrt(0.5))


def _is_tanh_gate(gate: Any, x: Any) -> bool:
    inner, one = _sum(gate)
    if inner is None or one != 1 or inner.target is not torch.tanh:
        return False
    factor, parts = _product(inner.args[0])
    if len(parts) != 1 or not _close(factor, math.sqrt(2 / math.pi)) or parts[0].target is not operator.add:
        return False
    rest = [part for part in parts[0].args if part is not x]
    if len(rest) != 1 or not isinstance(rest[0], fx.Node):
        return False
    weight, cubed = _product(rest[0])
    third = cubed == [x] * 3 or (
        len(cubed) == 1 and cubed[0].target is operator.pow and cubed[0].args == (x, 3.0)
    )
    return third and _close(weight, 0.044715)


def _is_shifted(gate: Any, x: Any) -> bool:
    return gate.target is F.relu6 and _sum(gate.args[0]) == (x, 3)


#: Function, constant factor, and a test of the gate, which is the other factor beside x.
_GATES: tuple[tuple[Callable[..., Any], float, Callable[[Any, Any], bool]], ...] = (
    (F.silu, 1.0, lambda gate, x: gate.target is torch.sigmoid and gate.args[0] is x),
    (F.hardswish, 1.0, lambda gate, x: gate.target is F.hardsigmoid and gate.args[0] is x),
    (F.hardswish, 1 / 6, _is_shifted),
    (F.gelu, 0.5, _is_erf_gate),
)


def _product(node: Any) -> tuple[float, list[Any]]:
    """Return a value as a number times nodes; leave an inner product whole if it has other readers."""
    if not isinstance(node, fx.Node) or node.target not in (operator.mul, operator.truediv):
        return 1.0, [node]
    left, right = node.args
    if isinstance(left, fx.Node) and isinstance(right, fx.Node) and node.target is operator.mul:
        (a, first), (c, second) = _inner(left), _inner(right)
        return a * c, [*first, *second]
    if isinstance(left, fx.Node) and isinstance(right, (int, float)) and right != 0:
        factor, parts = _inner(left)
        return (factor * right if node.target is operator.mul else factor / right), parts
    if isinstance(left, (int, float)) and isinstance(right, fx.Node) and node.target is operator.mul:
        factor, parts = _inner(right)
        return factor * left, parts
    return 1.0, [node]


def _inner(node: Any) -> tuple[float, list[Any]]:
    return _product(node) if isinstance(node, fx.Node) and len(node.users) == 1 else (1.0, [node])


def _sum(node: Any) -> tuple[Any, float]:
    """Return a value as a node plus a number; the node is None for any other value."""
    if isinstance(node, fx.Node) and node.target is operator.add:
        for x, number in (node.args, node.args[::-1]):
            if isinstance(number, (int, float)) and isinstance(x, fx.Node):
                return x, float(number)
    return None, 0.0


def _close(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=1e-4)


# ---- norms ------------------------------------------------------------------------------------------------


class _Scaled(NamedTuple):
    """The factor and the summand of a value."""

    weight: Tensor | None
    bias: Tensor | None


def _layer_norm(b: Builder, node: Any) -> fx.Node | None:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + epsilon) * weight + bias, from its end."""
    scaled, core = _affine_of(b, node)
    if core.target is not operator.truediv or (normalised := _normalised(core)) is None:
        return None
    x, epsilon, axes = normalised
    shape, rank = b.shapes(x), len(b.shapes(x)[0])
    axes = sorted(axis % rank for axis in axes)
    own = shape[0][axes[0] :]
    if axes != list(range(axes[0], rank)) or own != shape[1][axes[0] :]:
        return None
    if any(v is not None and tuple(v.shape) != own for v in scaled):
        return None
    if _goes_on(b, node, scaled):
        return None
    layer = nn.LayerNorm(own, epsilon, scaled.weight is not None, scaled.bias is not None)
    return _placed(b, node, layer, scaled, x)


def _normalised(core: Any) -> tuple[Any, float, Sequence[int]] | None:
    """Return x, epsilon and the axes of a normalised value; None for other values."""
    centred, deviation = core.args
    if not _is(centred, operator.sub) or not _is(deviation, torch.sqrt):
        return None
    parts: Any = (*centred.args, *deviation.args)
    x, mean, shifted = parts[:3]
    variance, epsilon = _sum(shifted)
    if not _is(mean, torch.mean) or mean.args[0] is not x or not _is(variance, torch.mean):
        return None
    square: Any = variance.args[0]
    squared = (_is(square, operator.pow) and square.args == (centred, 2.0)) or (
        _is(square, operator.mul) and square.args == (centred, centred)
    )
    if not squared or mean.args[1:] != variance.args[1:] or not mean.args[2]:
        return None
    return x, epsilon, mean.args[1]


def _group_norm(b: Builder, node: Any) -> fx.Node | None:
    """reshape to [n, groups, -1], instance norm, reshape back, * weight + bias."""
    scaled, core = _affine_of(b, node)
    if not _is(core, torch.reshape) or not isinstance(core.args[0], fx.Node):
        return None
    norm: Any = core.args[0]
    layer = b.root.get_submodule(str(norm.target)) if norm.op == "call_module" else None
    if not isinstance(layer, nn.InstanceNorm1d) or not _is(norm.args[0], torch.reshape):
        return None
    x = norm.args[0].args[0]
    if b.shapes(x) != b.shapes(core) or bool((layer.weight != 1).any()) or bool((layer.bias != 0).any()):
        return None
    channels, trailing = b.shapes(x)[0][1], len(b.shapes(x)[0]) - 2
    fitting = [v for v in scaled if v is not None]
    if any(v.numel() != channels or v.shape[v.dim() - trailing :] != (1,) * trailing for v in fitting):
        return None
    if len(fitting) == 1 or _goes_on(b, node, scaled):
        return None
    flat = _Scaled(*(None if v is None else v.reshape(-1) for v in scaled))
    new = nn.GroupNorm(layer.num_features, channels, layer.eps, affine=bool(fitting))
    return _placed(b, node, new, flat, x)


def _affine_of(b: Builder, node: Any) -> tuple[_Scaled, Any]:
    """Take a node apart into core * weight + bias."""
    bias, core = _operand(b, node, operator.add)
    weight, core = _operand(b, core, operator.mul)
    return _Scaled(weight, bias), core


def _operand(b: Builder, node: Any, function: Any) -> tuple[Tensor | None, Any]:
    if node.target is function:
        for value, other in (node.args, node.args[::-1]):
            tensor = tensor_of(b, value)
            if tensor is not None and isinstance(other, fx.Node) and len(other.users) == 1:
                return tensor, other
    return None, node


def _goes_on(b: Builder, node: Any, scaled: _Scaled) -> bool:
    """Does the value's only reader apply a further weight or bias, which belongs to the norm?"""
    if len(node.users) != 1 or scaled.bias is not None:
        return False
    reader = next(iter(node.users))
    wanted = (operator.add,) if scaled.weight is not None else (operator.add, operator.mul)
    return reader.target in wanted and any(tensor_of(b, value) is not None for value in reader.args)


def _placed(b: Builder, node: Any, layer: Any, scaled: _Scaled, x: Any) -> fx.Node:
    name = next((str(v.target) for v in node.all_input_nodes if v.op == "get_attr"), "")
    if scaled.weight is not None:
        layer.weight = nn.Parameter(scaled.weight)
    if scaled.bias is not None:
        layer.bias = nn.Parameter(scaled.bias)
    path = name.removesuffix(".bias").removesuffix(".weight")
    if not path or path == name:
        path = f"{name}_norm" if name else type(layer).__name__.lower()
    b.make_room(path)
    return b.graph.call_module(b.place(path, layer.eval()), (x,))


def _is(node: Any, function: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.target is function
