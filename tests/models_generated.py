"""Small networks whose weights are made by another network from the input, and weights' statistics beside layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn

Wiring = Callable[[Any, Tensor], Tensor]


def _pooled(h: Tensor) -> Tensor:
    return h.mean((2, 3))


def _folded(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution of each image by its own weight [images * outputs, inputs, 3, 3]."""
    y = F.conv2d(h.reshape(1, -1, *h.shape[2:]), weight, bias, padding=1, groups=h.shape[0])
    return y.view(h.shape[0], -1, *y.shape[2:])


def _by_pixel(weight: Tensor, h: Tensor) -> Tensor:
    """A linear of each image by its own weight [images, outputs, inputs]."""
    return torch.bmm(weight, h.flatten(2)).view(h.shape[0], -1, *h.shape[2:])


# ---- StyleGAN2 with plain convolutions: what the outputs are divided by is computed of the weight, too -----------


def _styled(divisor: Wiring) -> Net:
    """``divisor``: of the weight and the style [images, 8]."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        style = s.style(_pooled(h))
        y = F.conv2d(h * style[:, :, None, None], s.weight, padding=1)
        return y / (divisor(s.weight, style) + 1e-2)[:, :, None, None]

    return between(wiring, 8, 6, style=nn.Linear(8, 8), weight=free_parameter(6, 8, 3, 3))


@awkward(1.0)
def demodulated_beside_the_convolution() -> nn.Module:
    return _styled(lambda w, style: (w[None] * style[:, None, :, None, None]).pow(2).sum((2, 3, 4)).sqrt())


@awkward(1.0)
def demodulated_by_flat_rows() -> nn.Module:
    return _styled(lambda w, style: (w * style.view(-1, 1, 8, 1, 1)).view(len(style), 6, -1).norm(dim=2))


@awkward(1.0)
def demodulated_by_an_einsum_of_squares() -> nn.Module:
    return _styled(lambda w, style: torch.einsum("oikl,bi->bo", w.square(), style.square()))


@awkward(1.0)
def demodulated_by_a_linear_of_squares() -> nn.Module:
    return _styled(lambda w, style: F.linear(style.square(), w.square().sum((2, 3))))


@awkward(1.0)
def demodulated_by_deviations() -> nn.Module:
    return _styled(lambda w, style: (w[None] * style[:, None, :, None, None]).std((2, 3, 4)))


@awkward(1.0)
def demodulated_first_with_an_equalised_rate() -> nn.Module:
    """As the official code has it: the divisor comes first, and the weight is scaled by its own fan-in."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        style, weight = s.style(_pooled(h)), s.weight * (s.weight.shape[1] * 9) ** -0.5
        modulated = weight.unsqueeze(0) * style.reshape(h.shape[0], 1, -1, 1, 1)
        scale = (modulated.square().sum(dim=[2, 3, 4]) + 1e-3).rsqrt()
        h = h * style.reshape(h.shape[0], -1, 1, 1)
        return F.conv2d(h, weight, padding=1) * scale.reshape(h.shape[0], -1, 1, 1)

    return between(wiring, 8, 6, style=nn.Linear(8, 8), weight=free_parameter(6, 8, 3, 3))


@awkward(1.0)
def demodulated_and_turned() -> nn.Module:
    """As it doubles the resolution: the weight is transposed for the layer alone."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        style = s.style(_pooled(h))
        scale = (s.weight.unsqueeze(0) * style[:, None, :, None, None]).square().mean(dim=[2, 3, 4]) + 1e-3
        h = F.conv_transpose2d(h * style[:, :, None, None], s.weight.transpose(0, 1), stride=2)
        return h * scale.rsqrt()[:, :, None, None]

    return between(wiring, 8, 6, style=nn.Linear(8, 8), weight=free_parameter(6, 8, 3, 3))


@awkward(1.0)
def demodulated_modules() -> nn.Module:
    """A transposed convolution and a linear, whose weights the network reads beside calling them."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        style = s.style(_pooled(h))
        length = torch.linalg.vector_norm(s.up.weight * style[:, :, None, None, None], dim=(1, 3, 4))
        h = F.relu(s.up(h * style[:, :, None, None]) / (length + 0.1)[:, :, None, None])
        divisor = (s.mid.weight * s.gain).pow(2).sum(-1) + 0.1
        return (s.mid(h.movedim(1, -1) * s.gain) / divisor).movedim(-1, 1)

    up, mid = nn.ConvTranspose2d(8, 6, 2, 2), nn.Linear(6, 8)
    return between(wiring, style=nn.Linear(8, 8), up=up, mid=mid, gain=free_parameter(6))


@awkward(0.0)
def sum_of_a_whole_weight() -> nn.Module:
    """Both sides are summed over at once."""
    return between(lambda s, h: s.mid(h) + s.mid.weight.pow(2).sum((0, 1, 2, 3)), mid=conv(8, 8))


# ---- hypernetworks ---------------------------------------------------------------------------------------


