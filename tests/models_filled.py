"""Small networks that add zeros beside channels, make tensors of zeros, and fill tensors piece by piece."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import awkward, between, conv
from torch import Tensor, nn


@awkward(1.0)
def shortcuts_padded_by_zeros() -> nn.Module:
    """PyramidNet behind, ResNet's option A around the channels; one that crops on one side."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = s.one(h) + F.pad(h, (0, 0, 0, 0, 0, 4))
        h = s.two(h) + F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return s.three(h) + F.pad(h, (0, 0, 0, 0, 3, -3))

    return between(wiring, 8, 16, one=conv(8, 12), two=conv(12, 16, stride=2), three=conv(16, 16))


@awkward(1.0)
def shortcuts_joined_with_zeros() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        zeros = torch.zeros(h.shape[0], 4, h.shape[2], h.shape[3], dtype=h.dtype)
        h = s.one(h) + torch.cat([h, zeros], 1)
        return s.two(h) + torch.cat([h, torch.zeros_like(h[:, :4])], dim=1)

    return between(wiring, 8, 16, one=conv(8, 12), two=conv(12, 16))


@awkward(1.0)
def states_of_a_recurrent_convolution() -> nn.Module:
    """As many channels as the layer that writes the next one."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        state, cell = torch.zeros(len(h), 6, 8, 8, dtype=h.dtype), h.new_zeros((len(h), 6, 8, 8))
        for _ in range(2):
            into, out, forget, new = s.gates(torch.cat([h, state], 1)).chunk(4, 1)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
        return state * torch.full((6, 1, 1), 2.0, dtype=h.dtype)

    return between(wiring, 8, 6, gates=conv(14, 24))


@awkward(1.0)
def zeros_that_no_layer_takes_the_place_of() -> nn.Module:
    """What reads a channel of zeros is worth nothing."""
    return between(lambda s, h: s.mid(torch.cat([h, h.new_zeros(len(h), 4, 8, 8)], 1)), mid=conv(12, 8))


@awkward(1.0)
def filled_piece_by_piece() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        new = torch.empty(h.shape[0], 8, h.shape[2], h.shape[3], dtype=h.dtype)
        new[:, :4] = s.one(h[:, :4])
        new[:, 4:].copy_(h[:, 4:])
        h = new + h
        h[:, 2:6].copy_(s.two(h[:, 2:6] * 2))
        h[:, :, :1].fill_(0.5)
        h[:, :, :, -1:].zero_()
        return h

    return between(wiring, one=conv(4, 4), two=conv(4, 4))


@awkward(1.0)
def filled_by_steps() -> nn.Module:
    """Every other channel, and every third; the second write goes into what the first one made."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        filled, thirds = torch.zeros_like(h), s.wide(h)
        filled[:, ::2], filled[:, 1::2] = s.a(h), s.b(h)
        thirds[:, 1::3] += s.a(filled)
        return thirds

    return between(wiring, after=12, a=conv(8, 4, 1), b=conv(8, 4, 1), wide=conv(8, 12, 1))


@awkward(1.0)
def filled_by_steps_in_space() -> nn.Module:
    """An inverse wavelet transform: twice as large as the input, whatever that is."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, height, width = h.shape
        filled = torch.zeros([b, c // 4, height * 2, 2 * width], dtype=h.dtype)
        parts = h.chunk(4, 1)
        filled[:, :, 0::2, 0::2], filled[:, :, 1::2, 0::2] = parts[0], parts[1]
        filled[:, :, 0::2, 1::2], filled[:, :, 1::2, 1::2] = parts[2], parts[3]
        return filled

    return between(wiring, 16, 4)


@awkward(1.0)
def written_at_places_of_space() -> nn.Module:
    """A mask of every other pixel, a canvas filled at a few places, and messages that are added up."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, channels = h.shape[:2]
        odd, canvas = torch.ones_like(h), torch.zeros(images, channels, 9, dtype=h.dtype)
        odd[:, :, ::2, 1::2] = 0
        canvas[:, :, torch.arange(4) * 2] = s.mid(h)[:, :, 1, :4]
        added = torch.zeros_like(h).index_add(3, torch.arange(8) // 2, s.mid(h))
        return h * odd + added + canvas.view(images, channels, 3, 3).mean((2, 3), keepdim=True)

    return between(wiring, mid=conv(8, 8, 1))


@awkward(0.0)
def filled_by_steps_that_do_not_divide() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        filled = torch.zeros_like(h)
        filled[:, ::3] = s.mid(h)
        return filled

    return between(wiring, mid=conv(8, 3, 1))


@awkward(1.0)
def scattered_slices() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        h = h.slice_scatter(s.mid(h[:, 2:6]), 1, 2, 6)
        h = torch.slice_scatter(h, s.mid(h[:, ::2]), dim=-3, step=2)
        h = torch.select_scatter(h, h[:, :, 0], 2, 1)
        return torch.slice_scatter(h, h[..., :4].relu(), dim=3, start=4)

    return between(wiring, mid=conv(4, 4, 1))


@awkward(1.0)
def zeros_filled_row_by_row() -> nn.Module:
    """Up to the last row, each from a reduction (NetVLAD's loop over clusters)."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        rows = torch.zeros([len(h), 3, h.shape[1]], dtype=h.dtype, device=h.device)
        shares = s.shares(h).softmax(1).flatten(2)
        for k in range(3):
            rows[:, k : k + 1, :] = (h.flatten(2).unsqueeze(1) * shares[:, k : k + 1].unsqueeze(2)).sum(-1)
        return h * s.read(rows.flatten(1)).sigmoid()[..., None, None]

    return between(wiring, shares=conv(8, 3, 1), read=nn.Linear(24, 8))
