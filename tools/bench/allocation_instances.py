"""Allocation instances of known networks: their channel groups, layer costs and seeded importances.

The shapes are those of the published networks at 224 x 224 (U-Net: 256 x 256). Costs are multiply-accumulates
or a synthetic latency with the staircases of a tiled matrix-multiply engine; importances are log-normal.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width

Values = dict[str, NDArray[np.float64]]
Pricer = Callable[[int, int, bool], Price]
"""(kernel size, output pixels, depthwise) to the price of that layer."""


def flops_pricer(kernel: int, pixels: int, depthwise: bool) -> Price:
    """Price a convolution in multiply-accumulates; a depthwise price takes one width."""
    scale = float(kernel * kernel * pixels)
    if depthwise:
        return lambda channels: scale * np.asarray(channels, np.float64)
    return lambda c_in, c_out: scale * np.asarray(c_in, np.float64) * np.asarray(c_out, np.float64)


def staircase_pricer(kernel: int, pixels: int, depthwise: bool) -> Price:
    """Price a convolution in synthetic milliseconds: 64 x 64 tiles in waves of 40, K padded to 32.

    Not monotone: channels that are no multiple of 16 run 10 % slower, as on tensor cores.
    """
    taps = kernel * kernel

    def misaligned(channels: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(channels % 16 == 0, 1.0, 1.1)

    def dense(c_in: NDArray[np.float64], c_out: NDArray[np.float64]) -> NDArray[np.float64]:
        c_in, c_out = np.asarray(c_in, np.float64), np.asarray(c_out, np.float64)
        waves = np.ceil(np.ceil(pixels / 64) * np.ceil(c_out / 64) / 40)
        compute = waves * np.ceil(c_in * taps / 32) * 2.0e-4
        memory = (pixels * (c_in + c_out) + taps * c_in * c_out) * 1.0e-8
        return 2.0e-3 + np.maximum(compute, memory) * misaligned(c_in) * misaligned(c_out)

    def each(channels: NDArray[np.float64]) -> NDArray[np.float64]:
        channels = np.asarray(channels, np.float64)
        return 2.0e-3 + np.ceil(channels / 32) * 32 * pixels * 4.0e-8 * misaligned(channels)

    return each if depthwise else dense


PRICERS: dict[str, Pricer] = {"flops": flops_pricer, "latency": staircase_pricer}


class Sketch:
    """Collects the groups and layers of a network while it is written down."""

    def __init__(self, pricer: Pricer, unit: str, step: int = 8) -> None:
        self.pricer, self.unit, self.step = pricer, unit, step
        self.permitted: dict[str, tuple[int, ...]] = {}
        self.terms: list[CostTerm] = []

    def group(self, name: str, size: int) -> Width:
        """Declare a group with the multiples of the step and its full size as permitted counts."""
        self.permitted[name] = (*range(self.step, size, self.step), size)
        return Width(groups=((name, 1),))

    def conv(self, c_in: Width, c_out: Width, kernel: int, side: int) -> Width:
        """Add a dense convolution with ``side`` x ``side`` outputs."""
        price = self.pricer(kernel, side * side, False)
        self.terms.append(CostTerm(f"conv{len(self.terms)}", (c_in, c_out), price))
        return c_out

    def depthwise(self, channels: Width, kernel: int, side: int) -> Width:
        """Add a depthwise convolution."""
        price = self.pricer(kernel, side * side, True)
        self.terms.append(CostTerm(f"depthwise{len(self.terms)}", (channels,), price))
        return channels

    def cost(self) -> NetworkCost:
        """Return the network written down so far."""
        return NetworkCost(unit=self.unit, permitted=self.permitted, terms=tuple(self.terms))


def concat(*widths: Width) -> Width:
    """Add widths up."""
    members: dict[str, int] = {}
    for width in widths:
        for group, per_unit in width.groups:
            members[group] = members.get(group, 0) + per_unit
    return Width(sum(width.constant for width in widths), tuple(members.items()))


def resnet(net: Sketch, depths: Sequence[int], bottleneck: bool) -> None:
    """ResNet (v1.5 for bottlenecks): one stream a stage, one or two inner groups a block."""
    side, stream = 56, net.conv(Width(3), net.group("stem", 64), 7, 112)
    for stage, depth in enumerate(depths):
        planes, identity = 64 * 2**stage, stage == 0 and not bottleneck
        out = stream if identity else net.group(f"stage{stage}", planes * (4 if bottleneck else 1))
        for block in range(depth):
            name, stride = f"stage{stage}.{block}", 2 if block == 0 and stage > 0 else 1
            source = stream if block == 0 else out
            if block == 0 and not identity:
                net.conv(source, out, 1, side // stride)
            inner = net.group(f"{name}.conv1", planes)
            if bottleneck:
                net.conv(source, inner, 1, side)
                side //= stride
                middle = net.conv(inner, net.group(f"{name}.conv2", planes), 3, side)
                net.conv(middle, out, 1, side)
            else:
                side //= stride
                net.conv(source, inner, 3, side)
                net.conv(inner, out, 3, side)
        stream = out
    net.conv(stream, Width(1000), 1, 1)


def inverted_residuals(
    net: Sketch, stem: int, rows: Sequence[tuple[int, int, int, int, int]], head: int, squeeze: bool
) -> None:
    """MobileNetV2 and EfficientNet: rows of (expansion, channels, repeats, stride, kernel)."""
    side, stream, width = 112, net.conv(Width(3), net.group("stem", stem), 3, 112), stem
    for stage, (expansion, channels, repeats, stride, kernel) in enumerate(rows):
        out = net.group(f"stage{stage}", channels)
        for block in range(repeats):
            source = stream if block == 0 else out
            size = width if block == 0 else channels
            inner = source
            if expansion > 1:
                inner = net.conv(source, net.group(f"stage{stage}.{block}", size * expansion), 1, side)
            side //= stride if block == 0 else 1
            net.depthwise(inner, kernel, side)
            if squeeze:
                reduced = net.group(f"stage{stage}.{block}.squeeze", max(8, size // 4))
                net.conv(net.conv(inner, reduced, 1, 1), inner, 1, 1)
            net.conv(inner, out, 1, side)
        stream, width = out, channels
    net.conv(net.conv(stream, net.group("head", head), 1, side), Width(1000), 1, 1)


def mobilenet_v2(net: Sketch) -> None:
    """MobileNetV2 at width 1."""
    rows = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3)]
    rows += [(6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3)]
    inverted_residuals(net, 32, rows, 1280, squeeze=False)


def efficientnet_b0(net: Sketch) -> None:
    """EfficientNet-B0 with its squeeze-and-excitation layers."""
    rows = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)]
    rows += [(6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]
    inverted_residuals(net, 32, rows, 1280, squeeze=True)


def unet(net: Sketch) -> None:
    """U-Net with four levels, 64 to 1024 channels; every skip is concatenated."""
    side, here, skips = 256, Width(3), []
    for level in range(5):
        for half in "ab":
            here = net.conv(here, net.group(f"down{level}{half}", 64 * 2**level), 3, side)
        if level < 4:
            skips.append(here)
            side //= 2
    for level in reversed(range(4)):
        side *= 2
        here = concat(net.conv(here, net.group(f"rise{level}", 64 * 2**level), 2, side), skips.pop())
        for half in "ab":
            here = net.conv(here, net.group(f"up{level}{half}", 64 * 2**level), 3, side)
    net.conv(here, Width(2), 1, side)


def densenet121(net: Sketch) -> None:
    """DenseNet-121: every layer reads the concat of all before it in its block."""
    side, features, size = 56, net.conv(Width(3), net.group("stem", 64), 7, 112), 64
    for stage, depth in enumerate((6, 12, 24, 16)):
        for layer in range(depth):
            inner = net.conv(features, net.group(f"block{stage}.{layer}.conv1", 128), 1, side)
            grown = net.conv(inner, net.group(f"block{stage}.{layer}.conv2", 32), 3, side)
            features, size = concat(features, grown), size + 32
        if stage < 3:
            size //= 2
            features = net.conv(features, net.group(f"transition{stage}", size), 1, side)
            side //= 2
    net.conv(features, Width(1000), 1, 1)


def googlenet(net: Sketch) -> None:
    """GoogLeNet: four branches concatenated, and again; the concats do not overlap."""
    rows = [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64)]
    rows += [(160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64)]
    rows += [(256, 160, 320, 32, 128, 128), (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)]
    here = net.conv(Width(3), net.group("conv1", 64), 7, 112)
    here = net.conv(here, net.group("conv2", 64), 1, 56)
    here = net.conv(here, net.group("conv3", 192), 3, 56)
    for block, (one, reduce3, three, reduce5, five, pool) in enumerate(rows):
        side = 28 if block < 2 else 14 if block < 7 else 7
        branch1 = net.conv(here, net.group(f"block{block}.one", one), 1, side)
        inner3 = net.conv(here, net.group(f"block{block}.reduce3", reduce3), 1, side)
        branch3 = net.conv(inner3, net.group(f"block{block}.three", three), 3, side)
        inner5 = net.conv(here, net.group(f"block{block}.reduce5", reduce5), 1, side)
        branch5 = net.conv(inner5, net.group(f"block{block}.five", five), 3, side)
        branch_pool = net.conv(here, net.group(f"block{block}.pool", pool), 1, side)
        here = concat(branch1, branch3, branch5, branch_pool)
    net.conv(here, Width(1000), 1, 1)


def hardnet68(net: Sketch) -> None:
    """HarDNet-68: layer k reads layers k - 1, k - 2, k - 4, ... of its block; the concats are not nested."""
    here = net.conv(Width(3), net.group("stem0", 32), 3, 112)
    here, side = net.conv(here, net.group("stem1", 64), 3, 112), 56
    depths, sizes = (8, 16, 16, 16, 4), (128, 256, 320, 640, 1024)
    for stage, (depth, out, growth) in enumerate(zip(depths, sizes, (14, 16, 20, 40, 160), strict=True)):
        layers = [here]
        for layer in range(1, depth + 1):
            strides = [2**i for i in range(8) if layer % 2**i == 0 and layer >= 2**i]
            size = 2 * (int(growth * 1.7 ** (len(strides) - 1) + 1) // 2)
            source = concat(*(layers[layer - stride] for stride in strides))
            layers.append(net.conv(source, net.group(f"block{stage}.{layer}", size), 3, side))
        read = [layers[layer] for layer in range(1, depth + 1) if layer == depth or layer % 2 == 1]
        here = net.conv(concat(*read), net.group(f"transition{stage}", out), 1, side)
        if stage != 1:
            side = max(7, side // 2)
    net.conv(here, Width(1000), 1, 1)


NETWORKS: dict[str, Callable[[Sketch], None]] = {
    "resnet18": lambda net: resnet(net, (2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda net: resnet(net, (3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda net: resnet(net, (3, 4, 23, 3), bottleneck=True),
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
    "unet": unet,
    "googlenet": googlenet,
    "densenet121": densenet121,
    "hardnet68": hardnet68,
}


def network_cost(name: str, kind: str, step: int = 8) -> NetworkCost:
    """Return the cost of one of `NETWORKS`; ``kind`` is one of `PRICERS`."""
    net = Sketch(PRICERS[kind], {"flops": "MAC", "latency": "ms"}[kind], step)
    NETWORKS[name](net)
    return net.cost()


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
