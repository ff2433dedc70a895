"""Small networks with recurrent layers and cells."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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


class StateSpace(nn.Module):
    """Heads of a state space model (Mamba 2), all positions at once: a head goes as a whole."""

    def __init__(self, heads: int = 4, each: int = 2, states: int = 5) -> None:
        super().__init__()
        self.sizes, wide = (heads, each, states), heads * each
        self.project = nn.Linear(8, 2 * wide + 2 * states + heads)
        self.conv = nn.Conv1d(wide + 2 * states, wide + 2 * states, 3, padding=2, groups=wide + 2 * states)
        self.decay, self.skip, self.step = (nn.Parameter(torch.zeros(heads)) for _ in range(3))
        self.norm, self.back = nn.GroupNorm(heads, wide), nn.Linear(wide, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[N, positions, 8]."""
        heads, each, states = self.sizes
        batch, count, _ = x.shape
        gate, given, step = torch.split(self.project(x), [heads * each, heads * each + 2 * states, heads], -1)
        step = F.softplus(step + self.step)
        given = F.silu(self.conv(given.transpose(1, 2))[..., :count].transpose(1, 2))
        values, into, out = torch.split(given, [heads * each, states, states], -1)
        values = values.view(batch, count, heads, each)
        sums = torch.cumsum(step * -torch.exp(self.decay), 1).transpose(1, 2)
        passed = torch.exp(sums[..., :, None] - sums[..., None, :]).tril()
        y = ((out @ into.transpose(1, 2))[:, None] * passed) @ (values * step[..., None]).transpose(1, 2)
        y = y.transpose(1, 2) + values * self.skip[:, None]
        y = self.norm((y.reshape(batch, count, -1) * F.silu(gate)).reshape(batch * count, -1))
        return self.back(y.view(batch, count, -1))  # type: ignore[no-any-return]


@awkward(1.0)
def state_space_model() -> nn.Module:
    return between(lambda s, h: h + s.mid(lines(h)).transpose(1, 2).unsqueeze(2), mid=StateSpace())


@awkward(0.0)
def triangle_of_channels() -> nn.Module:
    """What is left of each channel follows from its number."""
    return between(lambda s, h: (h.movedim(1, -1).flatten(1, 2).triu()).movedim(1, -1).view_as(h))


@awkward(0.0)
def lstm_with_a_projection() -> nn.Module:
    rnn = nn.LSTM(8, 12, proj_size=8, batch_first=True)
    return between(lambda s, h: h + s.rnn(lines(h))[0].transpose(1, 2).unsqueeze(2), rnn=rnn)
