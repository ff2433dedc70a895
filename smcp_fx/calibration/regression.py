"""Ridge regression from sums of products, whose size does not grow with the data.

Each use of a weight W [groups, inputs, outputs] has rows x and outputs y, some to fit and some held out:

    minimise  sum |y - x W - b|^2 + ridge * mean(diag(X'X)) * |W - W0|^2

W0 is the previous weight, so a larger ridge means a smaller change. The ridge with the least error on the
held-out rows wins; the final fit uses it on all rows. (The regression of He et al. 2017, "Channel pruning for
accelerating very deep neural networks", section 3.1, on each layer's own inputs in the pruned network.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

#: Layers with more inputs per output are skipped: their products of 512 MiB would fill the memory. Chosen.
WIDEST = 8192
#: Ridges to try. Chosen, not measured.
RIDGES = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
#: Columns per block when only half of a symmetric product is computed. Chosen.
_BLOCK = 512
#: How a use handles the mean: by its bias, by the batch norm behind it, or not at all.
Intercept = Literal["bias", "norm", "none"]


@dataclass
class Gram:
    """Sums of x and of its products over rows, by group, in float64."""

    count: int = 0
    x: Tensor = field(default_factory=lambda: torch.zeros(()))
    xx: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, x: Tensor) -> Tensor:
        """Add rows [..., groups, inputs], whose products keep their type; return [groups, rows, inputs]."""
        by_group = x.flatten(0, -3).transpose(0, 1)
        if len(by_group) > 1:  # strided products of many small groups are slow
            by_group = by_group.mT.contiguous().mT
        self.count += by_group.shape[1]
        self.x = self.x + _sum(by_group)
        self.xx = _plus(self.xx, _products(by_group))
        return by_group

    def covariance(self) -> Tensor:
        """Return the covariance of the inputs, [groups, inputs, inputs]."""
        mean = (self.x / self.count).unsqueeze(-1)
        return self.xx / self.count - mean @ mean.mT


@dataclass
class Sums(Gram):
    """Sums for a regression of y on x, in float64: of y, and of the previous weights' residual, r = y - x W0.

    ``xr`` holds products by group, ``rr`` and ``yy`` the sums of all squares. Products of residuals keep
    their digits in single precision; products of y would not.
    """

    y: Tensor = field(default_factory=lambda: torch.zeros(()))
    r: Tensor = field(default_factory=lambda: torch.zeros(()))
    xr: Tensor = field(default_factory=lambda: torch.zeros(()))
    rr: Tensor = field(default_factory=lambda: torch.zeros(()))
    yy: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add_pairs(self, x: Tensor, y: Tensor, before: Tensor) -> None:
        """Add rows [..., groups, inputs] and outputs [..., groups, outputs]; ``before`` is W0."""
        if not x.numel():
            return
        x = self.add(x)
        y = y.flatten(0, -3).transpose(0, 1)
        left = torch.baddbmm(y, x, before, alpha=-1)
        self.y, self.r = self.y + _sum(y), self.r + _sum(left)
        self.xr = _plus(self.xr, x.mT @ left)
        self.rr = self.rr + _sum(left.square()).sum()  # on its device, so that no chunk waits for a GPU
        self.yy = self.yy + _sum(y.square()).sum()

    def __add__(self, other: Sums) -> Sums:
        if not (self.count and other.count):
            return self if self.count else other
        return Sums(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return products of x with x and with r, with means removed."""
        mean = (self.x / self.count).unsqueeze(-1)
        return self.xx - mean @ self.x.unsqueeze(-2), self.xr - mean @ self.r.unsqueeze(-2)

    def intercept(self, change: Tensor) -> Tensor:
        """Return the best b for a change of the weight, [groups, outputs]."""
        return (self.r - _times(self.x, change)) / self.count

    def error(self, change: Tensor, intercept: Tensor | None) -> float:
        """Return the sum of squared errors of x (W0 + change) + b; b is the best one if None."""
        moved = (change * (self.xx @ change)).sum() - 2 * (change * self.xr).sum()
        away = self.r - _times(self.x, change)
        if intercept is None:
            total = moved - (away * away).sum() / self.count
        else:
            total = moved - 2 * (intercept * away).sum() + self.count * (intercept * intercept).sum()
        return max(float(total + self.rr), 0.0)

    @property
    def spread(self) -> float:
        """Return the sum of squared distances of y from its mean."""
        return max(float(self.yy - (self.y * self.y).sum() / self.count), 0.0)

    @property
    def finite(self) -> bool:
        """Whether all sums are finite."""
        return bool(torch.isfinite(self.xx.sum() + self.xr.sum() + self.yy))


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
    spread = sum(use.held_out.spread for use in uses) or sum(float(use.held_out.yy) for use in uses) or 1.0
    none = torch.zeros_like(weight)
    before = _error(uses, none, [use.bias for use in uses])
    same = Solution(weight, tuple(use.bias for use in uses), float("inf"), before / spread, before / spread)
    if before <= rounding * sum(float(use.held_out.yy) for use in uses):
        return same
    normal = _normal(uses, [use.fit for use in uses])

    def tried(ridge: float) -> tuple[float, float, Tensor]:
        change = none if ridge == float("inf") else _ridge(normal, ridge)
        if change is None:
            return float("inf"), ridge, none
        biases = [_bias(use, use.fit, change) for use in uses]
        return _error(uses, change, biases), ridge, change

    error, ridge, best = min(_descent(tried), tried(float("inf")), key=lambda item: item[0])
    if not error < before:
        return same
    every = [use.fit + use.held_out for use in uses]
    refitted = best if ridge == float("inf") else _ridge(_normal(uses, every), ridge)
    for chosen, rows in ((refitted, every), (best, [use.fit for use in uses])):
        if chosen is None:
            continue
        rounded = stored(weight + chosen)
        biases = [_bias(use, sums, rounded - weight) for use, sums in zip(uses, rows, strict=True)]
        after = _error(uses, rounded - weight, biases)
        if after < before and bool(torch.isfinite(rounded).all()):
            return Solution(rounded, tuple(biases), ridge, before / spread, min(error, before) / spread)
    return same


