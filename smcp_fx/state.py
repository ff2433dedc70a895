"""The state of a prepared model: which units are kept, and what is gathered about them.

One flat vector over the units of all free groups, in the groups' order, so that a solve and a gathering step
are a handful of tensor operations. Masks and scales that the graph reads are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.propagation import Layer
from smcp_fx.errors import InputError
from smcp_fx.passes.insert_batch_norm_scalers import norm_sources, scale_name, scaled_norms
from smcp_fx.passes.insert_soft_masks import mask_name, masked_layers


class PruningState(nn.Module):
    """Masks, scales, importances and the schedule's place, as buffers.

    ``keep`` [units] bool; ``gathered`` and ``remembered`` [units] float32, importances since the last solve
    and before it; ``steps`` and ``gathers`` int64 scalars. Masks (``mask_*``) and scales (``scale_*``) are
    derived, and not part of the state dict.
    """

    keep: Tensor
    gathered: Tensor
    remembered: Tensor
    steps: Tensor
    gathers: Tensor
    solves: Tensor

    def __init__(self, channels: ChannelGraph) -> None:
        super().__init__()
        self._channels = channels
        self._free = [group for group in channels.groups if group.free]
        count = sum(group.size for group in self._free)
        self.register_buffer("keep", torch.ones(count, dtype=torch.bool))
        self.register_buffer("gathered", torch.zeros(count))
        self.register_buffer("remembered", torch.zeros(count))
        for name in ("steps", "gathers", "solves"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        # place[unit]: where a unit stands in the flat vectors, -1 for pinned ones
        self._place = torch.full((channels.free_units.numel(),), -1, dtype=torch.int64)
        self._slices: dict[str, slice] = {}
        start = 0
        for group in self._free:
            self._place[group.units] = torch.arange(start, start + group.size)
            self._slices[group.name] = slice(start, start + group.size)
            start += group.size
        self._masked = [
            (mask_name(layer), self.places(layer.in_labels), layer.in_dim, len(layer.weight_shape))
            for layer in masked_layers(channels)
        ]
        for name, places, dim, rank in self._masked:
            shape = [1] * rank
            shape[dim] = places.numel()
            self.register_buffer(name, torch.ones(shape, dtype=torch.bool), persistent=False)
        self._scaled = []
        for norm in scaled_norms(channels):
            layers, source = norm_sources(channels, norm)
            self._scaled.append((scale_name(norm), [self.places(la.in_labels) for la in layers], source))
            self.register_buffer(scale_name(norm), torch.ones(source.numel()), persistent=False)

    def places(self, labels: Tensor) -> Tensor:
        """Where the units of 1-D labels stand in the flat vectors; -1 for what always stays."""
        units = self._channels.units.of(labels)
        return torch.where(units >= 0, self._place[units.clamp(min=0)], torch.full_like(units, -1))

    def layer_places(self, layer: Layer) -> Tensor:
        """`places` of a layer's input slots."""
        return self.places(layer.in_labels)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Copies of every group's mask, [size] bool, by name; pinned groups are all true."""
        return {
            group.name: self.keep[self._slices[group.name]].clone()
            if group.free
            else torch.ones(group.size, dtype=torch.bool, device=self.keep.device)
            for group in self._channels.groups
        }

    def free_masks(self) -> dict[str, Tensor]:
        """The masks of the free groups by name, as views of ``keep``."""
        return {name: self.keep[part] for name, part in self._slices.items()}

    def of_group(self, vector: Tensor, name: str) -> Tensor:
        """The part of a flat vector that belongs to a free group."""
        return vector[self._slices[name]]

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Set groups' masks ([size], bool, at least one true); raises `InputError`, then nothing is changed."""
        if not isinstance(masks, Mapping):
            raise InputError(f"masks must map group names to bool tensors, not be a {type(masks).__name__}")
        keep = self.keep.clone()
        for name, mask in masks.items():
            group = self._channels[name]
            if not isinstance(mask, Tensor):
                raise InputError(
                    f"the mask of group {name!r} must be a bool tensor, not {type(mask).__name__}"
                )
            mask = mask.to(keep.device)
            if mask.dtype != torch.bool or mask.shape != (group.size,):
                raise InputError(
                    f"the mask of group {name!r} must be bool of shape ({group.size},), "
                    f"not {mask.dtype} of shape {tuple(mask.shape)}"
                )
            if not bool(mask.any()):
                raise InputError(
                    f"the mask of group {name!r} keeps nothing; keep at least one of {group.size} units"
                )
            if not group.free:
                if not bool(mask.all()):
                    raise InputError(f"group {name!r} must stay whole: {'; '.join(group.pinned)}")
                continue
            keep[self._slices[name]] = mask
        self.keep.copy_(keep)
        self.refresh()

    def refresh(self) -> None:
        """Derive masks and scales from ``keep`` (after it changed)."""
        padded = torch.cat([self.keep, self.keep.new_ones(1)])  # place -1 reads the last: always kept
        for name, places, _, _ in self._masked:
            buffer = getattr(self, name)
            buffer.copy_(padded[places.to(padded.device)].reshape(buffer.shape))
        for name, inputs, source in self._scaled:
            buffer = getattr(self, name)
            shares = [padded[places.to(padded.device)].to(buffer.dtype).mean() for places in inputs]
            table = torch.stack([*shares, torch.ones_like(buffer[0])])  # source -1 reads the last: scale 1
            buffer.copy_(table[source.to(buffer.device)])

    def units_kept(self) -> Tensor:
        """A bool for every unit of the channel graph, on the CPU, as `SliceChannels` takes it."""
        padded = torch.cat([self.keep.cpu(), torch.ones(1, dtype=torch.bool)])
        return padded[self._place]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> PruningState:
        # Importances are sums over many steps: they stay in float32 when the model goes to half precision.
        exact = {name: getattr(self, name) for name in ("gathered", "remembered")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in exact.items():
            setattr(self, name, before.to(getattr(self, name).device))
        return self
