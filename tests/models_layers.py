"""Small networks of every kind of layer, norm and gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn

# Convolutions and linears of every kind.


@awkward(1.0)
def eight_groups_of_six() -> nn.Module:
    return between(lambda s, h: s.mid(h), 48, mid=conv(48, 48, groups=8))


@awkward(1.0)
def grouped_that_widens() -> nn.Module:
    return between(lambda s, h: s.mid(h), 12, 24, mid=conv(12, 24, groups=3))


@awkward(1.0)
def one_output_a_group() -> nn.Module:  # groups go as a whole
    return between(lambda s, h: s.mid(h), 16, 4, mid=conv(16, 4, groups=4), extra=None)


@awkward(1.0)
def groups_that_are_heads() -> nn.Module:  # each product sums over a group, so that whole groups must go
    def wiring(s: Any, h: Tensor) -> Tensor:
        q, k, v = s.mid(h).reshape(h.shape[0], 4, 6, -1).chunk(3, 2)
        return (v @ (k.mT @ q)).reshape(h.shape[0], 8, *h.shape[2:])

    return between(wiring, 24, 8, mid=conv(24, 24, groups=12))


@awkward(1.0)
def transposed_one_output_a_group() -> nn.Module:
    return between(lambda s, h: s.mid(h), 12, 4, mid=nn.ConvTranspose2d(12, 4, 3, 1, 1, groups=4))


@awkward(1.0)
def depthwise() -> nn.Module:
    return between(lambda s, h: s.mid(h), mid=conv(8, 8, groups=8))


@awkward(1.0)
def depthwise_with_multiplier() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 24, mid=conv(8, 24, groups=8))


@awkward(1.0)
def transposed() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 6, mid=nn.ConvTranspose2d(8, 6, 2, 2))


@awkward(1.0)
def transposed_grouped() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 12, mid=nn.ConvTranspose2d(8, 12, 3, 2, 1, groups=2))


@awkward(1.0)
def transposed_depthwise_with_multiplier() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 24, mid=nn.ConvTranspose2d(8, 24, 2, 2, groups=8))


@awkward(1.0, (2, 3, 20))
def one_dimension() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.PReLU(8), nn.Conv1d(8, 4, 3))


@awkward(1.0, (2, 3, 5, 6, 7))
def three_dimensions() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3),
        nn.BatchNorm3d(8),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(8, 6, 2),
        nn.Conv3d(6, 2, 1),
    )


@awkward(1.0, (3, 8, 8))
def without_batch() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4))


@awkward(1.0, (2, 5, 6))
def linear_on_three_dimensions() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 10), nn.GELU(), nn.Linear(10, 4))


@awkward(1.0, (6,))
def linear_on_a_vector() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))


@awkward(1.0)
def functional_convolution() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(h, s.weight, s.bias, padding=1),
        8,
        10,
        weight=free_parameter(10, 8, 3, 3),
        bias=free_parameter(10),
    )


@awkward(1.0)
def functional_depthwise_by_shape() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(h, s.weight, None, 1, 1, 1, h.shape[1]), weight=free_parameter(8, 1, 3, 3)
    )


@awkward(1.0)
def functional_depthwise_by_keyword() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(h, weight=s.weight, padding=1, groups=8), weight=free_parameter(8, 1, 3, 3)
    )


@awkward(1.0)
def functional_linear() -> nn.Module:
    return Net(
        lambda s, x: F.linear(F.relu(F.linear(x.flatten(1), s.first)), s.second, s.bias),
        first=free_parameter(12, 192),
        second=free_parameter(4, 12),
        bias=free_parameter(4),
    )


@awkward(1.0)
def called_by_keyword() -> nn.Module:
    return Net(lambda s, x: s.out(input=F.relu(input=s.stem(input=x))), stem=conv(3, 8), out=conv(8, 4))


# Norms and slopes.


@awkward(1.0)
def group_norm() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.GroupNorm(4, 8))


@awkward(1.0)
def group_norm_without_weights() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.GroupNorm(4, 8, affine=False))


@awkward(1.0)
def functional_group_norm() -> nn.Module:
    return between(
        lambda s, h: F.group_norm(h, 4, s.weight, s.bias), weight=free_parameter(8), bias=free_parameter(8)
    )


@awkward(1.0)
def group_norm_of_one_group() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.GroupNorm(1, 8))


@awkward(1.0)
def instance_norm() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.InstanceNorm2d(8, affine=True, track_running_stats=True))


@awkward(1.0)
def instance_norm_without_weights() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.InstanceNorm2d(8))


@awkward(1.0)
def batch_norm_without_weights() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.BatchNorm2d(8, affine=False))


@awkward(1.0)
def layer_norm_over_channels() -> nn.Module:
    return between(lambda s, h: s.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(8))


@awkward(1.0)
def layer_norm_over_space() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.LayerNorm((8, 8)))


@awkward(1.0)
def prelu_a_channel() -> nn.Module:
    return between(lambda s, h: s.slope(h), slope=nn.PReLU(8))


@awkward(1.0)
def functional_prelu() -> nn.Module:
    return between(lambda s, h: F.prelu(h, s.slope), slope=free_parameter(8))


# Gates, scales, reductions, softmax.


@awkward(1.0)
def squeeze_and_excite() -> nn.Module:
    return between(
        lambda s, h: h * torch.sigmoid(s.up(F.relu(s.down(F.adaptive_avg_pool2d(h, 1))))),
        down=conv(8, 4, 1),
        up=conv(4, 8, 1),
    )


@awkward(1.0)
def spatial_gate() -> nn.Module:
    return between(lambda s, h: h * torch.sigmoid(s.gate(h)), gate=conv(8, 1))


@awkward(0.8)
def spatial_gate_from_statistics() -> nn.Module:  # CBAM's: the mean over channels needs all of them
    return between(
        lambda s, h: h * torch.sigmoid(s.gate(torch.cat([h.mean(1, True), h.amax(1, True)], 1))),
        gate=conv(2, 1),
    )


@awkward(1.0)
def selective_kernel() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        both = torch.stack([s.one(x), s.two(x)], 1)
        gate = s.gate(both.sum(1).mean((2, 3), keepdim=True))
        gate = torch.softmax(gate.reshape(gate.shape[0], 2, 8, 1, 1), 1)
        return s.out((both * gate).sum(1))  # type: ignore[no-any-return]

    return Net(wiring, one=conv(3, 8), two=conv(3, 8), gate=conv(8, 16, 1), out=conv(8, 4))


@awkward(1.0)
def layer_scale() -> nn.Module:
    return between(lambda s, h: h * s.scale, scale=free_parameter(8, 1, 1))


@awkward(1.0)
def layer_scale_expanded() -> nn.Module:
    return between(lambda s, h: h * s.scale.expand(-1, -1, 8, 8), scale=free_parameter(1, 8, 1, 1))


@awkward(1.0)
def scale_by_the_channel_count() -> nn.Module:
    return between(lambda s, h: h * h.shape[1] ** -0.5)


@awkward(1.0)
def softmax_over_channels() -> nn.Module:
    return between(lambda s, h: h.softmax(1))


@awkward(0.0)
def mean_over_channels() -> nn.Module:
    return between(lambda s, h: h.mean(1, True), 8, 1)


@awkward(1.0)
def variance_by_position() -> nn.Module:
    return between(lambda s, h: h * h.var((2, 3), False, True))


@awkward(1.0)
def casts_by_another_tensor() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.stem(x).type_as(x).to(s.other)),
        stem=conv(3, 8),
        out=conv(8, 4),
        other=free_parameter(7),
    )


@awkward(1.0)
def deviation_of_everything() -> nn.Module:
    """`False` is no dimension, and no dimensions are all of them."""
    return between(lambda s, h: h / (1 + h.std(False) + h.abs().sum(dim=())))


@awkward(1.0)
def largest_channel_by_name() -> nn.Module:
    return between(lambda s, h: h * h.max(dim=1, keepdim=True).values)


@awkward(1.0)
def choice_by_keyword() -> nn.Module:
    return between(lambda s, h: torch.where(condition=h > 0, input=h, other=0.1 * h))


@awkward(0.5)
def layer_shared_with_an_attention_module() -> nn.Module:
    """What the attention module's own layer holds stays, where it is called on its own, too."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x).flatten(2).transpose(1, 2)
        return s.out(F.relu(s.mix.out_proj(s.mid(s.mix(h, 2 * h, h)[0]))))  # type: ignore[no-any-return]

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Net(wiring, stem=conv(3, 8), mix=attention, mid=nn.Linear(8, 8), out=nn.Linear(8, 4))
