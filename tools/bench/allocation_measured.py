"""Allocation instances priced by a measured latency table: the networks as modules, and their costs.

What the table lacks is measured: ONNX Runtime on the CPU, one thread, batch 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import smcp_fx
from smcp_fx.backends import get_backend
from smcp_fx.cost_model import NetworkCost
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable


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
    "googlenet",
)
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{name: getattr(torchvision.models, name) for name in _TORCHVISION},
    "unet": UNet,
    "hardnet68": hardnet68,
}


def measured_cost(name: str, table: Path, side: int) -> NetworkCost:
    """The latency in ms of one of `MODULES` at 3 x side x side, around its full widths."""
    torch.manual_seed(0)
    with LatencyTable(table) as rows:
        cost = LatencyCost(rows, get_backend("onnxruntime", threads=1))
        return smcp_fx.prepare(MODULES[name]().eval(), torch.randn(1, 3, side, side), cost=cost).pruner.cost