def _descent(tried: Callable[[float], tuple[float, float, Tensor]]) -> tuple[float, float, Tensor]:
    """Descend from the middle ridge to the best, without trying all: a wide layer's solve takes seconds."""
    middle = len(RIDGES) // 2
    best = tried(RIDGES[middle])
    for ways in (RIDGES[middle + 1 :], RIDGES[middle - 1 :: -1]):
        start = best
        for ridge in ways:
            candidate = tried(ridge)
            if candidate[0] > best[0]:
                break
            best = candidate
        if best is not start:
            break
    return best


def _normal(uses: Sequence[Use], rows: Sequence[Sums]) -> tuple[Tensor, Tensor]:
    """Return X'X and X'R, over all uses."""
    pairs = [
        (sums.xx, sums.xr) if use.intercept == "none" else sums.centred()
        for use, sums in zip(uses, rows, strict=True)
        if sums.count
    ]
    products = torch.stack([pair[0] for pair in pairs]).sum(0)
    return products, torch.stack([pair[1] for pair in pairs]).sum(0)


def _ridge(normal: tuple[Tensor, Tensor], ridge: float) -> Tensor | None:
    """Return the change of the weights for a ridge; None if double precision cannot solve the equations."""
    products, away = normal
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    strength = ridge * diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(products.dtype).tiny ** 0.5)
    factor, failed = torch.linalg.cholesky_ex(products + torch.diag_embed(strength.expand_as(diagonal)))
    if bool(failed.any()):
        return None
    return torch.cholesky_solve(away, factor)


def _products(rows: Tensor) -> Tensor:
    """Return x'x of rows [groups, rows, inputs]; for a wide layer, compute one half by blocks, and mirror."""
    width = rows.shape[-1]
    if width < 2 * _BLOCK:
        return rows.mT @ rows
    products = rows.new_empty(rows.shape[0], width, width)
    for first in range(0, width, _BLOCK):
        mine = slice(first, first + _BLOCK)
        products[:, mine, first:] = rows[:, :, mine].mT @ rows[:, :, first:]
        products[:, first:, mine] = products[:, mine, first:].mT
    return products


def _sum(rows: Tensor) -> Tensor:
    """Return the sum over rows in float64, added up in the rows' own type (at least float32)."""
    return rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).double()


def _plus(sums: Tensor, products: Tensor) -> Tensor:
    return sums.add_(products) if sums.dim() else products.double()


def _bias(use: Use, rows: Sums, change: Tensor) -> Tensor | None:
    return rows.intercept(change) if use.intercept == "bias" and rows.count else use.bias


def _error(uses: Sequence[Use], change: Tensor, biases: Sequence[Tensor | None]) -> float:
    total = 0.0
    for use, bias in zip(uses, biases, strict=True):
        if use.held_out.count:
            zero = torch.zeros_like(use.held_out.r) if bias is None else bias
            total += use.held_out.error(change, None if use.intercept == "norm" else zero)
    return total


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [groups, inputs] by [groups, inputs, outputs]."""
    return (x.unsqueeze(-2) @ weight).squeeze(-2)
