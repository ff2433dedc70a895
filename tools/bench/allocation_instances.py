"""Allocation instances of known networks: their channel groups, layer costs and seeded importances.

Networks are traced at 224 x 224 (U-Net: 256 x 256). Costs are multiply-adds, or a synthetic latency with the
staircases of a tiled matrix-multiply engine; importances are log-normal.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from smcp_fx.channels import ChannelGraph, build
from smcp_fx.cost_model import CostTerm, NetworkCost, Price
from smcp_fx.costs.terms import network_cost as terms_of_network
from smcp_fx.tracing.tracer import trace
from smcp_fx.zoo.models import build_model

Values = dict[str, NDArray[np.float64]]
Pricer = Callable[[int, int, bool], Price]
"""(elements of a kernel, output pixels, depthwise) to the price of that layer."""


def flops_pricer(kernel: int, pixels: int, depthwise: bool) -> Price:
    """Price a convolution in multiply-accumulates; a depthwise price takes one width."""
    scale = float(kernel * pixels)
    if depthwise:
        return lambda channels: scale * np.asarray(channels, np.float64)
    return lambda c_in, c_out: scale * np.asarray(c_in, np.float64) * np.asarray(c_out, np.float64)


def staircase_pricer(kernel: int, pixels: int, depthwise: bool) -> Price:
    """Price a convolution in synthetic milliseconds: 64 x 64 tiles in waves of 40, K padded to 32.

    Not monotone: channels that are no multiple of 16 run 10% slower, as on tensor cores.
    """

    def misaligned(channels: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(channels % 16 == 0, 1.0, 1.1)

    def dense(c_in: NDArray[np.float64], c_out: NDArray[np.float64]) -> NDArray[np.float64]:
        c_in, c_out = np.asarray(c_in, np.float64), np.asarray(c_out, np.float64)
        waves = np.ceil(np.ceil(pixels / 64) * np.ceil(c_out / 64) / 40)
        compute = waves * np.ceil(c_in * kernel / 32) * 2.0e-4
        memory = (pixels * (c_in + c_out) + kernel * c_in * c_out) * 1.0e-8
        return 2.0e-3 + np.maximum(compute, memory) * misaligned(c_in) * misaligned(c_out)

    def each(channels: NDArray[np.float64]) -> NDArray[np.float64]:
        channels = np.asarray(channels, np.float64)
        return 2.0e-3 + np.ceil(channels / 32) * 32 * pixels * 4.0e-8 * misaligned(channels)

    return each if depthwise else dense


PRICERS: dict[str, Pricer] = {"flops": flops_pricer, "latency": staircase_pricer}


def conv(c_in: int, c_out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution with its batch norm and activation."""
    layer = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """U-Net with four levels, 64 to 1024 channels; every skip is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 * 2**level for level in range(5)]
        before = [3, *widths[:-1]]
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b), conv(b, b)) for a, b in zip(before, widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1])
        self.up = nn.ModuleList(nn.Sequential(conv(2 * w, w), conv(w, w)) for w in widths[:-1])
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 2, H, W); H and W multiples of 16."""
        skips = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        for level in reversed(range(4)):
            x = self.up[level](torch.cat([self.rise[level](x), skips[level]], 1))
        out: Tensor = self.head(x)
        return out


class HarDBlock(nn.Module):
    """Layer k reads layers k - 1, k - 2, k - 4, ...; the odd ones and the last are concatenated."""

    def __init__(self, size: int, growth: int, depth: int) -> None:
        super().__init__()
        sizes, self.sources, layers = [size], [], []
        for layer in range(1, depth + 1):
            strides = [2**i for i in range(8) if layer % 2**i == 0 and layer >= 2**i]
            self.sources.append([layer - stride for stride in strides])
            out = 2 * (int(growth * 1.7 ** (len(strides) - 1) + 1) // 2)
            layers.append(conv(sum(sizes[source] for source in self.sources[-1]), out))
            sizes.append(out)
        self.layers = nn.ModuleList(layers)
        self.read = [layer for layer in range(1, depth + 1) if layer == depth or layer % 2 == 1]
        self.size = sum(sizes[layer] for layer in self.read)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, size, H, W)."""
        done = [x]
        for sources, layer in zip(self.sources, self.layers, strict=True):
            done.append(layer(torch.cat([done[source] for source in sources], 1)))
        return torch.cat([done[layer] for layer in self.read], 1)


def hardnet68() -> nn.Module:
    """HarDNet-68; its concats are not nested."""
    layers: list[nn.Module] = [conv(3, 32, 3, 2), conv(32, 64), nn.MaxPool2d(3, 2, 1)]
    size, last = 64, 4
    depths, outs, growths = (8, 16, 16, 16, 4), (128, 256, 320, 640, 1024), (14, 16, 20, 40, 160)
    for stage, (depth, out, growth) in enumerate(zip(depths, outs, growths, strict=True)):
        block = HarDBlock(size, growth, depth)
        layers += [block, conv(block.size, out, 1)]
        if stage not in (1, last):
            layers.append(nn.MaxPool2d(2))
        size = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 1000))


_TORCHVISION = (
    "resnet18",
    "resnet50",
    "resnet101",
    "mobilenet_v2",
    "efficientnet_b0",
    "densenet121",
)
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(build_model, f"torchvision:{name}") for name in _TORCHVISION},
    "googlenet": functools.partial(build_model, "torchvision:googlenet", aux_logits=False),
    "unet": UNet,
    "hardnet68": hardnet68,
}


@functools.cache
def _channels(name: str, step: int) -> ChannelGraph:
    side = 256 if name == "unet" else 224
    traced = trace(MODULES[name]().eval(), (torch.zeros(1, 3, side, side),))
    return build(traced.module, traced.values, multiple=step)


def network_cost(name: str, kind: str, step: int = 8) -> NetworkCost:
    """Return the cost of one of `MODULES` in counts that are multiples of ``step``; ``kind`` is one of `PRICERS`."""
    channels, terms = _channels(name, step), list[CostTerm]()
    for layer in channels.layers:
        depthwise = layer.kind == "depthwise"
        kernel = math.prod(layer.weight_shape[2:])
        pixels = math.prod((layer.in_shape if layer.transposed else layer.out_shape)[2:])
        labels = (layer.out_labels,) if depthwise else (layer.in_labels, layer.out_labels)
        widths = tuple(channels.width(each) for each in labels)
        terms.append(CostTerm(layer.path, widths, PRICERS[kind](kernel, pixels, depthwise)))
    return terms_of_network({"flops": "FLOPs", "latency": "ms"}[kind], channels, terms, 0.0)


def synthetic_importances(cost: NetworkCost, seed: int) -> dict[str, NDArray[np.float64]]:
    """Return each group's importances, unordered: log-normal, with a log-normal scale for the group."""
    importances = {}
    for group, counts in cost.permitted.items():
        rng = np.random.default_rng([seed, zlib.crc32(group.encode())])
        scale = math.exp(rng.normal(0.0, 0.7))
        importances[group] = scale * np.exp(rng.normal(0.0, 1.0, counts[-1]))
    return importances


def values_of(cost: NetworkCost, importances: dict[str, NDArray[np.float64]]) -> Values:
    """Return the sums of the largest importances at each permitted count."""
    return {
        group: np.cumsum(np.sort(importances[group])[::-1])[np.asarray(counts) - 1]
        for group, counts in cost.permitted.items()
    }
