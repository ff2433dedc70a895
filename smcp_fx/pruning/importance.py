"""Taylor importance of channels: how much the loss would change without them (SMCP eq. 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Layer
from smcp_fx.config import ImportanceRule
from smcp_fx.errors import TrainingError
from smcp_fx.passes.insert_kept_statistics import scored_mixes
from smcp_fx.passes.insert_soft_masks import masked_layers
from smcp_fx.pruning import ranks
from smcp_fx.pruning.state import PruningState

#: Elements of a product computed at a time on a CPU: they are summed before they leave its cache (512 KiB).
_CHUNK = 1 << 17


class TaylorImportance:
    """Importance of every free unit from the gradients of the dense weights.

    ``abs_of_sum``: |sum over the unit's slots in all its consumers of sum W * dL/dW|. ``sum_of_abs``: the
    sum over the consumers of each one's absolute value.

    A weight that is frozen, or computed from parameters, has no gradient; its mask takes a gradient instead,
    whose elements are the same sums. So do the masks of products and statistics over channels that no layer
    reads (the queries and keys of one head): sum x * dL/dx.
    """

    def __init__(self, channels: ChannelGraph, state: PruningState, rule: ImportanceRule) -> None:
        self.rule = rule
        self.layers = masked_layers(channels)
        self._mixes = scored_mixes(channels)
        self._free = [group for group in channels.groups if group.free]
        self._state = state
        places = [state.layer_places(layer) for layer in self.layers]
        places += [state.unread_places(mix) for mix in self._mixes]
        every = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
        layer_index = torch.cat([torch.full_like(p, i) for i, p in enumerate(places)]) if places else every
        count = state.keep.numel()
        used = (every >= 0).nonzero().flatten()
        pairs, pair = torch.unique(layer_index[used] * count + every[used], return_inverse=True)
        # Which slots count, the (layer, unit) pair of each, and the unit of each pair; on the gradients' device.
        self._indices = [used, pair, pairs % max(count, 1)]
        self._count = count

    def parameters(self, module: nn.Module) -> list[str]:
        """Return the names of the masked weights that are parameters, or of the parameters behind them."""
        return [la.source for la in self.layers if isinstance(la.tensor(module), nn.Parameter)]

    def require_layers(self) -> None:
        """Raise `TrainingError` if no channel can have an importance."""
        if self.layers or self._mixes:
            return
        unread = ", ".join(repr(group.name) for group in self._free[:4])
        if unread:
            raise TrainingError(
                f"no layer reads the channels that are free (of {unread}), which have no importance, so there is "
                "nothing to prune: take out the layers whose outputs the network does not use"
            )
        raise TrainingError(
            "no channel of this network is free, so there is nothing to prune; prepared.channels.groups says "
            "what pins each group"
        )

    @property
    def masks(self) -> list[Tensor]:
        """The masks of all layers, products and statistics that read free channels."""
        state = self._state
        return [*map(state.layer_mask, self.layers), *map(state.mix_mask, self._mixes)]

    def __call__(self, module: nn.Module, scale: float | Tensor = 1.0) -> Tensor:
        """Return importances [units], float32, of the gradients now in ``module``, divided by ``scale``.

        Nothing is read back from the device. Raises `TrainingError` when no weight has a gradient.
        """
        self.require_layers()
        weights = [layer.tensor(module) for layer in self.layers]
        signed = self._slots(weights)
        if signed is None:
            reading = [*(layer.path for layer in self.layers), *(mix.node for mix in self._mixes)]
            read = ", ".join(map(repr, reading[:3]))
            raise TrainingError(
                "no weight has a gradient: call prepared.pruner.step() after loss.backward() and before "
                f"optimizer.step() and zero_grad(), of a loss that depends on the masked layers ({read}, ...)"
            )
        if self._indices[0].device != signed.device:
            self._indices = [index.to(signed.device) for index in self._indices]
        used, pair, unit = self._indices
        slots = signed[used] / scale
        pairs = slots.new_zeros(unit.numel()).index_add(0, pair, slots)
        if self.rule == "sum_of_abs":
            pairs = pairs.abs()
        units = pairs.new_zeros(self._count).index_add(0, unit, pairs)
        return units.abs()

    def _slots(self, weights: list[Tensor]) -> Tensor | None:
        """Sum of W * dL/dW for each input slot of each layer, [all slots] float32; None without any gradient.

        The sums of x * dL/dx follow, for channels that only products and statistics read.
        """
        sums: dict[int, Tensor] = {}
        frozen: list[int] = []
        learning: list[int] = []
        switched = False
        for index, (layer, weight) in enumerate(zip(self.layers, weights, strict=True)):
            mask = self._state.layer_mask(layer)
            by_mask = layer.computed or not weight.requires_grad
            if mask.requires_grad is not by_mask:
                mask.requires_grad_(by_mask)  # counts from the next step on
                mask.grad = None  # drop an outdated gradient
                switched = True
            if by_mask:
                frozen.append(index)
            elif weight.grad is not None:
                learning.append(index)
        masks = [self._state.layer_mask(self.layers[i]) for i in frozen]
        others = [_others(self.layers[i], mask) for i, mask in zip(frozen, masks, strict=True)]
        masks += [self._state.mix_mask(mix) for mix in self._mixes]
        if not learning and not switched and all(mask.grad is None for mask in masks):
            return None
        pairs = [(_real(weights[i].detach()), _real(weights[i].grad)) for i in learning]
        keep = self._state.keep
        reduce: Callable[..., list[Tensor]] = _on_cpu if keep.device.type == "cpu" else _on_device
        sums.update(zip(learning, reduce(pairs, [self.layers[i] for i in learning]), strict=True))
        of_masks = _gathered_by(masks, others + [[]] * len(self._mixes))
        sums.update(zip(frozen, of_masks, strict=False))
        for index, layer in enumerate(self.layers):
            if index not in sums:
                sums[index] = torch.zeros(layer.in_labels.numel(), device=keep.device)
        of_weights = [sums[index].float() for index in range(len(self.layers))]
        return torch.cat([*of_weights, *of_masks[len(frozen) :]])


def _gathered_by(masks: list[Tensor], others: list[list[int]]) -> list[Tensor]:
    """Return the masks' gradients since the last step, summed over ``others``, flat, averaged over ranks."""
    if not masks:
        return []
    parts = []
    for mask, dims in zip(masks, others, strict=True):
        gradient = torch.zeros_like(mask) if mask.grad is None else mask.grad
        parts.append((gradient.sum(dims, dtype=_wide(gradient)) if dims else gradient).flatten().float())
        mask.grad = None
    # DistributedDataParallel does not average these gradients.
    together = ranks.mean_over_ranks(torch.cat(parts))
    return list(torch.split(together, [part.numel() for part in parts]))