@awkward(1.0)
def hypernetwork_of_two_layers() -> nn.Module:
    """For each image, with a bias of its own, scaled by its own fan-in."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        z = F.relu(s.first(_pooled(h)))
        weight = s.second(z).view(h.shape[0] * 6, 8, 3, 3)
        return _folded(h, weight * weight.shape[1] ** -0.5, s.bias(z).view(-1))

    return between(wiring, 8, 6, first=nn.Linear(8, 5), second=nn.Linear(5, 432), bias=nn.Linear(5, 6))


@awkward(1.0)
def hypernetwork_of_products() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        z = s.norm(F.relu(s.first(_pooled(h))))
        h = F.relu(_folded(h, (z @ s.one).view(-1, 8, 3, 3)))
        h = F.relu(_folded(h, torch.addmm(s.added, z, s.two).view(-1, 6, 3, 3)))
        return _folded(h, F.linear(z, s.three, s.bias).view(-1, 8, 3, 3))

    weights = {"one": free_parameter(5, 432), "two": free_parameter(5, 432), "three": free_parameter(432, 5)}
    layers = {"first": nn.Linear(8, 5), "norm": nn.LayerNorm(5)}
    biases = {"added": free_parameter(432), "bias": free_parameter(432)}
    return between(wiring, 8, 6, **layers, **weights, **biases)


@awkward(1.0)
def hypernetwork_of_convolutions() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        z = F.relu(s.first(h.mean((2, 3), keepdim=True)))
        return _folded(h, s.second(z).reshape(-1, 8, 3, 3))

    return between(wiring, 8, 6, first=conv(8, 12, 1), second=conv(12, 432, 1))


@awkward(1.0)
def added_to_a_weight() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = s.weight[None] + s.hyper(_pooled(h)).view(-1, 6, 8, 3, 3)
        return _folded(h, weight.reshape(-1, 8, 3, 3))

    return between(wiring, 8, 6, hyper=nn.Linear(8, 432), weight=free_parameter(6, 8, 3, 3))


@awkward(1.0)
def generated_and_standardised() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = s.hyper(_pooled(h)).view(-1, 6, 8, 3, 3)
        weight = weight - weight.mean((2, 3, 4), keepdim=True)
        return _folded(h, (weight / (weight.std((2, 3, 4), keepdim=True) + 0.1)).reshape(-1, 8, 3, 3))

    return between(wiring, 8, 6, hyper=nn.Linear(8, 432))


@awkward(1.0)
def generated_depthwise() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = s.second(F.relu(s.first(_pooled(h)))).view(-1, 1, 3, 3)
        y = F.conv2d(h.reshape(1, -1, *h.shape[2:]), weight, padding=1, groups=h.shape[0] * h.shape[1])
        return y.view(*h.shape[:2], *y.shape[2:])

    return between(wiring, first=nn.Linear(8, 5), second=nn.Linear(5, 72))


# ---- linears of each image -------------------------------------------------------------------------------


@awkward(1.0)
def linear_of_each_image() -> nn.Module:
    return between(
        lambda s, h: _by_pixel(s.hyper(_pooled(h)).view(-1, 6, 8), h), 8, 6, hyper=nn.Linear(8, 48)
    )


@awkward(1.0)
def linears_of_each_image_in_other_words() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        z = F.relu(s.first(_pooled(h)))
        h = torch.einsum("boi,bihw->bohw", s.one(z).view(-1, 6, 8), h)
        x = F.relu(h.flatten(2).mT @ s.two(z).view(-1, 6, 8))
        y = torch.baddbmm(s.bias(z)[:, :, None], s.three(z).unflatten(1, (6, 8)), x.mT)
        return y.view(h.shape[0], 6, *h.shape[2:])

    hyper = {name: nn.Linear(5, 48) for name in ("one", "two", "three")}
    return between(wiring, 8, 6, first=nn.Linear(8, 5), bias=nn.Linear(5, 6), **hyper)


@awkward(1.0)
def mixed_linears_of_each_image() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = torch.einsum("be,eio->bio", torch.softmax(s.routing(_pooled(h)), 1), s.weight)
        return torch.einsum("bio,bihw->bohw", weight, h)

    return between(wiring, 8, 6, routing=nn.Linear(8, 3), weight=free_parameter(3, 8, 6))


@awkward(1.0)
def normalised_linears_of_each_image() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        z = _pooled(h)
        h = _by_pixel(F.normalize(s.one(z).view(-1, 6, 8), dim=2), h)
        h = _by_pixel(s.two(z).view(-1, 8, 6).softmax(-1), h)
        weight = s.three(z).view(-1, 6, 8)
        return _by_pixel(weight / (weight.abs().amax(1, keepdim=True) + 1), h)

    return between(wiring, 8, 6, **{name: nn.Linear(8, 48) for name in ("one", "two", "three")})


@awkward(1.0)
def heads_of_generated_linears() -> nn.Module:
    """A matrix for each half of the channels of each image."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = s.hyper(_pooled(h)).view(-1, 3, 4)
        return torch.bmm(weight, h.reshape(weight.shape[0], 4, -1)).view(h.shape[0], 6, *h.shape[2:])

    return between(wiring, 8, 6, hyper=nn.Linear(8, 24))


@awkward(6 / 14)
def two_pieces_of_one_generator() -> nn.Module:
    """Weight and bias are slices of one linear's result."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        weight, bias = s.hyper(_pooled(h)).split([48, 6], 1)
        return _by_pixel(weight.view(-1, 6, 8), h) + bias[:, :, None, None]

    return between(wiring, 8, 6, hyper=nn.Linear(8, 54))


@awkward(1.0)
def positions_mixed_by_a_generated_matrix() -> nn.Module:
    """It sums over positions: channels pass."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        tokens = F.adaptive_avg_pool2d(h, 4).flatten(2)
        weight = s.table + s.hyper(_pooled(h)).view(-1, 16, 16)
        return torch.bmm(tokens, weight).view(h.shape[0], 8, 4, 4)

    return between(wiring, hyper=nn.Linear(8, 256), table=free_parameter(16, 16))
