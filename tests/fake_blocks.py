"""Small blocks of every kind, as a latency table sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn


class ConvAdd(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, stride, 1, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(c_out)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(x)) + skip)


class Head(nn.Module):
    def __init__(self, c_in: int) -> None:
        super().__init__()
        self.fc = nn.Linear(c_in, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


class Shuffle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Moves(nn.Module):
    """Channel shuffles and chunks after slicing: channels fetched by index, split, and joined again.

    ``c`` channels of which the first ``first`` were one half. ``dead``: with a fetch that nothing reads.
    """

    def __init__(self, c: int, first: int, dead: bool = False) -> None:
        super().__init__()
        halves = torch.arange(first), torch.arange(first, c)
        turns = [half[i : i + 1] for i in range(c) for half in halves]
        self.first, self.dead = first, dead
        self.register_buffer("shuffled", torch.cat(turns))
        self.register_buffer("back", torch.arange(c).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dead:
            torch.index_select(x, 1, self.back)
        y = torch.index_select(x, 1, self.shuffled)
        a, b = torch.split(y, [self.first, len(self.shuffled) - self.first], 1)
        return torch.index_select(torch.cat([torch.relu(b), a], 1), 1, self.back)


@dataclass(frozen=True)
class ABlock:
    kind: str
    name: str = "block"
    size: int = 8
    batch: int = 2
    stride: int = 1
    grids: tuple[tuple[int, ...], ...] = ()
    read_before: tuple[int, ...] = ()
    fed_by: tuple[str, ...] = ()
    weight_bytes: float = 0.0

    @property
    def signature(self) -> str:
        return f'["{self.kind}", {self.size}, {self.batch}, {self.stride}]'

    def build(self, widths):
        x = torch.randn(self.batch, widths[0], self.size, self.size)
        if self.kind == "head":
            return fx.symbolic_trace(Head(*widths)).eval(), (x,)
        if self.kind == "shuffle":
            return Shuffle(), (x,)
        if self.kind in ("moves", "dead moves"):
            moves = Moves(widths[0], max(widths[0] * 2 // 3, 1), self.kind == "dead moves")
            return fx.symbolic_trace(moves).eval(), (x,)
        depthwise = self.kind == "depthwise"
        c_out = widths[0] if depthwise else widths[1]
        module = ConvAdd(widths[0], c_out, self.stride, widths[0] if depthwise else 1)
        out = self.size // self.stride
        return fx.symbolic_trace(module).eval(), (x, torch.randn(self.batch, c_out, out, out))


class Svd(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


class InexpressibleBlock(ABlock):
    """A block that ONNX cannot express."""

    def build(self, widths):
        return Svd(), (torch.randn(1, widths[0], 4, 4),)
