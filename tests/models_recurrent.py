"""Small networks with recurrent layers and cells."""

from __future__ import annotations

from typing import Any

import torch
from models import awkward, between
from torch import Tensor, nn
from torch.autograd import Variable


def lines(h: Tensor) -> Tensor:
    """The channels last, along the width."""
    return h.mean(2).transpose(1, 2)


@awkward(1.0)
def lstm_of_two_layers_and_directions() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        y, (state, cell) = s.rnn(lines(h))
        return (
            h
            + s.back(y).transpose(1, 2).unsqueeze(2)
            + s.back(torch.cat((state[-1], cell[0]), 1))[..., None, None]
        )

    rnn = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
    return between(wiring, rnn=rnn, back=nn.Linear(12, 8))


@awkward(1.0)
def gru_from_a_computed_state() -> nn.Module:
    """Called twice; the height is part of what it reads."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        sequence = h.flatten(1, 2).permute(2, 0, 1)
        y, state = s.rnn(sequence, s.start(h.mean((2, 3))).unsqueeze(0))
        again, _ = s.rnn(sequence, state)
        return h + s.back(y + again).permute(1, 2, 0).unsqueeze(2)

    return between(wiring, rnn=nn.GRU(64, 6), start=nn.Linear(8, 6), back=nn.Linear(6, 8))


@awkward(1.0)
def recurrent_layer_that_goes_with_its_input() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        return h * s.rnn(lines(h))[0].transpose(1, 2).unsqueeze(2)

    return between(wiring, rnn=nn.RNN(8, 8, batch_first=True, bias=False, nonlinearity="relu"))


@awkward(1.0)
def recurrent_cells() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        first, (second, cell) = h.new_zeros(h.shape[0], 5), (h.new_zeros(h.shape[0], 6),) * 2
        for step in range(2):
            first = s.gru(h[:, :, 0, step], first)
            second, cell = s.lstm(first, (second, cell))
        return h * s.back(second).sigmoid()[..., None, None]

    return between(wiring, gru=nn.GRUCell(8, 5), lstm=nn.LSTMCell(5, 6), back=nn.Linear(6, 8))


@awkward(1.0)
def lstm_from_zeros() -> nn.Module:
    """As tutorials write it: as large as the batch, moved to the input's device."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        state = torch.zeros(s.rnn.num_layers, h.size(0), s.rnn.hidden_size, dtype=h.dtype).requires_grad_()
        y, _ = s.rnn(lines(h), (state, Variable(torch.zeros_like(state))))
        zeros = torch.zeros(2, h.size(0), 6).to(h)
        y = y + s.rnn(lines(h), (zeros, zeros))[0]
        return h + s.back(y).transpose(1, 2).unsqueeze(2)

    return between(wiring, rnn=nn.LSTM(8, 6, 2, batch_first=True), back=nn.Linear(6, 8))


@awkward(0.0)
def lstm_with_a_projection() -> nn.Module:
    rnn = nn.LSTM(8, 12, proj_size=8, batch_first=True)
    return between(lambda s, h: h + s.rnn(lines(h))[0].transpose(1, 2).unsqueeze(2), rnn=rnn)
