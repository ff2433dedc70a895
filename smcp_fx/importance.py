"""Taylor importance of channels: how much the loss would change without them (SMCP eq. 3)."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import ImportanceRule
from smcp_fx.errors import TrainingError
from smcp_fx.passes.insert_soft_masks import masked_layers
from smcp_fx.state import PruningState


class TaylorImportance:
    """Importance of every free unit from the gradients of the dense weights.

    ``abs_of_sum``: |sum over the unit's slots in all its consumers of sum W * dL/dW|. ``sum_of_abs``: the
    sum over the consumers of each one's absolute value.
    """

    def __init__(self, channels: ChannelGraph, state: PruningState, rule: ImportanceRule) -> None:
        self.rule = rule
        self.layers = masked_layers(channels)
        places = [state.layer_places(layer) for layer in self.layers]
        every = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
        layer_index = torch.cat([torch.full_like(p, i) for i, p in enumerate(places)]) if places else every
        self._used = every >= 0
        count = state.keep.numel()
        pairs, self._pair = torch.unique(
            layer_index[self._used] * count + every[self._used], return_inverse=True
        )
        self._unit_of_pair = pairs % max(count, 1)
        self._count = count

    def __call__(self, module: fx.GraphModule, scale: float = 1.0) -> Tensor:
        """Return importances [units], float32, of the gradients now in ``module``, divided by ``scale``.

        Raises `TrainingError` when no weight has a gradient.
        """
        if not self.layers:
            raise TrainingError(
                "no channel of this network is free, so there is nothing to prune; prepared.channels.groups says "
                "what pins each group"
            )
        sums = []
        missing = 0
        for layer in self.layers:
            weight = module.get_parameter(layer.weight)
            dims = [dim for dim in range(weight.dim()) if dim != layer.in_dim]
            if weight.grad is None:
                missing += 1
                sums.append(weight.new_zeros(weight.shape[layer.in_dim]).float())
            else:
                sums.append((weight.detach() * weight.grad).sum(dims).float())
        if missing == len(self.layers):
            raise TrainingError(
                "no weight has a gradient: call prepared.pruner.step() after loss.backward() and before "
                "optimizer.step() and zero_grad()"
            )
        device = sums[0].device
        slots = torch.cat(sums)[self._used.to(device)] / scale
        pairs = slots.new_zeros(self._unit_of_pair.numel()).index_add(0, self._pair.to(device), slots)
        if self.rule == "sum_of_abs":
            pairs = pairs.abs()
        units = pairs.new_zeros(self._count).index_add(0, self._unit_of_pair.to(device), pairs)
        return units.abs()
