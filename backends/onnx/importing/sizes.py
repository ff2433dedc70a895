"""Numbers of a file's shapes: fixed ones, and those that follow from open axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Size:
    """A number that follows from open axes: the node that computes it, and what it is at the two example sizes."""

    node: fx.Node
    at: tuple[Any, Any]


@dataclass(frozen=True)
class SizeArray:
    """An integer tensor of the file that holds a `Size`: an array of objects, numbers and sizes."""

    values: Array
    dtype: torch.dtype = torch.int64

    @property
    def flat(self) -> list[Any]:
        """Its elements."""
        return list(self.values.reshape(-1))


def array_of(values: Iterable[Any], shape: tuple[int, ...] | None = None) -> Array:
    """Return an array of objects; numpy would look for sequences in them."""
    listed = list(values)
    array = np.empty(len(listed), object)
    for index, value in enumerate(listed):
        array[index] = value
    return array.reshape(shape if shape is not None else (len(listed),))


def as_value(values: Array, dtype: torch.dtype = torch.int64) -> SizeArray | Tensor:
    """Return an array as a value of the file: a tensor if no size is in it."""
    if any(isinstance(value, Size) for value in values.reshape(-1)):
        return SizeArray(values, dtype)
    return torch.tensor(values.tolist(), dtype=dtype)


def as_array(value: Any) -> Array:
    """Return a constant, or an array of sizes, as an array of objects."""
    if isinstance(value, SizeArray):
        return value.values
    return array_of(value.reshape(-1).tolist(), tuple(value.shape))
