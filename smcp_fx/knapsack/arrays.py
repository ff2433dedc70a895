"""The few array operations that the knapsack solver needs, on NumPy and on a torch device.

Everything else (arithmetic, comparisons, indexing, ``sum``, ``min``, ``max``, ``argmax``) is spelled the same
for both. The CPU uses NumPy: on the few hundred to few thousand elements a solve works on, its operations
cost a half to a quarter of torch's.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

#: A 1-D ``numpy.ndarray`` or ``torch.Tensor``; all arrays of one solve are of one kind, on one device.
Array = Any

#: Cells of an outer sum formed at once (a byte and a float64 each); larger ones go row by row. Chosen: 18 MB.
_LARGEST_OUTER = 1 << 21


class ArrayOps(Protocol):
    """Operations whose spelling differs between NumPy and torch; all arrays are 1-D."""

    def floats(self, x: Any) -> Array:
        """Return ``x`` (sequence, array or tensor) as float64 on this device."""

    def ints(self, x: Any) -> Array:
        """Return ``x`` (sequence, array or tensor) as a fresh int64 array on this device."""

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        """Return ``x`` as a NumPy array, in one copy if it lives on another device."""

    def arange(self, n: int) -> Array:
        """Return 0 .. n - 1, int64."""

    def concat(self, xs: list[Array]) -> Array:
        """Join arrays end to end."""

    def flatnonzero(self, mask: Array) -> Array:
        """Return the indices at which ``mask`` holds, ascending."""

    def argsort(self, x: Array) -> Array:
        """Return the order that sorts ``x``; the same order on every run."""

    def cummax(self, x: Array) -> Array:
        """Return the running maximum."""

    def cumsum(self, x: Array) -> Array:
        """Return the running sum."""

    def searchsorted(self, ascending: Array, x: Array) -> Array:
        """Return for each ``x`` the number of elements of ``ascending`` that are at most ``x``."""

    def segment_max(self, x: Array, starts: Array, group: Array) -> Array:
        """Return the maximum of each run of ``x``: run g starts at ``starts[g]``, ``group`` has its label."""

    def where(self, mask: Array, x: Any, y: Any) -> Array:
        """Return ``x`` where ``mask`` holds, else ``y``."""

    def rint(self, x: Array) -> Array:
        """Round to the nearest integer, ties to even, as float64."""

    def floor_div(self, x: Array, divisor: int) -> Array:
        """Divide int64 ``x`` by a positive integer, rounding down."""

    def bincount(self, x: Array, n: int) -> Array:
        """Return how often each of 0 .. n - 1 occurs in int64 ``x``."""

    def gcd(self, x: Array) -> int:
        """Return the greatest common divisor of int64 ``x``; 0 if all are 0 or there are none."""

    def smallest(self, x: Array, n: int) -> Array:
        """Return the indices of the ``n`` least elements, in any (but a fixed) order."""

    def random(self, n: int, seed: int) -> Array:
        """Return ``n`` uniform float64 numbers in [0, 1), the same for the same seed."""

    def outer_at_most(self, x: Array, y: Array, limit: float) -> tuple[Array, Array]:
        """Return the index pairs (i, j) with ``x[i] + y[j] <= limit`` (up to rounding)."""


class NumpyOps:
    """`ArrayOps` on NumPy."""

    def floats(self, x: Any) -> Array:
        return np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x, dtype=np.float64)

    def ints(self, x: Any) -> Array:
        return np.asarray(x).astype(np.int64)

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def arange(self, n: int) -> Array:
        return np.arange(n, dtype=np.int64)

    def concat(self, xs: list[Array]) -> Array:
        return np.concatenate(xs)

    def flatnonzero(self, mask: Array) -> Array:
        return np.flatnonzero(mask)

    def argsort(self, x: Array) -> Array:
        return np.argsort(x)

    def cummax(self, x: Array) -> Array:
        return np.maximum.accumulate(x)

    def cumsum(self, x: Array) -> Array:
        return np.cumsum(x)

    def searchsorted(self, ascending: Array, x: Array) -> Array:
        return np.searchsorted(ascending, x, side="right")

    def segment_max(self, x: Array, starts: Array, group: Array) -> Array:
        return np.maximum.reduceat(x, starts)

    def where(self, mask: Array, x: Any, y: Any) -> Array:
        return np.where(mask, x, y)

    def rint(self, x: Array) -> Array:
        return np.rint(x)

    def floor_div(self, x: Array, divisor: int) -> Array:
        return x // divisor

    def bincount(self, x: Array, n: int) -> Array:
        return np.bincount(x, minlength=n)

    def gcd(self, x: Array) -> int:
        return int(np.gcd.reduce(x)) if len(x) else 0

    def smallest(self, x: Array, n: int) -> Array:
        return np.argpartition(x, n - 1)[:n] if n < len(x) else np.arange(len(x))

    def random(self, n: int, seed: int) -> Array:
        return np.random.default_rng(seed).random(n)

    def outer_at_most(self, x: Array, y: Array, limit: float) -> tuple[Array, Array]:
        if len(x) * len(y) <= _LARGEST_OUTER:
            i, j = np.nonzero(np.add.outer(x, y) <= limit)
            return i, j
        rows = [np.flatnonzero(x <= limit - b) for b in y.tolist()]
        return np.concatenate(rows), np.repeat(np.arange(len(y)), [len(row) for row in rows])


class TorchOps:
    """`ArrayOps` on a torch device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def floats(self, x: Any) -> Array:
        return torch.as_tensor(x, dtype=torch.float64, device=self.device)

    def ints(self, x: Any) -> Array:
        return torch.as_tensor(x, device=self.device).to(torch.int64, copy=True)

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x.cpu().numpy())

    def arange(self, n: int) -> Array:
        return torch.arange(n, device=self.device)

    def concat(self, xs: list[Array]) -> Array:
        return torch.cat(xs)

    def flatnonzero(self, mask: Array) -> Array:
        return mask.nonzero().reshape(-1)

    def argsort(self, x: Array) -> Array:
        return torch.sort(x, stable=True).indices

    def cummax(self, x: Array) -> Array:
        return torch.cummax(x, 0).values

    def cumsum(self, x: Array) -> Array:
        return torch.cumsum(x, 0)

    def searchsorted(self, ascending: Array, x: Array) -> Array:
        return torch.searchsorted(ascending, x.contiguous(), right=True)

    def segment_max(self, x: Array, starts: Array, group: Array) -> Array:
        out = x[starts]
        return out.scatter_reduce_(0, group, x, "amax")

    def where(self, mask: Array, x: Any, y: Any) -> Array:
        return torch.where(mask, x, y)

    def rint(self, x: Array) -> Array:
        return torch.round(x)

    def floor_div(self, x: Array, divisor: int) -> Array:
        return torch.div(x, divisor, rounding_mode="floor")

    def bincount(self, x: Array, n: int) -> Array:
        return torch.bincount(x, minlength=n)

    def gcd(self, x: Array) -> int:
        while len(x) > 1:
            half = (len(x) + 1) // 2
            x = torch.cat([torch.gcd(x[: len(x) - half], x[half:]), x[len(x) - half : half]])
        return abs(int(x[0])) if len(x) else 0

    def smallest(self, x: Array, n: int) -> Array:
        return torch.sort(x, stable=True).indices[:n]

    def random(self, n: int, seed: int) -> Array:
        # Drawn on the host, so that a seed means the same on every device.
        return self.floats(np.random.default_rng(seed).random(n))

    def outer_at_most(self, x: Array, y: Array, limit: float) -> tuple[Array, Array]:
        if len(x) * len(y) <= _LARGEST_OUTER:
            pairs = (x[:, None] + y[None, :] <= limit).nonzero()
            return pairs[:, 0], pairs[:, 1]
        rows = [self.flatnonzero(x <= limit - y[j]) for j in range(len(y))]
        return torch.cat(rows), torch.cat([torch.full_like(row, j) for j, row in enumerate(rows)])


def ops_for(device: torch.device) -> ArrayOps:
    """Return NumPy for the CPU and torch for every other device."""
    return NumpyOps() if device.type == "cpu" else TorchOps(device)
