"""Recurrent layers as functions of their weights, so that what they read and remember has channels.

before   y, h = lstm(x)     after   y, h, c = torch.lstm(x, (zeros, zeros), [weight_ih_l0, weight_hh_l0, ...], ...)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
_CELLS: dict[type[nn.Module], dict[str, Callable[..., Any]]] = {
    nn.LSTMCell: {"": torch.lstm_cell},
    nn.GRUCell: {"": torch.gru_cell},
    nn.RNNCell: {"tanh": torch.rnn_tanh_cell, "relu": torch.rnn_relu_cell},
}
#: Their names as operations.
RECURRENT = frozenset("lstm gru rnntanh rnnrelu lstmcell grucell rnntanhcell rnnrelucell".split())


def is_recurrent(module: Any, args: tuple[Any, ...]) -> bool:
    """Is this a call of a recurrent layer, or of a cell, on a tensor?"""
    several = type(module) in (nn.LSTM, nn.GRU, nn.RNN) and not module.proj_size
    return (several or type(module) in _CELLS) and bool(args) and isinstance(args[0], fx.Proxy)


def recurrent_forward(module: Any, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """What to trace in the place of its forward; ``value``: what a traced tensor is on the example."""
    return functools.partial(_step if type(module) in _CELLS else _run, module, value)


def _run(module: Any, value: Callable[[Any], Any], /, input: Any, hx: Any = None) -> Any:
    """What the layer returns: the last level's states of all times, and every level's last one."""
    if not isinstance(value(input), Tensor):  # packed
        return type(module).forward(module, input, hx)
    alone = value(input).dim() == 2
    images = 0 if module.batch_first else 1
    states = 2 if module.mode == "LSTM" else 1
    if alone:
        input = input.unsqueeze(images)
        hx = hx if hx is None else [h.unsqueeze(1) for h in (hx if states == 2 else (hx,))]
    elif hx is not None:
        hx = [*hx] if isinstance(hx, (tuple, list)) else [hx[0], hx[1]] if states == 2 else [hx]
    if hx is None:
        rows = module.num_layers * (2 if module.bidirectional else 1)
        hx = [input.new_zeros(rows, input.shape[images], module.hidden_size)] * states
    weights = [getattr(module, name) for level in module._all_weights for name in level]
    _check(input, weights[0])
    found = _FUNCTIONS[module.mode](
        input, tuple(hx) if states == 2 else hx[0], weights, module.bias, module.num_layers,
        float(module.dropout), module.training, module.bidirectional, module.batch_first,
    )  # fmt: skip
    made, left = found[0], [found[1 + state] for state in range(states)]
    if alone:
        made, left = made.squeeze(images), [h.squeeze(1) for h in left]
    return made, tuple(left) if states == 2 else left[0]


def _check(input: Any, weight: Any) -> None:
    """Let the graph refuse an input of another width, which `torch.lstm` reads past its end."""
    fits = input.tracer.create_proxy("call_function", operator.eq, (input.shape[-1], weight.shape[1]), {})
    said = "the input of a recurrent layer has another number of channels than its weight"
    input.tracer.create_proxy("call_function", torch._assert, (fits, said), {})


def _step(module: Any, value: Callable[[Any], Any], /, input: Any, hx: Any = None) -> Any:
    """What a cell returns: its next state."""
    alone = value(input).dim() == 1
    states = 2 if type(module) is nn.LSTMCell else 1
    if alone:
        input = input.unsqueeze(0)
    if hx is None:
        hx = [input.new_zeros(input.shape[0], module.hidden_size)] * states
    else:
        hx = [*hx] if isinstance(hx, (tuple, list)) else [hx[0], hx[1]] if states == 2 else [hx]
        hx = [h.unsqueeze(0) for h in hx] if alone else hx
    function = _CELLS[type(module)][getattr(module, "nonlinearity", "")]
    weights = module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
    _check(input, weights[0])
    found = function(input, tuple(hx) if states == 2 else hx[0], *weights)
    if states == 1:
        return found.squeeze(0) if alone else found
    return tuple(found[state].squeeze(0) if alone else found[state] for state in range(2))