def _real(tensor: Tensor | None) -> Tensor:
    """Return a complex tensor's two parts, which learn as two numbers; other tensors as they are."""
    assert tensor is not None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _others(layer: Layer, tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != layer.in_dim]


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type to add up in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _on_device(pairs: list[tuple[Tensor, Tensor]], layers: list[Layer]) -> list[Tensor]:
    """Compute all products at once; this briefly takes as much memory as the weights."""
    if not pairs:
        return []
    products = torch._foreach_mul([weight for weight, _ in pairs], [gradient for _, gradient in pairs])
    return [p.sum(_others(la, p), dtype=_wide(p)) for p, la in zip(products, layers, strict=True)]


def _on_cpu(pairs: list[tuple[Tensor, Tensor]], layers: list[Layer]) -> list[Tensor]:
    return [_by_rows(*pair, layer) for pair, layer in zip(pairs, layers, strict=True)]


def _by_rows(weight: Tensor, gradient: Tensor, layer: Layer) -> Tensor:
    """Multiply and sum a few output channels at a time, along memory."""
    rows, gradient_rows = _rows(weight), _rows(gradient)
    if layer.in_dim != 1 or rows is None or gradient_rows is None or weight.stride() != gradient.stride():
        return (weight * gradient).sum(_others(layer, weight), dtype=_wide(weight))
    outputs, length = rows.shape
    step = max(1, _CHUNK // max(length, 1))
    total = rows.new_zeros(length, dtype=_wide(rows))
    for start in range(0, outputs, step):
        stop = start + step
        total += (rows[start:stop] * gradient_rows[start:stop]).sum(0, dtype=total.dtype)
    inputs = weight.shape[1]
    return total.view(inputs, -1).sum(1) if weight.is_contiguous() else total.view(-1, inputs).sum(0)


def _rows(tensor: Tensor) -> Tensor | None:
    """Return the tensor as [outputs, everything else] in memory order; None if that takes a copy."""
    if tensor.is_contiguous():
        return tensor.flatten(1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).flatten(1)
    return None
