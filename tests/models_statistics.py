"""Small networks that mix channels: norms over channels, statistics over channels, products that sum over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn

TOKENS = (2, 5, 6)


class LayerNorm2d(nn.LayerNorm):
    """As torchvision and timm have it: over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


@awkward(1.0)
def parameters_times_one_value_of_all_channels() -> nn.Module:
    """Gated channel transformation, with the parameter first: the value is one for all of its channels."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        size = h.square().sum((2, 3), keepdim=True).sqrt() * s.scale
        norm = s.gain / (size.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return h * (1 + torch.tanh(size * norm))

    return between(wiring, scale=free_parameter(1, 8, 1, 1), gain=free_parameter(1, 8, 1, 1))


# ---- norms ----------------------------------------------------------------------------------------------------


@awkward(1.0)
def layer_norm_2d() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=LayerNorm2d(8))


@awkward(1.0)
def layer_norm_over_channels_and_space() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.LayerNorm((8, 8, 8)))


@awkward(1.0)
def layer_norm_of_the_input_s_shape() -> nn.Module:
    return between(lambda s, h: F.layer_norm(h, h.shape[1:]) + F.layer_norm(h, h.size()[1:]))


@awkward(1.0)
def layer_norm_with_computed_weight() -> nn.Module:
    return between(
        lambda s, h: F.rms_norm(h.permute(0, 2, 3, 1), (8,), 1 + s.gain).permute(0, 3, 1, 2),
        gain=free_parameter(8),
    )


@awkward(1.0)
def layer_norm_without_weights_called_twice() -> nn.Module:
    """The module has one shape: what it normalises at both places goes together."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        one, two = (s.norm(layer(x).flatten(2).mT).mT for layer in (s.one, s.two))
        return s.left(one) + s.right(two)  # type: ignore[no-any-return]

    parts = {"left": nn.Conv1d(8, 4, 1), "right": nn.Conv1d(8, 4, 1)}
    return Net(
        wiring, one=conv(3, 8), two=conv(3, 8), norm=nn.LayerNorm(8, elementwise_affine=False), **parts
    )


@awkward(1.0)
def layer_norm_of_a_concat() -> nn.Module:
    """Two groups under one norm; one of them with depthwise and skip, as in ConvNeXt."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = h + s.shrink(F.gelu(s.widen(s.norm(s.deep(h))))) * s.gamma
        return s.last(torch.cat([h, s.other(h)], 1))  # type: ignore[no-any-return]

    return between(
        wiring,
        8,
        14,
        deep=conv(8, 8, groups=8),
        norm=LayerNorm2d(8),
        widen=conv(8, 12),
        shrink=conv(12, 8),
        gamma=free_parameter(1, 8, 1, 1),
        other=conv(8, 6),
        last=LayerNorm2d(14),
    )


@awkward(1.0)
def rms_norm() -> nn.Module:
    return between(lambda s, h: s.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.RMSNorm(8))


@awkward(1.0)
def group_norm_of_two_large_groups() -> nn.Module:
    """As many channels go from each group: the number of groups stays."""
    return between(lambda s, h: s.norm(h), 16, norm=nn.GroupNorm(2, 16))


@awkward(1.0)
def group_norms_of_computed_groups() -> nn.Module:
    return between(lambda s, h: F.group_norm(F.group_norm(h, h.shape[1] // 16), h.shape[1] // 2), 16)


@awkward(1.0)
def layer_norm_by_hand() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        centred = h - h.mean(1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6) * s.gain + s.shift

    return between(wiring, gain=free_parameter(1, 8, 1, 1), shift=free_parameter(1, 8, 1, 1))


@awkward(1.0)
def layer_norms_by_variance() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        variance, mean = torch.var_mean(h, dim=1, keepdim=True, unbiased=False)
        h = (h - mean) * torch.rsqrt(variance + 1e-6)
        return h / (h.std(1, keepdim=True) + h.var((1, 2, 3), correction=0, keepdim=True) + 1e-6)

    return between(wiring)


@awkward(1.0)
def pixel_norm() -> nn.Module:
    return between(lambda s, h: h * torch.rsqrt(torch.mean(h**2, dim=1, keepdim=True) + 1e-8))


@awkward(1.0)
def global_layer_norm() -> nn.Module:
    return between(
        lambda s, h: (h - h.mean((1, 2, 3), keepdim=True)) / (h.std((1, 2, 3), keepdim=True) + 1e-5)
    )


@awkward(1.0)
def global_response_norm() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(h, dim=(2, 3), keepdim=True)
        return s.gain * (h * size / (size.mean(1, keepdim=True) + 1e-6)) + s.shift + h

    return between(wiring, gain=free_parameter(1, 8, 1, 1), shift=free_parameter(1, 8, 1, 1))


@awkward(1.0)
def unit_length() -> nn.Module:
    return between(lambda s, h: F.normalize(h) + F.normalize(h, p=1.0, dim=1, eps=1e-3))


# ---- statistics as values ---------------------------------------------------------------------------------------


@awkward(0.8)
def spatial_attention() -> nn.Module:
    """The mean and the maximum are two channels that stay."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        seen = torch.cat([h.mean(1, keepdim=True), h.max(1, keepdim=True)[0]], 1)
        return h * torch.sigmoid(s.gate(seen))

    return between(wiring, gate=conv(2, 1))


