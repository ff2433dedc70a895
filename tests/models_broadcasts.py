"""Small networks in which a tensor of size one broadcasts beside channels that were folded, moved or shuffled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn


@awkward(1.0)
def maps_times_folded_maps() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        return (h.unsqueeze(1) * s.many(h).view(-1, 2, 8, 8, 8)).flatten(1, 2)

    return between(wiring, 8, 16, many=conv(8, 16))


@awkward(1.0)
def maps_times_folded_maps_channels_first() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        return (h[:, :, None] * torch.sigmoid(s.many(h)).unflatten(1, (8, 3))).amax(2)

    return between(wiring, 8, many=conv(8, 24))


@awkward(1.0)
def gate_behind_a_pixel_shuffle() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        large = F.pixel_shuffle(h, 2)
        return large * torch.sigmoid(s.gate(large.mean((2, 3), keepdim=True)))

    return between(wiring, 32, 8, gate=conv(8, 8, 1))


@awkward(1.0)
def parameter_behind_a_pixel_shuffle() -> nn.Module:
    return between(lambda s, h: F.pixel_shuffle(h, 2) * s.scale, 32, 8, scale=free_parameter(8, 1, 1))


@awkward(1.0)
def parameter_beside_folded_channels() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        return (h.view(-1, 2, 6, 8, 8) * s.scale).flatten(1, 2)

    return between(wiring, 12, scale=free_parameter(6, 1, 1))


@awkward(1.0)
def one_value_a_head() -> nn.Module:
    """More channels in a head than heads, and later nothing that mixes either."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        return (h.view(-1, 2, 6, 64) * s.temperature).reshape(-1, 12, 8, 8)

    return between(wiring, 12, temperature=free_parameter(2, 1, 1))


@awkward(1.0)
def one_value_a_head_whose_channels_are_mixed_later() -> nn.Module:
    """The heads are all that can be told apart: the temperature goes with them."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        heads = h.view(-1, 4, 3, 64) * s.temperature
        return heads.softmax(2).reshape(-1, 12, 8, 8)

    return between(wiring, 12, temperature=free_parameter(4, 1, 1))


def _dynamic(first: bool) -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        slopes = s.slopes(h.mean((2, 3)))
        k = slopes.view(-1, 2, 8).transpose(1, 2) if first else slopes.view(-1, 8, 2)
        return (h.permute(2, 3, 0, 1).unsqueeze(-1) * k).max(-1)[0].permute(2, 3, 0, 1)

    return between(wiring, 8, slopes=nn.Linear(8, 16))


@awkward(1.0)
def slopes_of_channels_in_another_order() -> nn.Module:
    return _dynamic(first=False)


@awkward(1.0)
def slopes_of_channels_in_another_order_transposed() -> nn.Module:
    return _dynamic(first=True)


@awkward(1.0)
def weights_of_stacked_branches() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        both = torch.cat([s.one(x), s.two(x)], 1).view(-1, 2, 8, 8, 8)
        weights = s.weights(both.sum(1).mean((2, 3), keepdim=True)).view(-1, 2, 8, 1, 1).softmax(1)
        return s.out((both * weights).sum(1))  # type: ignore[no-any-return]

    return Net(wiring, one=conv(3, 8), two=conv(3, 8), weights=conv(8, 16, 1), out=conv(8, 4))


@awkward(0.0)
def masks_of_channels_that_stay() -> nn.Module:
    """What the masks meet is multiplied up over its channels, and stays: so do the masks."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        return (h.unsqueeze(1) * torch.sigmoid(s.speakers(h.cumprod(1))).view(-1, 2, 8, 8, 8)).flatten(1, 2)

    return between(wiring, 8, 16, speakers=conv(8, 16))


@awkward(0.0)
def folded_maps_times_what_is_computed_elsewhere() -> nn.Module:
    """An unknown operation's result has one label, and all its channels."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        return (h.flip(1).cumprod(1).unsqueeze(2) * s.many(h).view(-1, 8, 2, 8, 8)).flatten(1, 2)

    return between(wiring, 8, 16, many=conv(8, 16))


@awkward(1.0)
def rows_times_columns() -> nn.Module:
    """Eight channels of one, three of the other: the three stay."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        return s.out((s.rows(x).unsqueeze(1) * s.columns(x).unsqueeze(2)).flatten(1, 2))  # type: ignore[no-any-return]

    return Net(wiring, rows=conv(3, 8), columns=conv(3, 3), out=conv(24, 4))


def _spread(how: Any) -> nn.Module:
    """A gate of one channel, spread over the channels that it gates."""
    return between(lambda s, h: h * how(torch.sigmoid(s.gate(h)), h), gate=nn.Conv2d(8, 1, 1))


@awkward(1.0)
def gate_repeated_by_interleaving() -> nn.Module:
    return _spread(lambda g, h: g.repeat_interleave(8, 1))


@awkward(1.0)
def gate_tiled() -> nn.Module:
    return _spread(lambda g, h: torch.tile(g, (1, h.shape[1], 1, 1)))


@awkward(1.0)
def gate_joined_with_itself() -> nn.Module:
    return _spread(lambda g, h: torch.cat([g] * 8, 1))


@awkward(1.0)
def gate_spread_before_what_is_done_to_it() -> nn.Module:
    return _spread(lambda g, h: 1 + torch.tanh(2 * g.expand_as(h)))


@awkward(1.0)
def two_gates_that_have_the_shape_together() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        channels = s.channels_of(h.mean((2, 3)))[:, :, None, None].expand_as(h)
        return h * (1 + torch.sigmoid(channels * s.places(h).expand_as(h)))

    return between(wiring, channels_of=nn.Linear(8, 8), places=nn.Conv2d(8, 1, 1))


@awkward(1.0)
def one_value_spread_for_a_layer() -> nn.Module:
    """As many channels as the tensor that it is spread like, and as those of what meets it later."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        gate = s.gate(h).expand(-1, 8, -1, -1).sigmoid()
        return s.mid(s.gate(h).expand_as(h).sigmoid()) + s.mid(gate.clone() * s.other(h))

    return between(wiring, gate=conv(8, 1), mid=conv(8, 8), other=conv(8, 8))


@awkward(1.0, (2, 3, 3, 3))
def biases_of_more_positions_than_channels() -> nn.Module:
    """Made of the queries, as halo and bottleneck attention have them: a number a pair of positions is no channel."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        q, k, v = (layer(h).reshape(2 * h.shape[0], 4, 9).mT for layer in (s.q, s.k, s.v))
        scores = q @ k.mT + (q @ s.relative.mT).mT
        return (scores.softmax(-1) @ v).mT.reshape(h.shape)

    layers = {name: conv(8, 8, 1) for name in "qkv"}
    return between(wiring, relative=free_parameter(9, 4), **layers)
