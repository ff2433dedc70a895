"""Small networks whose forward writes into a parameter before a layer reads it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn


class Masked(nn.Conv2d):
    """A masked convolution (PixelCNN), which masks its weight in one of several spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__(8, 8, 3, padding=1)
        self.spelling = spelling
        self.register_buffer("mask", torch.rand(8, 8, 3, 3) > 0.4)

    def forward(self, x: Tensor) -> Tensor:
        """Mask, then convolve."""
        if self.spelling == "assigned":
            self.weight.data *= self.mask
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        elif self.spelling == "copied":
            self.weight.data.copy_(self.weight * self.mask)
        elif self.spelling == "under no_grad":
            with torch.no_grad():
                self.weight.mul_(self.mask)
        elif self.spelling == "a part":
            self.weight.data[:, :, 2, :] = 0
        else:
            self.weight.data[:, :, 1, 2:] *= 0
            self.weight.data[:, :, 1, 0].zero_()
        return super().forward(x)


class FusedInEval(nn.Module):
    """Three convolutions and a shortcut in training; in eval mode the kernel that they make together (SPAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep, self.narrow = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1)
        self.skip, self.fused = nn.Conv2d(8, 8, 1), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The same in both modes."""
        if self.training:
            y: Tensor = self.narrow(self.deep(self.wide(F.pad(x, (1, 1, 1, 1))))) + self.skip(x)
            return y
        one, two, three = (part.weight.data.clone() for part in (self.wide, self.deep, self.narrow))
        kernel = F.conv2d(F.conv2d(one.permute(1, 0, 2, 3), two, padding=2), three).flip(2, 3)
        bias = (two * self.wide.bias.data.view(1, -1, 1, 1)).sum((1, 2, 3)) + self.deep.bias.data
        bias = (three * bias.view(1, -1, 1, 1)).sum((1, 2, 3)) + self.narrow.bias.data
        self.fused.weight.data = kernel.permute(1, 0, 2, 3) + F.pad(self.skip.weight.data, (1, 1, 1, 1))
        self.fused.bias.data = bias + self.skip.bias.data
        return self.fused(x)  # type: ignore[no-any-return]


def through(layer: nn.Module) -> Net:
    return between(lambda s, h: F.relu(s.mid(h)), mid=layer)


@awkward(1.0)
def masked_by_an_assignment() -> nn.Module:
    return through(Masked("assigned"))


@awkward(1.0)
def masked_by_a_copy() -> nn.Module:
    return through(Masked("copied"))


@awkward(1.0)
def masked_without_gradients() -> nn.Module:
    return through(Masked("under no_grad"))


@awkward(1.0)
def rows_of_kernels_set_to_zero() -> nn.Module:
    return through(nn.Sequential(Masked("a part"), Masked("another part")))


@awkward(1.0)
def fused_in_eval_mode() -> nn.Module:
    return through(FusedInEval())


@awkward(1.0)
def weight_and_scale_clipped_from_outside() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        s.mid.weight.data.clamp_(-0.05, 0.05)
        s.scale.data.clamp_(0.2, 0.9)
        return F.relu(s.mid(h) * s.scale)

    return between(wiring, mid=conv(8, 8), scale=free_parameter(8, 1, 1))
