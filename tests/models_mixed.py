"""Small networks whose convolutions have weights that are computed from the input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import awkward, between, free_parameter
from torch import Tensor, nn


def _folded(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
    """A convolution of each image by its own weight [images * outputs, inputs, 3, 3]."""
    images, channels, height, width = x.shape
    line = x.reshape(1, images * channels, height, width)
    y = F.conv2d(line, weight, bias, padding=1, groups=images * groups)
    return y.view(images, -1, *y.shape[2:])


@awkward(1.0)
def mixture_of_flat_kernels() -> nn.Module:
    """CondConv: experts lie as rows, and go with what routes them; a bias is mixed as the weight is."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images = h.shape[0]
        routing = torch.sigmoid(s.routing(h.mean((2, 3))))
        weight = torch.matmul(routing, s.weight).view(images * 6, 8, 3, 3)
        bias = torch.matmul(routing, s.bias).view(images * 6)
        return _folded(h, weight, bias)

    parts = {"weight": free_parameter(3, 6 * 8 * 9), "bias": free_parameter(3, 6)}
    return between(wiring, 8, 6, routing=nn.Linear(8, 3), **parts)


@awkward(1.0)
def mixture_in_groups() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.softmax(s.routing(h.mean((2, 3))), 1)
        weight = (routing @ s.weight.view(3, -1)).view(-1, 4, 3, 3)
        return _folded(h, weight, None, 2)

    return between(wiring, 8, 8, routing=nn.Linear(8, 3), weight=free_parameter(3, 8, 4, 3, 3))


@awkward(1.0)
def mixture_behind_a_turn() -> nn.Module:
    """What is read has been turned so that channels came first, as one image's may be taken for images."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = h.permute(1, 0, 2, 3).relu().permute(1, 0, 2, 3)
        routing = torch.softmax(s.routing(h.mean((2, 3))), 1)
        return _folded(h, (routing @ s.weight.view(3, -1)).view(-1, 8, 3, 3), None)

    return between(wiring, 8, 6, routing=nn.Linear(8, 3), weight=free_parameter(3, 6, 8, 3, 3))


@awkward(1.0)
def mixture_by_einsum() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.softmax(s.routing(h.mean((2, 3))), 1)
        weight = torch.einsum("be,eoikl->boikl", routing, s.weight).flatten(0, 1)
        return _folded(h, weight, None)

    return between(wiring, 8, 6, routing=nn.Linear(8, 3), weight=free_parameter(3, 6, 8, 3, 3))


@awkward(1.0)
def mixture_by_four_attentions() -> nn.Module:
    """Omni-dimensional: kernels, inputs, outputs and positions are weighted, then kernels are summed."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images = h.shape[0]
        pooled = h.mean((2, 3))
        kernels = torch.softmax(s.kernels(pooled), 1).view(images, 3, 1, 1, 1, 1)
        places = torch.sigmoid(s.places(pooled)).view(images, 1, 1, 1, 3, 3)
        x = h * torch.sigmoid(s.inputs(pooled)).view(images, -1, 1, 1)
        weight = (places * kernels * s.weight.unsqueeze(0)).sum(1)
        y = _folded(x, weight.view(-1, 8, 3, 3), None)
        return y * torch.sigmoid(s.outputs(pooled)).view(images, -1, 1, 1)

    linears = {"kernels": 3, "places": 9, "inputs": 8, "outputs": 6}
    return between(
        wiring,
        8,
        6,
        weight=free_parameter(3, 6, 8, 3, 3),
        **{name: nn.Linear(8, size) for name, size in linears.items()},
    )


@awkward(1.0)
def modulated_and_demodulated() -> nn.Module:
    """StyleGAN2: a style for each input channel, outputs demodulated over all that they read."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, channels = h.shape[:2]
        style = s.style(h.mean((2, 3))).view(images, 1, channels, 1, 1)
        weight = s.weight * 0.3 * style
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-3).view(images, 6, 1, 1, 1)
        return _folded(h, weight.view(images * 6, channels, 3, 3), None)

    return between(wiring, 8, 6, style=nn.Linear(8, 8), weight=free_parameter(1, 6, 8, 3, 3))


@awkward(1.0)
def weights_of_all_images_together() -> nn.Module:
    """A hypernetwork: one linear makes the weight, from all images."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        return F.conv2d(h, s.hyper(h.mean((0, 2, 3))[None]).view(6, 8, 3, 3), padding=1)

    return between(wiring, 8, 6, hyper=nn.Linear(8, 6 * 8 * 9))


