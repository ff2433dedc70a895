"""LSTM, GRU and RNN as the layers of torch.nn, whose gates are in another order."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.backends.onnx.importing.building import Builder, module_path
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import Rule
from smcp_fx.backends.onnx.importing.movement import permuted

#: PyTorch's gates as positions among the file's: LSTM i, o, f, c -> i, f, c, o; GRU z, r, h -> r, z, h.
_GATES = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}
_LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
_MOVES = ("expand", torch.reshape, torch.unsqueeze, torch.squeeze, torch.cat, operator.getitem, torch.permute)


def _recurrent(b: Builder, call: Call) -> Any:
    """X [s, b, in] -> Y [s, directions, b, h], the last states [directions, b, h]."""
    weight, hidden = call.constant(1), call.constant(2)
    bias = call.constant(3) if call.has(3) else None
    directions, size = weight.shape[0], hidden.shape[-1]
    reverse = call.attribute("direction", "forward") == "reverse"
    options = _checked(b, call, directions)
    layer = _LAYERS[call.kind](
        weight.shape[-1], size, bias=bias is not None, bidirectional=directions == 2, **options
    )
    gates = _GATES[call.kind]

    def ordered(value: Tensor) -> nn.Parameter:
        parts = value.chunk(len(gates))
        return nn.Parameter(torch.cat([parts[gate] for gate in gates]))

    for direction, suffix in zip(range(directions), ("", "_reverse"), strict=False):
        setattr(layer, f"weight_ih_l0{suffix}", ordered(weight[direction]))
        setattr(layer, f"weight_hh_l0{suffix}", ordered(hidden[direction]))
        if bias is not None:
            of_input, of_hidden = bias[direction].chunk(2)
            setattr(layer, f"bias_ih_l0{suffix}", ordered(of_input))
            setattr(layer, f"bias_hh_l0{suffix}", ordered(of_hidden))
    by_batch = bool(call.attribute("layout", 0))
    x = permuted(b, call.inputs[0], [1, 0, 2]) if by_batch else call.inputs[0]
    x = b.call(torch.flip, x, (0,)) if reverse else x
    begin = _states(b, call)
    out = b.module(module_path(call, ""), layer, *((x,) if begin is None else (x, begin)))
    values, last = b.item(out, 0), b.item(out, 1)
    values = b.call(torch.flip, values, (0,)) if reverse else values
    if directions == 1:
        values = b.call(torch.unsqueeze, values, 1)
    else:
        values = permuted(b, b.call(torch.unflatten, values, 2, (2, size)), [0, 2, 1, 3])
    ends = [b.item(last, 0), b.item(last, 1)] if call.kind == "LSTM" else [last]
    if by_batch:
        values, ends = permuted(b, values, [2, 0, 1, 3]), [permuted(b, end, [1, 0, 2]) for end in ends]
    return [values, *ends]


def _checked(b: Builder, call: Call, directions: int) -> dict[str, Any]:
    """Return the layer's options; `InputError` for features that PyTorch's layers lack."""
    activations = [
        value.decode() if isinstance(value, bytes) else value
        for value in call.attribute("activations", []) or []
    ]
    options: dict[str, Any] = {}
    if call.kind == "RNN":
        names = set(activations or ["Tanh"])
        if names not in ({"Tanh"}, {"Relu"}):
            raise call.refused(f"activations {activations}")
        options["nonlinearity"] = names.pop().lower()
    elif activations and activations != _ACTIVATIONS[call.kind] * directions:
        raise call.refused(f"activations {activations}")
    if call.attribute("clip") is not None or call.attribute("input_forget", 0) or call.has(7):
        raise call.refused("clip, input_forget or peepholes")
    if call.kind == "GRU" and not call.attribute("linear_before_reset", 0):
        raise call.refused("linear_before_reset=0, which torch.nn.GRU does not compute")
    if call.has(4):
        lengths, steps = call.input(4), b.shapes(call.inputs[0])
        whole = isinstance(lengths, Tensor) and all(bool((lengths == s[0]).all()) for s in steps)
        if not whole:
            raise call.refused("sequences of different lengths: export the network without them")
    return options


def _states(b: Builder, call: Call) -> Any:
    """Return the initial states as the layer takes them; None for zeros."""
    positions = (5, 6) if call.kind == "LSTM" else (5,)
    states = [call.input(position) for position in positions]
    if all(value is None or _zeros(value) for value in states):
        return None
    if any(value is None for value in states):
        raise call.refused("one of its two states is given")
    if call.attribute("layout", 0):
        states = [permuted(b, value, [1, 0, 2]) for value in states]
    placed = [b.placed(value) if isinstance(value, Tensor) else value for value in states]
    return tuple(placed) if call.kind == "LSTM" else placed[0]


def _zeros(value: Any) -> bool:
    """Is a value all zeros, at any sizes?"""
    if isinstance(value, Tensor):
        return not bool(value.any())
    if not isinstance(value, fx.Node):
        return False
    if value.target == "new_full":
        return bool(value.args[2] == 0)
    if value.target not in _MOVES:
        return False
    source = value.args[0]
    return all(map(_zeros, source)) if isinstance(source, (list, tuple)) else _zeros(source)


RECURRENT: dict[str, Rule] = dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent)
