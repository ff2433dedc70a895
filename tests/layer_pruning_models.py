"""Networks with branches that may go."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import (
    Net,
    conv,
    conv_bn,
    randomise,
)
from random_branches import Excitation
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def prepared(model: nn.Module, inputs: Any = IMAGE, **options: Any) -> smcp_fx.PreparedModel:
    """Prepared in double precision, with steps of one channel unless told."""
    config = {"multiple": 1, "layer_pruning": True, **options.pop("config", {})}
    inputs = tuple(i.double() for i in (inputs if isinstance(inputs, tuple) else (inputs,)))
    model = randomise(model).double().eval()
    return smcp_fx.prepare(model, inputs, config=MethodConfig(**config), **options)


def removable(found: smcp_fx.PreparedModel) -> set[str]:
    return {group.name for group in found.channels.groups if 0 in group.permitted}


def nothing(found: smcp_fx.PreparedModel, *names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(found.channels[name].size, dtype=torch.bool) for name in names}


class Bottleneck(nn.Module):
    """A residual bottleneck with an excitation, as EfficientNet has them."""

    def __init__(self, stream: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.expand = conv_bn(stream, inner, 1)
        self.depthwise = conv_bn(inner, inner, 3, groups=inner)
        self.gate = Excitation(inner, 3, linear=False)
        self.project = nn.Sequential(conv(inner, stream, 1, bias=False), nn.BatchNorm2d(stream))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.project(self.gate(self.depthwise(self.expand(x))))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """A ConvNeXt block: what comes before the hidden units has the stream's own channels."""

    def __init__(self, stream: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.depthwise = conv(stream, stream, groups=stream)
        self.norm = nn.LayerNorm(stream)
        self.up, self.down = nn.Linear(stream, hidden), nn.Linear(hidden, stream)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        inner = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return x + inner.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def body(*blocks: nn.Module, stream: int = 8) -> nn.Sequential:
    """A stem, these blocks, and a classifier."""
    return nn.Sequential(
        conv_bn(3, stream), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(stream, 5)
    )


def parallel(*widths: int) -> Net:
    """Two-layer branches of these (inner, outer) widths side by side."""
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    return Net(
        lambda s, x: s.out(torch.cat([branch(s.stem(x)) for branch in s.branches], 1)),
        stem=conv_bn(3, 8),
        branches=nn.ModuleList(nn.Sequential(conv_bn(8, a), conv_bn(a, b)) for a, b in pairs),
        out=conv(sum(b for _, b in pairs), 4),
    )
