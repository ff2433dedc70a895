"""Ridge regression from sums of products, whose size does not grow with the data.

For each use of a weight W [groups, inputs, outputs], rows x and outputs y of a part to fit and a part held out:

    minimise  sum |y - x W - b|^2 + ridge * mean(diag(X'X)) * |W - W0|^2

W0 are the weights before, so that more ridge means less change. The ridge with the least error on the part held out
is taken; then all rows are fitted with it. (The regression of He et al. 2017, "Channel pruning for accelerating very
deep neural networks", section 3.1, on each layer's own inputs in the pruned network.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

#: Layers with more inputs per output are skipped: their products of 512 MiB would fill the memory. Chosen.
WIDEST = 8192
#: Ridges that are tried. Chosen, not measured.
RIDGES = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
#: How a use handles the mean: by its bias, by the batch norm behind it, or not at all.
Intercept = Literal["bias", "norm", "none"]


@dataclass
class Gram:
    """Sums over rows, in float64: of x and of its products, by group."""

    count: int = 0
    x: Tensor = field(default_factory=lambda: torch.zeros(()))
    xx: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, x: Tensor) -> None:
        """Add rows [rows, groups, inputs]; products are computed in their own type."""
        by_group = x.transpose(0, 1)
        self.count += x.shape[0]
        self.x = self.x + x.sum(0, dtype=torch.float64)
        products = by_group.mT @ by_group
        self.xx = self.xx.add_(products) if self.xx.dim() else products.double()

    def covariance(self) -> Tensor:
        """Return the mean product of inputs without their means, [groups, inputs, inputs]."""
        mean = (self.x / self.count).unsqueeze(-1)
        return self.xx / self.count - mean @ mean.mT


@dataclass
class Sums:
    """Sums over rows, in float64: of x, y, and their products by group; ``yy`` of all squares of y."""

    count: int = 0
    x: Tensor = field(default_factory=lambda: torch.zeros(()))
    y: Tensor = field(default_factory=lambda: torch.zeros(()))
    xx: Tensor = field(default_factory=lambda: torch.zeros(()))
    xy: Tensor = field(default_factory=lambda: torch.zeros(()))
    yy: float = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows [rows, groups, inputs] and outputs [rows, groups, outputs]."""
        if not x.shape[0]:
            return
        x, y = x.double(), y.double()
        self.count += x.shape[0]
        by_group = x.transpose(0, 1)
        found = (x.sum(0), y.sum(0), by_group.mT @ by_group, by_group.mT @ y.transpose(0, 1))
        if self.count == x.shape[0]:
            self.x, self.y, self.xx, self.xy = found
        else:
            for mine, more in zip((self.x, self.y, self.xx, self.xy), found, strict=True):
                mine.add_(more)
        self.yy += float((y * y).sum())

    def __add__(self, other: Sums) -> Sums:
        if not (self.count and other.count):
            return self if self.count else other
        return Sums(
            self.count + other.count, self.x + other.x, self.y + other.y, self.xx + other.xx, self.xy + other.xy,
            self.yy + other.yy,
        )  # fmt: skip

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return products of x with x and with y, with means removed."""
        mean = (self.x / self.count).unsqueeze(-1)
        return self.xx - mean @ self.x.unsqueeze(-2), self.xy - mean @ self.y.unsqueeze(-2)

    def intercept(self, weight: Tensor) -> Tensor:
        """Return the best b for a weight, [groups, outputs]."""
        return (self.y - _times(self.x, weight)) / self.count

    def error(self, weight: Tensor, intercept: Tensor | None) -> float:
        """Return the sum of squared errors of x W + b; b is the best one if None."""
        change = (weight * (self.xx @ weight)).sum() - 2 * (weight * self.xy).sum()
        away = self.y - _times(self.x, weight)
        if intercept is None:
            found = change - (away * away).sum() / self.count
        else:
            found = change - 2 * (intercept * away).sum() + self.count * (intercept * intercept).sum()
        return max(float(found) + self.yy, 0.0)

    @property
    def spread(self) -> float:
        """Return the sum of squared distances of y from its mean."""
        return max(self.yy - float((self.y * self.y).sum()) / self.count, 0.0)

    @property
    def finite(self) -> bool:
        """Whether all sums are finite."""
        return all(bool(torch.isfinite(t).all()) for t in (self.xx, self.xy, torch.tensor(self.yy)))


@dataclass
class Use:
    """A use of a weight: how it handles the mean, its bias [groups, outputs], and its rows."""

    intercept: Intercept
    bias: Tensor | None
    fit: Sums = field(default_factory=Sums)
    held_out: Sums = field(default_factory=Sums)


@dataclass(frozen=True)
class Solution:
    """A weight and each use's bias; errors on held-out rows, as shares of the outputs' spread."""

    weight: Tensor
    biases: tuple[Tensor | None, ...]
    ridge: float
    before: float
    after: float


def solve(
    uses: Sequence[Use], weight: Tensor, stored: Callable[[Tensor], Tensor], rounding: float = 1e-14
) -> Solution:
    """Solve the regression over all uses; ``stored`` rounds a weight to the layer's own type.

    Errors up to ``rounding`` times the outputs' squares count as zero. If the error on held-out rows does not fall,
    the solution is the old weight and biases, with ridge infinity.
    """
    spread = sum(use.held_out.spread for use in uses) or sum(use.held_out.yy for use in uses) or 1.0
    before = _error(uses, weight, [use.bias for use in uses])
    same = Solution(weight, tuple(use.bias for use in uses), float("inf"), before / spread, before / spread)
    if before <= rounding * sum(use.held_out.yy for use in uses):
        return same
    found = []
    normal = _normal(uses, [use.fit for use in uses], weight)
    for ridge in RIDGES:
        candidate = _ridge(normal, weight, ridge)
        if candidate is not None:
            biases = [_bias(use, use.fit, candidate) for use in uses]
            found.append((_error(uses, candidate, biases), ridge, candidate))
    found.append((_error(uses, weight, [_bias(use, use.fit, weight) for use in uses]), float("inf"), weight))
    error, ridge, best = min(found, key=lambda item: item[0])
    if not error < before:
        return same
    every = [use.fit + use.held_out for use in uses]
    refitted = best if ridge == float("inf") else _ridge(_normal(uses, every, weight), weight, ridge)
    for chosen, rows in ((refitted, every), (best, [use.fit for use in uses])):
        if chosen is None:
            continue
        chosen = stored(chosen)
        biases = [_bias(use, sums, chosen) for use, sums in zip(uses, rows, strict=True)]
        after = _error(uses, chosen, biases)
        if after < before and bool(torch.isfinite(chosen).all()):
            return Solution(chosen, tuple(biases), ridge, before / spread, min(error, before) / spread)
    return same


def _normal(uses: Sequence[Use], rows: Sequence[Sums], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return X'X and X'Y - X'X W0, over all uses."""
    pairs = [
        (sums.xx, sums.xy) if use.intercept == "none" else sums.centred()
        for use, sums in zip(uses, rows, strict=True)
        if sums.count
    ]
    products = torch.stack([pair[0] for pair in pairs]).sum(0)
    return products, torch.stack([pair[1] for pair in pairs]).sum(0) - products @ weight


def _ridge(normal: tuple[Tensor, Tensor], weight: Tensor, ridge: float) -> Tensor | None:
    """Return the weights for a ridge; None if double precision cannot solve the equations."""
    products, away = normal
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    strength = ridge * diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(products.dtype).tiny ** 0.5)
    factor, failed = torch.linalg.cholesky_ex(products + torch.diag_embed(strength.expand_as(diagonal)))
    if bool(failed.any()):
        return None
    return weight + torch.cholesky_solve(away, factor)


def _bias(use: Use, rows: Sums, weight: Tensor) -> Tensor | None:
    return rows.intercept(weight) if use.intercept == "bias" and rows.count else use.bias


def _error(uses: Sequence[Use], weight: Tensor, biases: Sequence[Tensor | None]) -> float:
    total = 0.0
    for use, bias in zip(uses, biases, strict=True):
        if use.held_out.count:
            zero = torch.zeros_like(use.held_out.y) if bias is None else bias
            total += use.held_out.error(weight, None if use.intercept == "norm" else zero)
    return total


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [groups, inputs] by [groups, inputs, outputs]."""
    return (x.unsqueeze(-2) @ weight).squeeze(-2)
