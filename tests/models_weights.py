"""Small networks whose weights and biases are computed from parameters each time they run."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm


class Symmetric(nn.Module):
    """A parametrisation of one's own."""

    def forward(self, weight: Tensor) -> Tensor:
        """As many rows as columns."""
        return (weight + weight.transpose(0, 1)) / 2


class EqualisedRate:
    """A hook as StyleGAN's many copies have it: the weight times a constant of its fan-in."""

    name = "weight"

    def compute_weight(self, module: nn.Module) -> Tensor:
        """The weight."""
        return module.weight_orig * (2 / module.weight_orig[0].numel()) ** 0.5

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Before each call."""
        module.weight = self.compute_weight(module)


class RoundedStraightThrough(torch.autograd.Function):
    """As quantisation-aware training has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():  # torch would have the parametrisation used
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(layer)


def equalised(layer: nn.Module) -> nn.Module:
    layer.register_parameter("weight_orig", nn.Parameter(layer.weight.detach()))
    del layer._parameters["weight"]
    hook = EqualisedRate()
    hook(layer, ())
    layer.register_forward_pre_hook(hook)
    return layer


def rewritten(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def sparse(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "bias", 0.5)
    return prune.random_unstructured(layer, "weight", 0.5)


class ObservedWeight(nn.Module):
    """A convolution whose weight is scaled by a range that training moves, of each output channel or of all."""

    def __init__(self, spelling: str, *shape: int) -> None:
        super().__init__()
        self.conv, self.spelling = conv(8, 8), spelling
        self.register_buffer("range", torch.ones(shape))
        self.register_buffer("least", torch.tensor(0.0))

    def watch(self, weight: Tensor) -> None:
        """Move the range, or the larger of two."""
        seen = weight.abs().amax((1, 2, 3), keepdim=True) if self.range.dim() else weight.abs().max()
        if self.spelling == "moved":
            self.range.lerp_(seen, 0.1)
        elif self.spelling == "in steps":
            self.range.data.mul_(0.9).add_(0.1 * seen)
        elif self.spelling == "assigned":
            self.range = 0.9 * self.range + 0.1 * seen
        else:
            self.range.copy_(torch.max(self.range, seen))
            with torch.no_grad():
                self.least.copy_(torch.min(self.least, weight.min()))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        if self.training:
            self.watch(self.conv.weight.detach())
        scale = ((self.range - self.least).abs() + 0.1) / 15
        rounded = self.conv.weight / scale
        rounded = rounded + (rounded.round() - rounded).detach()
        return F.conv2d(x, rounded * scale, self.conv.bias, padding=1)


class LearnedStep(nn.Module):
    """Rounds to multiples of a parameter (LSQ), one for each output channel or one for all."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full(shape, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        damped = self.step / (7 * x.numel()) ** 0.5
        step = damped + (self.step.abs() + 0.01 - damped).detach()
        x = (x / step).clamp(-8, 7)
        return (x + (x.round() - x).detach()) * step


def in_the_middle(layer: nn.Module) -> Net:
    return between(lambda s, h: F.relu(s.mid(h)), mid=layer)


@awkward(1.0)
def weight_norm_by_hook() -> nn.Module:
    return in_the_middle(weight_norm(conv(8, 8)))


@awkward(1.0)
def weight_norm_parametrised_in_groups() -> nn.Module:
    return in_the_middle(parametrizations.weight_norm(conv(8, 8, groups=2)))


@awkward(1.0)
def weight_norm_depthwise_and_transposed() -> nn.Module:
    up = parametrizations.weight_norm(nn.ConvTranspose2d(8, 6, 2, 2), dim=1)
    return between(lambda s, h: s.up(s.deep(h)), 8, 6, deep=weight_norm(conv(8, 8, groups=8)), up=up)


@awkward(1.0)
def spectral_norm_by_hook() -> nn.Module:
    return in_the_middle(spectral_norm(conv(8, 8)))


@awkward(1.0)
def spectral_norm_parametrised() -> nn.Module:
    return in_the_middle(parametrizations.spectral_norm(conv(8, 8)))


@awkward(1.0)
def orthogonal_linear() -> nn.Module:
    layer = parametrizations.orthogonal(nn.Linear(8, 8))
    return between(lambda s, h: s.mid(h.movedim(1, -1)).movedim(-1, 1), mid=layer)


@awkward(1.0)
def parametrisation_of_ones_own() -> nn.Module:
    return in_the_middle(rewritten(conv(8, 8)))


@awkward(1.0)
def weight_by_a_hook_of_ones_own() -> nn.Module:
    return in_the_middle(equalised(conv(8, 8)))


@awkward(1.0)
def pruned_by_torch() -> nn.Module:
    return in_the_middle(sparse(conv(8, 8)))


@awkward(1.0)
def weight_times_a_mask_that_is_a_parameter() -> nn.Module:
    mask = nn.Parameter((torch.rand(8, 8, 3, 3) > 0.5).float(), requires_grad=False)

    def wiring(s: Any, h: Tensor) -> Tensor:
        return F.conv2d(h, s.mid.weight * s.mask, s.mid.bias * 2, padding=1)

    return between(wiring, mid=conv(8, 8), mask=mask)


@awkward(1.0)
def sum_of_kernels() -> nn.Module:
    """A RepVGG block that adds its kernels up as it runs."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        kernel = s.three.weight + F.pad(s.one.weight + s.eye, (1, 1, 1, 1))
        return F.relu(F.conv2d(h, kernel, s.three.bias + s.one.bias, padding=1))

    eye = nn.Parameter(torch.eye(8)[:, :, None, None], requires_grad=False)
    return between(wiring, three=conv(8, 8), one=conv(8, 8, 1), eye=eye)


@awkward(1.0)
def weight_and_maps_rounded_straight_through() -> nn.Module:
    rounded = RoundedStraightThrough.apply

    def wiring(s: Any, h: Tensor) -> Tensor:
        return F.conv2d(rounded(h), rounded(s.mid.weight), s.mid.bias, padding=1)

    return between(wiring, mid=conv(8, 8))


@awkward(1.0)
def slimmable() -> nn.Module:
    """A part of a larger layer; the network reads another part of it elsewhere."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = F.conv2d(h, s.mid.weight[:10, :8], s.mid.bias[:10], padding=1)
        return F.linear(h.movedim(1, -1), s.mid.weight[:6, :10, 1, 1]).movedim(-1, 1)

    return between(wiring, 8, 6, mid=conv(12, 16))


@awkward(1.0)
def normalised_prototypes() -> nn.Module:
    """The cosine of what is read and of each row of a matrix, times a number."""
    return between(
        lambda s, h: F.linear(F.normalize(h.movedim(1, -1), dim=-1), F.normalize(s.rows)).movedim(-1, 1) * 9,
        8,
        6,
        rows=free_parameter(6, 8),
    )


@awkward(1.0)
def kernels_of_wavelets() -> nn.Module:
    """Four fixed kernels for each channel, as many times as there are channels; and back."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = torch.where(h > 0, h, 0.1 * h).lerp(h * h, s.share)  # which keep the number of channels
        _, channels = h.shape[:2]
        h = F.conv2d(h, s.kernels.repeat(channels, 1, 1, 1), stride=2, groups=channels)
        h = s.mid(h)
        return F.conv_transpose2d(h, s.kernels.repeat(channels, 1, 1, 1), stride=2, groups=channels)

    kernels = nn.Buffer(torch.randn(4, 1, 2, 2))
    return between(wiring, mid=conv(32, 32, 1), kernels=kernels, share=free_parameter(8, 1, 1))


@awkward(1.0)
def factors_of_a_weight() -> nn.Module:
    """No parameter has the weight's shape. One factor is read by another layer's weight, too."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = F.conv2d(h, (s.left @ s.right).view(8, 8, 1, 1))
        return torch.einsum("bchw,dc->bdhw", h, s.left @ s.other) + (s.left @ s.third @ h.flatten(2)).view_as(
            h
        )

    parts = {name: free_parameter(3, 8) for name in ("right", "other", "third")}
    return between(wiring, left=free_parameter(8, 3), **parts)


@awkward(1.0)
def weight_drawn_anew() -> nn.Module:
    """DropConnect: there is no value to keep, but the parameter loses channels."""
    return between(
        lambda s, h: s.mid(F.conv2d(h, F.dropout(s.weight, 0.5, s.training), padding=1)),
        2,
        8,
        weight=free_parameter(8, 2, 3, 3),
        mid=conv(8, 8),
    )


@awkward(0.0)
def weight_that_the_network_shows() -> nn.Module:
    """It is an output, too."""

    def wiring(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        kernel = s.mid.weight * s.gain
        return s.out(F.conv2d(s.stem(x), kernel, padding=1)), kernel

    return Net(wiring, stem=conv(3, 8), mid=conv(8, 8), out=conv(8, 4), gain=free_parameter(8, 1, 1, 1))


@awkward(1.0)
def layers_called_twice() -> nn.Module:
    """Their weights are computed at each call, and are one weight."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = s.two(F.relu(s.two(s.one(F.relu(s.one(h))))))
        return F.conv2d(F.conv2d(h, s.kernel * 2, padding=1), s.kernel * 2, padding=1)

    layers = {"one": parametrizations.weight_norm(conv(8, 8)), "two": spectral_norm(conv(8, 8))}
    return between(wiring, kernel=free_parameter(8, 8, 3, 3), **layers)


@awkward(1.0)
def weight_by_an_observed_range() -> nn.Module:
    return in_the_middle(ObservedWeight("moved", 8, 1, 1, 1))


@awkward(1.0)
def weight_by_an_observed_range_of_all_channels() -> nn.Module:
    spellings = ("assigned", "the larger", "in steps")
    return in_the_middle(nn.Sequential(*(ObservedWeight(each) for each in spellings)))


@awkward(1.0)
def weight_and_maps_by_learned_steps() -> nn.Module:
    steps = {"maps": LearnedStep(), "kernels": LearnedStep(8, 1, 1, 1), "more": LearnedStep()}

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = F.conv2d(s.maps(h), s.kernels(s.one.weight), s.one.bias, padding=1)
        return F.conv2d(h, s.more(s.two.weight), s.two.bias, padding=1)

    return between(wiring, one=conv(8, 8), two=conv(8, 8), **steps)


@awkward(1.0)
def weight_and_maps_quantised_by_torch() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        maps = torch.fake_quantize_per_tensor_affine(h, 0.05, 3, 0, 255)
        kernel = torch.fake_quantize_per_tensor_affine(s.mid.weight, 0.01, 0, -8, 7)
        return F.conv2d(maps, s.none(kernel), s.mid.bias, padding=1)

    return between(wiring, mid=conv(8, 8), none=nn.Identity())
