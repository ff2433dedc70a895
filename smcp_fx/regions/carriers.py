"""Modules that stay Python between regions, and keep channels apart.

    backbone ─ maps ─► MultiScaleRoIAlign ─ pooled ─► box head

They cut and resize all channels of feature maps in the same way, by boxes that Python works out. So the
pooled channels go with those of the maps, although no graph holds the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: By file, so that torchvision need not be imported.
_POOLING = {
    ("torchvision.ops.poolers", "MultiScaleRoIAlign"),
    ("torchvision.ops.roi_align", "RoIAlign"),
    ("torchvision.ops.roi_pool", "RoIPool"),
}


@dataclass
class Carrier:
    """One call of a carrier: the maps that it read, their versions then, and its result."""

    path: str
    nth: int
    maps: list[Tensor]
    versions: list[int]
    pooled: Tensor | None = None


def is_carrier(module: nn.Module) -> bool:
    """Whether the module is one of these classes, not one derived from them."""
    return (type(module).__module__, type(module).__name__) in _POOLING


def maps_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the feature maps that a call reads."""
    maps = args[0] if args else next(iter(kwargs.values()))
    if isinstance(maps, Mapping):
        return [value for name, value in maps.items() if name in module.featmap_names]
    return [maps]


def carried_channels(pooled: Tensor, *maps: Tensor) -> Tensor:
    """Return ``pooled``, [boxes, channels, height, width], which was made of ``maps``, [images, channels, ...]."""
    return pooled
