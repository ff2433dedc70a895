"""Random steps of branches that can go as a whole, for layer pruning: residual, dense and parallel ones.

In each, some inner layer may keep nothing; what it then leaves is a constant that goes through what is behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from random_builder import WIDEST, Builder, Function
from torch import Tensor, nn


def _behind(b: Builder, channels: int) -> list[nn.Module]:
    """A norm and an activation, or fewer, or more."""
    norms = [nn.BatchNorm2d(channels), nn.GroupNorm(1, channels), nn.InstanceNorm2d(channels, affine=True)]
    norms += [nn.BatchNorm2d(channels), nn.PReLU(channels), nn.Dropout(0.5)]
    activations = [nn.ReLU(inplace=True), nn.ReLU(), nn.SiLU(), nn.Sigmoid()]
    return [b.random.choice(part) for part in (norms, activations) if b.random.random() < 0.7]


def _chain(b: Builder, inputs: int, outputs: int, written: bool = False) -> nn.Sequential:
    """One to four layers, the last one writing ``outputs`` channels.

    ``written``: what it returns will be changed in place, which activations do not survive.
    """
    parts: list[nn.Module] = []
    width = inputs
    for last in [False] * b.random.choice([0, 1, 1, 2, 3]) + [True]:
        wide = outputs if last else b.random.choice([3, 4, 6, 8])
        kernel = b.random.choice([1, 3])
        parts.append(nn.Conv2d(width, wide, kernel, padding=kernel // 2, bias=b.random.random() < 0.6))
        width = wide
        if not last and b.random.random() < 0.3:
            parts.append(nn.Conv2d(width, width, 3, padding=1, groups=width))
        if not last or b.random.random() < 0.6:
            parts += [nn.BatchNorm2d(width)] if last and written else _behind(b, width)
        if not last and b.random.random() < 0.2:
            parts.append(Excitation(width, b.random.choice([2, 3])))
    return nn.Sequential(*parts)


class Excitation(nn.Module):
    """Squeeze and excitation, by convolutions or by linears."""

    def __init__(self, channels: int, hidden: int, linear: bool | None = None) -> None:
        super().__init__()
        self.linear = channels % 2 == 0 if linear is None else linear
        kinds: Any = nn.Linear if self.linear else lambda i, o: nn.Conv2d(i, o, 1)
        self.down, self.up = kinds(channels, hidden), kinds(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """The input, each channel times a factor."""
        if self.linear:
            b, c, _, _ = x.size()
            return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3)).view(b, c))))).view(
                b, c, 1, 1
            )
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


def residual(b: Builder) -> None:
    source = b.pick()
    c = b.channels[source]
    kind = b.random.choice(["add", "iadd", "add_", "scale", "mul", "maximum"])
    held: dict[str, Any] = {"branch": _chain(b, c, c, written=kind in ("iadd", "add_"))}
    if kind == "scale":
        held["scale"] = nn.Parameter(torch.randn(c, 1, 1))
    behind = b.random.choice([nn.Identity(), nn.ReLU(), nn.ReLU(inplace=True), nn.BatchNorm2d(c)])
    functions: dict[str, Function] = {
        "add": lambda s, x: x + s.branch(x),
        "iadd": lambda s, x: s.behind(operator.iadd(s.branch(x), x)),
        "add_": lambda s, x: s.behind(s.branch(x).add_(x)),
        "scale": lambda s, x: x + s.scale * s.branch(x),
        "mul": lambda s, x: x * torch.sigmoid(s.branch(x)),
        "maximum": lambda s, x: torch.maximum(s.branch(x) * 0.5, x),
    }
    b.add(f"branch {kind}", c, (source,), functions[kind], behind=behind, **held)


def excitation(b: Builder) -> None:
    source = b.pick()
    c = b.channels[source]
    b.add(
        "branch excitation", c, (source,), lambda s, x: s.gate(x), gate=Excitation(c, b.random.choice([2, 4]))
    )


def dense(b: Builder) -> None:
    source = b.pick(most=WIDEST // 2)
    c, growth = b.channels[source], b.random.choice([3, 4])

    def function(s: Any, x: Tensor) -> Tensor:
        for layer in s.layers:
            x = torch.cat([x, layer(x)], 1)
        return x

    layers = nn.ModuleList(
        _chain(b, c + growth * index, growth) for index in range(b.random.choice([1, 2, 3]))
    )
    total = c + growth * len(layers)
    joined = b.add("branch dense", total, (source,), function, layers=layers)
    if total > WIDEST or b.random.random() < 0.5:
        b.convolve(joined, b.width(), 1)


def parallel(b: Builder) -> None:
    source = b.pick()
    c = b.channels[source]
    widths = [b.random.choice([3, 4, 6]) for _ in range(b.random.choice([2, 3]))]
    branches = nn.ModuleList(_chain(b, c, width) for width in widths)
    joined = b.add(
        "branch parallel",
        sum(widths),
        (source,),
        lambda s, x: torch.cat([branch(x) for branch in s.branches], 1),
        branches=branches,
    )
    if b.random.random() < 0.5:
        into = b.random.choice([c, b.width()])
        out = b.convolve(joined, into, 1)
        if into == c:
            b.add("add", c, (source, out), lambda s, x, y: x + y)


def halves(b: Builder) -> None:
    """One half goes through a branch, the other around it; both are shuffled together, or the halves are kept."""
    source = b.pick(4, 2)
    c = b.channels[source]
    shuffled = b.random.random() < 0.5

    def function(s: Any, x: Tensor) -> Tensor:
        one, two = x.chunk(2, 1)
        both = torch.cat([one, s.branch(two)], 1)
        if shuffled:
            n, channels, h, w = both.size()
            both = both.view(n, 2, channels // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return both

    b.add("branch halves", c, (source,), function, branch=_chain(b, c // 2, c // 2))


OPERATIONS: list[tuple[Callable[[Builder], None], int]] = [
    (residual, 12),
    (excitation, 4),
    (dense, 5),
    (parallel, 5),
    (halves, 4),
]