@awkward(1.0)
def reductions_over_channels() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        found = h.amax(1, keepdim=True) + h.amin(1, keepdim=True) - torch.max(h, 1, keepdim=True).values
        return h * (
            found + h.sum(1, keepdim=True) + torch.logsumexp(h, 1, keepdim=True) + h.norm(dim=1)[:, None]
        )

    return between(wiring)


@awkward(1.0)
def product_of_channels() -> nn.Module:
    return between(lambda s, h: h * h.sigmoid().prod(1, keepdim=True))


@awkward(1.0)
def softmaxes_over_channels() -> nn.Module:
    return between(lambda s, h: h.softmax(1) + F.log_softmax(h, dim=1) + s.soft(h), soft=nn.Softmax(1))


@awkward(1.0)
def running_sum_over_channels() -> nn.Module:
    return between(lambda s, h: torch.cumsum(h, 1))


@awkward(1.0)
def context_pooling() -> nn.Module:
    """A softmax over space of one channel, and a gate of a few: what is summed over is not a channel."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        weights = s.score(h).flatten(2).softmax(-1)
        return h + s.gate((h.flatten(2) * weights).sum(-1)[..., None, None])  # type: ignore[no-any-return]

    return between(wiring, score=conv(8, 1), gate=conv(8, 8))


@awkward(0.0)
def place_of_the_largest() -> nn.Module:
    """Which channel it is changes when others go."""
    return between(lambda s, h: h * h.argmax(1, keepdim=True))


@awkward(0.0)
def largest_and_its_place() -> nn.Module:
    return between(lambda s, h: h * (lambda found: found[0] + found[1])(h.max(1, keepdim=True)))


@awkward(0.0)
def sorted_channels() -> nn.Module:
    return between(lambda s, h: h + h.sort(1)[0])


@awkward(0.0)
def median_over_channels() -> nn.Module:
    return between(lambda s, h: h - h.median(1, keepdim=True)[0])


# ---- products that sum over channels ----------------------------------------------------------------------------


@awkward(1.0)
def similarity_of_positions() -> nn.Module:
    """Every position weighs all others by the channels they share, and the number of these scales."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        x = h.flatten(2)
        weights = torch.softmax(x.mT @ x * x.shape[1] ** -0.5, -1)
        return (x @ weights).view(h.shape)

    return between(wiring)


@awkward(1.0)
def gram_of_positions_by_einsum() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        x, y = h.flatten(2), s.other(h).flatten(2)
        found = torch.einsum("bci,bcj->bij", x, y) / 8
        return torch.einsum("bij,bcj->bci", found, x + y).view(h.shape)

    return between(wiring, other=conv(8, 8))


@awkward(0.0)
def product_of_channels_with_the_input() -> nn.Module:
    """The other factor's channels are the input's."""
    return Net(
        lambda s, x: s.out((s.stem(x).flatten(2).mT @ x.flatten(2)).unsqueeze(1)),
        stem=conv(3, 3),
        out=conv(1, 4),
    )


@awkward(1.0)
def group_norms_that_chain_each_others_groups() -> nn.Module:
    """As in diffusion's U-Nets: groups of a concat lie across those of its parts, but places in a group do not."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        other = s.two(s.mid(s.one(h)))
        return s.three(torch.cat([h, other], 1))  # type: ignore[no-any-return]

    norms = {"one": nn.GroupNorm(4, 8), "two": nn.GroupNorm(4, 16), "three": nn.GroupNorm(4, 24)}
    return between(wiring, 8, 24, mid=conv(8, 16), **norms)


@awkward(1.0)
def distances() -> nn.Module:
    """Of all positions from each other, and from learned points; the distances themselves are no channels."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        points, queries = h.flatten(2).mT, s.queries(h).flatten(2).mT
        near = torch.cdist(queries, points).neg().softmax(-1) @ points
        return h + near.mT.reshape(h.shape) * torch.cdist(points, s.learned).amin(-1).view(
            h.shape[0], 1, 8, 8
        )

    return between(wiring, queries=conv(8, 8, 1), learned=free_parameter(5, 8))


@awkward(1.0)
def maximum_over_channels_with_its_place_unread() -> nn.Module:
    """As CBAM takes it; what the spatial attention reads of all channels stays."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        most, _ = torch.max(h, dim=1, keepdim=True)
        return h * most.sigmoid()

    return between(wiring)


@awkward(1.0)
def softmax_over_branches_of_groups() -> nn.Module:
    """ResNeSt's split attention of two branches and two groups: [batch, branch, group, channel] is no image."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        parts = torch.split(s.branches(h), 8, dim=1)
        gates = s.gates(sum(parts).mean((2, 3), keepdim=True)).view(len(h), 2, 2, 4).transpose(1, 2)
        gates = torch.softmax(gates, dim=1).reshape(len(h), -1, 1, 1)
        return sum(part * gate for part, gate in zip(parts, torch.split(gates, 8, dim=1), strict=True))

    return between(wiring, branches=conv(8, 16, groups=4), gates=conv(8, 16, 1, groups=2))
