"""Small networks with recurrent layers and cells."""

from __future__ import annotations

from typing import Any

import torch
from models import awkward, between
from torch import Tensor, nn


@awkward(1.0)
def rows_read_both_ways() -> nn.Module:
    """Two levels, two directions, and columns for each channel and row (text recognition)."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, channels, height, width = h.shape
        made, _ = s.read(h.reshape(images, channels * height, width).permute(2, 0, 1))
        return h * s.out_of(made).permute(1, 2, 0).unsqueeze(2).sigmoid()

    return between(wiring, read=nn.LSTM(64, 5, num_layers=2, bidirectional=True), out_of=nn.Linear(10, 8))


@awkward(1.0)
def last_states() -> nn.Module:
    """Batch first, no biases, a state given."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        tokens = h.mean(2).mT
        _, state = s.read(tokens, s.start(tokens[:, 0]).unsqueeze(0))
        made, _ = s.again(tokens)
        return h * s.out_of(state[-1])[:, :, None, None] + made[:, -1, :, None, None]

    return between(
        wiring,
        read=nn.GRU(8, 6, batch_first=True, bias=False),
        again=nn.RNN(8, 8, batch_first=True, nonlinearity="relu"),
        start=nn.Linear(8, 6),
        out_of=nn.Linear(6, 8),
    )


@awkward(1.0)
def cells() -> nn.Module:
    """Cells that are called step by step, from zeros of their own or given."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        columns, state = h.mean(2), torch.zeros(h.shape[0], 6)
        state, other, long, plain = state.to(h.dtype), None, None, None
        for step in range(3):
            state = s.gated(columns[..., step], state)
            other, long = s.long(columns[..., step], None if other is None else (other, long))
            plain = s.plain(columns[..., step], plain)
        return h * (s.out_of(state) + s.of_long(other) + plain)[:, :, None, None]

    return between(
        wiring,
        gated=nn.GRUCell(8, 6),
        long=nn.LSTMCell(8, 5),
        plain=nn.RNNCell(8, 8),
        out_of=nn.Linear(6, 8),
        of_long=nn.Linear(5, 8),
    )
