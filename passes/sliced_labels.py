"""Label tensors without the removed channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.labels import compact, line_along, narrow_uniform, varied_dims
from smcp_fx.errors import PassError


class Sliced:
    """Slices label tensors to the units where ``keep`` is true."""

    def __init__(self, channels: ChannelGraph, keep: Tensor) -> None:
        self.channels = channels
        self.keep = keep
        # By the id of the labels; the entry holds the labels, so that no other tensor gets that id.
        self._cuts: dict[int, tuple[Tensor, tuple[int, Tensor] | None]] = {}

    def kept(self, labels: Tensor) -> Tensor:
        """A bool for each element: does it stay?"""
        units = self.channels.units.of(narrow_uniform(labels))
        return ((units < 0) | self.keep[units.clamp(min=0)]).expand(labels.shape)

    def positions(self, labels: Tensor) -> Tensor:
        """Positions of the kept elements in 1-D labels."""
        return self.kept(labels).nonzero().flatten()

    def of_parts(self, parts: Sequence[Tensor | int]) -> Tensor:
        """Kept positions along a dimension with these factors, which are in memory order."""
        kept = torch.ones(1, dtype=torch.bool)
        for part in parts:
            own = self.kept(part) if isinstance(part, Tensor) else torch.ones(part, dtype=torch.bool)
            kept = (kept[:, None] & own).flatten()
        return kept.nonzero().flatten()

    def axis(self, labels: Tensor) -> tuple[int, Tensor] | None:
        """The dimension that loses channels, and the kept positions there; None if all stay."""
        if id(labels) not in self._cuts:
            self._cuts[id(labels)] = labels, self._cut(labels)
        return self._cuts[id(labels)][1]

    def _cut(self, labels: Tensor) -> tuple[int, Tensor] | None:
        kept = compact(self.kept(labels))
        if bool(kept.all()):
            return None
        dims = varied_dims(kept) if bool(kept.any()) else varied_dims(self.channels.units.of(labels))
        if len(dims) != 1:
            raise PassError(f"a tensor of shape {tuple(labels.shape)} would become ragged")
        return dims[0], line_along(kept, dims[0]).nonzero().flatten()

    def slice(self, labels: Tensor) -> Tensor:
        """The labels that stay."""
        cut = self.axis(labels)
        return labels if cut is None else compact(labels.index_select(*cut))


def size_of(part: Tensor | int) -> int:
    """The size of a factor: labels of channels, or a number."""
    return part.numel() if isinstance(part, Tensor) else part