@awkward(1.0)
def linear_of_mixed_rows() -> nn.Module:
    """One mixture for all images, turned before a linear reads it, with a plain bias."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.softmax(s.routing(h.mean((0, 2, 3))), 0)
        weight = torch.einsum("e,eio->io", routing, s.weight).t()
        return F.linear(h.permute(0, 2, 3, 1), weight, s.bias).relu().permute(0, 3, 1, 2)

    parts = {"weight": free_parameter(3, 8, 6), "bias": free_parameter(6)}
    return between(wiring, 8, 6, routing=nn.Linear(8, 3), **parts)


@awkward(1.0)
def transposed_mixture() -> nn.Module:
    """One mixture for all images, of kernels whose inputs come first."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.sigmoid(s.routing(h.mean((0, 2, 3))))
        weight = (routing @ s.weight.view(3, -1)).view(8, 6, 3, 3)
        return F.conv_transpose2d(h, weight, s.bias, stride=2, padding=1)

    parts = {"weight": free_parameter(3, 8, 6, 3, 3), "bias": free_parameter(6)}
    return between(wiring, 8, 6, routing=nn.Linear(8, 3), **parts)


@awkward(1.0)
def transposed_mixture_in_groups() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.sigmoid(s.routing(h.mean((0, 2, 3))))
        weight = (routing @ s.weight.view(3, -1)).view(8, 3, 3, 3)
        return F.conv_transpose2d(h, weight, None, padding=1, groups=2)

    return between(wiring, 8, 6, routing=nn.Linear(8, 3), weight=free_parameter(3, 8, 3, 3, 3))


def _folded_up(h: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """A transposed convolution of each image by its own weight [images * inputs, outputs / groups, 3, 3]."""
    line = h.reshape(1, -1, *h.shape[2:])
    y = F.conv_transpose2d(line, weight, None, stride=2, padding=1, groups=h.shape[0] * groups)
    return y.view(h.shape[0], -1, *y.shape[2:])


@awkward(1.0)
def transposed_mixture_of_each_image() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.softmax(s.routing(h.mean((2, 3))), 1)
        return _folded_up(h, (routing @ s.weight.view(3, -1)).view(-1, 6, 3, 3))

    return between(wiring, 8, 6, routing=nn.Linear(8, 3), weight=free_parameter(3, 8, 6, 3, 3))


@awkward(1.0)
def transposed_mixture_of_each_image_in_groups() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        routing = torch.softmax(s.routing(h.mean((2, 3))), 1)
        return _folded_up(h, (routing @ s.weight.view(3, -1)).view(-1, 3, 3, 3), 2)

    return between(wiring, 8, 6, routing=nn.Linear(8, 3), weight=free_parameter(3, 8, 3, 3, 3))


@awkward(1.0)
def modulated_demodulated_and_transposed() -> nn.Module:
    """StyleGAN2 as it doubles the resolution: the modulated weight has its inputs first."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, channels = h.shape[:2]
        style = s.style(h.mean((2, 3))).view(images, 1, channels, 1, 1)
        weight = s.weight * 0.3 * style
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-3).view(images, 6, 1, 1, 1)
        return _folded_up(h, weight.transpose(1, 2).reshape(images * channels, 6, 3, 3))

    return between(wiring, 8, 6, style=nn.Linear(8, 8), weight=free_parameter(1, 6, 8, 3, 3))


@awkward(3 / 19)
def a_mixture_that_is_sorted() -> nn.Module:
    """What reorders kernels has no dimensions to follow: only the experts are free."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = torch.matmul(torch.sigmoid(s.routing(h.mean((2, 3)))), s.weight).sort(1).values
        return _folded(h, weight.view(-1, 8, 3, 3), None)

    return between(wiring, 8, 8, routing=nn.Linear(8, 3), weight=free_parameter(3, 8 * 8 * 9))
