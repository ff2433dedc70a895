"""The state of a prepared model: the kept units, their importances, and the position in the schedule.

Flat vectors over the units of all free groups, in the groups' order, make a solve and a gathering step a few tensor
operations. The masks and scales that the graph reads are derived from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Layer, Mix
from smcp_fx.errors import InputError
from smcp_fx.passes.insert_batch_norm_scalers import norm_sources, scale_name, scaled_norms
from smcp_fx.passes.insert_kept_statistics import kept_name, masked_mixes, scored_mixes
from smcp_fx.passes.insert_soft_masks import mask_name, masked_layers

#: Buffers that keep their type when the model becomes half precision: sums over many steps, times.
_EXACT = ("gathered", "remembered", "losses", "correction", "full_cost", "as_of")


class Listener(Protocol):
    """Is notified by a state."""

    def loaded(self) -> None:
        """A state dict was loaded."""
        ...


class PruningState(nn.Module):
    """Masks, scales, importances and the position in the schedule, as buffers.

    ``keep`` [units] bool; ``trained`` [units] bool, the units kept in the last training step: the network
    that weights and statistics belong to; ``flipped`` [units] bool, units whose mask the last solve changed;
    ``gathered`` and ``remembered`` [units] float32, importances since the last solve and before it;
    ``losses`` float64, the `rises`, -1 if not known; ``steps``, ``gathers`` (steps since the last solve) and
    ``solves`` int64 scalars; ``correction`` float64, see `Pruner.correction`; ``full_cost`` and ``as_of``
    float64, the unpruned cost and the state of measured prices (`CostSource`), 0 if not measured. The state
    dict leaves out masks (``mask_*`` of weights, ``kept_*`` of statistics and products that mix channels),
    scales (``scale_*``) and ``skipped`` (steps since the last solve whose gradients were not finite). Masks
    of weights have the type, device and memory format of the layers in ``module``.
    """

    keep: Tensor
    trained: Tensor
    flipped: Tensor
    gathered: Tensor
    remembered: Tensor
    losses: Tensor
    steps: Tensor
    gathers: Tensor
    solves: Tensor
    correction: Tensor
    full_cost: Tensor
    as_of: Tensor
    skipped: Tensor

    def __init__(self, channels: ChannelGraph, module: nn.Module | None = None) -> None:
        super().__init__()
        self._channels = channels
        self._free = [group for group in channels.groups if group.free]
        count = sum(group.size for group in self._free)
        self.loads = 0  # counts loaded state dicts: values read before are outdated
        self.listener: weakref.ref[Listener] | None = None
        self._derived = -1  # the version of ``keep`` that masks and scales were derived from
        self.register_buffer("keep", torch.ones(count, dtype=torch.bool))
        self.register_buffer("trained", torch.ones(count, dtype=torch.bool))
        self.register_buffer("flipped", torch.zeros(count, dtype=torch.bool))
        self.register_buffer("gathered", torch.zeros(count))
        self.register_buffer("remembered", torch.zeros(count))
        self.register_buffer("losses", torch.full((count + len(self._free),), -1.0, dtype=torch.float64))
        for name in ("steps", "gathers", "solves"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("correction", torch.ones((), dtype=torch.float64))
        for name in ("full_cost", "as_of"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64), persistent=False)
        # place[unit]: a unit's index in the flat vectors, -1 for pinned ones
        self._place = torch.full((channels.free_units.numel(),), -1, dtype=torch.int64)
        self._slices: dict[str, slice] = {}
        start = 0
        for group in self._free:
            self._place[group.units] = torch.arange(start, start + group.size)
            self._slices[group.name] = slice(start, start + group.size)
            start += group.size
        self._masked: list[tuple[str, Tensor, list[int]]] = []
        for layer in masked_layers(channels):
            places = self.places(layer.in_labels)
            line = [1] * len(layer.weight_shape)
            line[layer.in_dim] = places.numel()
            self._masked.append((mask_name(layer), places, line))
            weight = None if module is None else layer.tensor(module)
            self.register_buffer(mask_name(layer), _ones(layer, line, weight), persistent=False)
        scored = [kept_name(mix) for mix in scored_mixes(channels)]
        for mix in masked_mixes(channels):
            name, shape = kept_name(mix), [*mix.labels.shape]
            self._masked.append((name, self.places(mix.labels.flatten()), shape))
            self.register_buffer(name, torch.ones(shape, requires_grad=name in scored), persistent=False)
        self._scaled = []
        for norm in scaled_norms(channels):
            layers, source = norm_sources(channels, norm)
            self._scaled.append((scale_name(norm), [self.places(la.in_labels) for la in layers], source))
            self.register_buffer(scale_name(norm), torch.ones(source.numel()), persistent=False)

    def forward(self, x: Any) -> Any:
        """Do nothing: an `nn.Sequential` that runs its parts from Python calls this, too."""
        return x

    def places(self, labels: Tensor) -> Tensor:
        """Return the places of 1-D labels' units in the flat vectors; -1 for units that always stay."""
        units = self._channels.units.of(labels)
        return torch.where(units >= 0, self._place[units.clamp(min=0)], torch.full_like(units, -1))

    def layer_places(self, layer: Layer) -> Tensor:
        """Return the `places` of a layer's input slots."""
        return self.places(layer.in_labels)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Return copies of every group's mask, [size] bool, by name; all true for pinned groups."""
        return {
            group.name: self.keep[self._slices[group.name]].clone()
            if group.free
            else torch.ones(group.size, dtype=torch.bool, device=self.keep.device)
            for group in self._channels.groups
        }

    @property
    def limited(self) -> dict[str, tuple[int, ...]]:
        """The counts that limits on widths allow, by free group; only those of groups that have limits."""
        return {group.name: group.limited for group in self._free if group.limits}

    def free_masks(self) -> dict[str, Tensor]:
        """Return the masks of the free groups by name, as views of ``keep``."""
        return {name: self.keep[part] for name, part in self._slices.items()}

    def of_group(self, vector: Tensor, name: str) -> Tensor:
        """Return the part of a flat vector that belongs to a free group."""
        return vector[self._slices[name]]

    @property
    def rises(self) -> dict[str, NDArray[np.float64]] | None:
        """By free group, the rise of the loss by number of units kept, [size + 1]; None if not known."""
        if not self._free or float(self.losses[0]) < 0:
            return None
        ends = np.cumsum([group.size + 1 for group in self._free])
        parts = np.split(self.losses.cpu().numpy().copy(), ends[:-1])
        return {group.name: part for group, part in zip(self._free, parts, strict=True)}

    @rises.setter
    def rises(self, rises: Mapping[str, NDArray[np.float64]] | None) -> None:
        if rises is None:
            self.losses.fill_(-1.0)
        else:
            flat = np.concatenate([rises[group.name] for group in self._free])
            self.losses.copy_(torch.from_numpy(flat))

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Set groups' masks ([size] bool), or raise `InputError` and change nothing.

        At least one unit is kept, unless a group may keep nothing (layer pruning).
        """
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
            if not bool(mask.any()) and 0 not in group.permitted:
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

    @torch.no_grad()
    def gather(self, units: Tensor, finite: Tensor, momentum: float) -> None:
        """Add one step's importances [units] to the running average, if they are ``finite`` (a bool scalar).

        Nothing is read back from the device.
        """
        taken = self.gathered.mul(momentum).add_(units, alpha=1 - momentum)
        self.gathered.copy_(torch.where(finite, taken, self.gathered))
        self.steps.add_(finite)
        self.gathers.add_(finite)
        self.skipped.add_(~finite)

    def forget(self) -> None:
        """Restart the average, after a solve."""
        for tensor in (self.gathered, self.gathers, self.skipped):
            tensor.zero_()

    def layer_mask(self, layer: Layer) -> Tensor:
        """Return the mask that multiplies a layer's weight: ones and zeros that broadcast against it."""
        mask = getattr(self, mask_name(layer))
        assert isinstance(mask, Tensor)
        return mask

    def mix_mask(self, mix: Mix) -> Tensor:
        """Return the mask that multiplies the input of a statistic or product."""
        mask = getattr(self, kept_name(mix))
        assert isinstance(mask, Tensor)
        return mask

    def unread_places(self, mix: Mix) -> Tensor:
        """Return the `places` of a statistic's or product's input; -1 also for units that layers read."""
        units = self._channels.units.of(mix.labels.flatten())
        read = (units < 0) | self._channels.read[units.clamp(min=0)]
        return torch.where(read, -1, self.places(mix.labels.flatten()))

    @property
    def scales(self) -> dict[str, Tensor]:
        """Return the batch norms' scales [channels], by the norms' nodes."""
        return {name.removeprefix("scale_"): getattr(self, name) for name, _, _ in self._scaled}

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive masks and scales from ``keep`` after it has changed."""
        padded = torch.cat([self.keep, self.keep.new_ones(1)])  # place -1 reads the last: always kept
        for name, places, line in self._masked:
            getattr(self, name).copy_(padded[places.to(padded.device)].reshape(line))
        padded = torch.cat([self.of_use(), self.keep.new_ones(1)])
        for name, inputs, source in self._scaled:
            buffer = getattr(self, name)
            shares = [padded[places.to(padded.device)].to(buffer.dtype).mean() for places in inputs]
            table = torch.stack([*shares, torch.ones_like(buffer[0])])  # source -1 reads the last: scale 1
            buffer.copy_(table[source.to(buffer.device)])
        self._derived = _version(self.keep)

    def of_use(self) -> Tensor:
        """Return ``keep`` without groups that would hold only constants once empty groups are gone.

        In training, a batch norm behind them maps a constant differently than afterwards, unless it is scaled by 0.
        (Solves never choose such masks; masks set by hand may.)
        """
        branches = self._channels.branches
        if branches is None:
            return self.keep
        counts = {name: int(self.keep[part].any()) for name, part in self._slices.items()}
        keep = self.keep.clone()
        for name, count in branches.closed(counts).items():
            if count < counts[name]:
                keep[self._slices[name]] = False
        return keep

    def train(self, mode: bool = True) -> PruningState:
        """Set the mode, and update the masks if other code wrote to ``keep`` (averages of models, say)."""
        if _version(self.keep) != self._derived:
            self.refresh()
        return super().train(mode)

    def units_kept(self, keep: Tensor | None = None) -> Tensor:
        """Return a bool for every unit of the channel graph, on the CPU, as `SliceChannels` takes it.

        ``keep`` [units]: replaces the present one.
        """
        padded = torch.cat([(self.keep if keep is None else keep).cpu(), torch.ones(1, dtype=torch.bool)])
        return padded[self._place]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        missing = [name for name in self.state_dict() if prefix + name not in state_dict]
        if missing and f"{prefix}keep" in state_dict:  # from an older version: the rest is fresh
            fresh = PruningState(self._channels).state_dict()
            state_dict.update({prefix + name: fresh[name] for name in missing})
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.loads += 1
        self.skipped.zero_()
        self.refresh()
        if self.listener is not None and (listener := self.listener()) is not None:
            listener.loaded()

    def _apply(self, fn: Any, recurse: bool = True) -> PruningState:
        exact = {name: getattr(self, name) for name in _EXACT}
        learning = [name for name, _, _ in self._masked if getattr(self, name).requires_grad]
        with torch.no_grad():  # masks that take gradients stay leaves
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in learning:
            getattr(self, name).requires_grad_()
        for name, before in exact.items():
            setattr(self, name, before.to(getattr(self, name).device))
        self.refresh()  # scales that went through half precision become exact again
        return self


def _version(tensor: Tensor) -> int:
    """Return how often the tensor was written to; 0 if that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _ones(layer: Layer, line: list[int], weight: Tensor | None) -> Tensor:
    """Return a mask that keeps everything.

    If the input channels are not a weight's first dimension, the mask has its kernel dimensions, too: rows of weight
    and mask are then contiguous, and their product is several times faster on a CPU.
    """
    shape = [*line[: layer.in_dim + 1], *layer.weight_shape[layer.in_dim + 1 :]] if layer.in_dim else line
    if weight is None:
        return torch.ones(shape)
    mask = torch.ones(shape, dtype=weight.dtype.to_real(), device=weight.device)
    if layer.computed:
        return mask.requires_grad_(True)
    channels_last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not weight.is_contiguous():
        mask = mask.to(memory_format=torch.channels_last)
    return mask.requires_grad_(not weight.requires_grad)  # see `TaylorImportance`
