"""What the method is compared with, beyond its own options: four other ways to a network of the same cost.

- a uniformly narrower network, trained from scratch;
- one-shot magnitude pruning: the filters of the smallest L1 norm go, the same share everywhere, then fine-tuning;
- a permanently masking, greedy pruner of output channels, of the kind that SMCP's paper describes HALP as: grouped
  channels, first-order Taylor importance of the batch norms, the importance lost held against the cost saved;
- the Taylor pruner of Torch-Pruning (`pip install torch-pruning==1.6.1`), gradually, as fast as the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

import torch
from accuracy_task import WIDTHS, Task
from torch import Tensor, nn

import smcp_fx
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.prepare import PreparedModel

#: How often Torch-Pruning prunes on the way to its target, and the batches that its gradients are summed over.
_EVENTS, _GRADIENT_BATCHES = 5, 8


def uniform_counts(cost: NetworkCost, sizes: Mapping[str, int], target: float) -> dict[str, int]:
    """The same share of every group, as large as ``target`` lets it be; whole channels, at least one."""
    for percent in range(1000, 0, -1):
        counts = {name: max(1, round(size * percent / 1000)) for name, size in sizes.items()}
        if cost.cost(counts) <= target:
            return counts
    raise InfeasibleBudgetError(
        "even one channel a group costs too much; raise the target", smallest=cost.cost(counts), budget=target
    )


def stage_widths(channels: ChannelGraph, counts: Mapping[str, int]) -> tuple[int, ...]:
    """What the stages' outputs keep, to build a `SmallResNet` of."""
    ends = [f"blocks.{stage}.conv2" for stage in range(len(WIDTHS))]
    return tuple(counts[group.name] for end in ends for group in channels.groups if end in group.producers)


def magnitude_masks(prepared: PreparedModel, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Masks that keep each group's units of the largest L1 norm, summed over the filters that write them."""
    state, norms = prepared.smcp, torch.zeros_like(prepared.smcp.gathered)
    for layer in prepared.channels.layers:
        weight = prepared.get_parameter(layer.weight).detach().movedim(layer.out_dim, 0)
        _add(norms, state.places(layer.output_channels), weight.abs().flatten(1).sum(1))
    return {name: _largest(state.of_group(norms, name), count) for name, count in counts.items()}


class GreedyPruner:
    """Masks output channels for good, the least important for what they cost first.

    ``step()`` after every backward pass gathers the importances of the units, |gamma g_gamma + beta g_beta| summed
    over the batch norms that write them, with momentum; ``prune(target)`` narrows groups from one permitted count
    to the next below until the cost is within ``target``.
    """

    def __init__(self, prepared: PreparedModel, cost: NetworkCost, momentum: float = 0.9) -> None:
        self.prepared = prepared
        self.cost = cost
        self.momentum = momentum
        self.importance = torch.zeros_like(prepared.smcp.gathered)
        self.masks = {name: mask for name, mask in prepared.masks.items() if name in cost.permitted}

    @property
    def counts(self) -> dict[str, int]:
        """Units kept, by group."""
        return {name: int(mask.sum()) for name, mask in self.masks.items()}

    def step(self) -> None:
        """Gather importances from the gradients."""
        fresh = torch.zeros_like(self.importance)
        for norm in self.prepared.channels.norms:
            gamma = self.prepared.get_parameter(f"{norm.path}.weight")
            beta = self.prepared.get_parameter(f"{norm.path}.bias")
            assert gamma.grad is not None and beta.grad is not None
            taylor = (gamma * gamma.grad + beta * beta.grad).detach().abs()
            _add(fresh, self.prepared.smcp.places(norm.labels), taylor)
        self.importance.mul_(self.momentum).add_(fresh, alpha=1 - self.momentum)

    def prune(self, target: float) -> None:
        """Mask until the cost is at most ``target``, and forget the importances."""
        scores = {name: self.prepared.smcp.of_group(self.importance, name) for name in self.masks}
        kept = {name: scores[name][mask].sort(descending=True).values for name, mask in self.masks.items()}
        counts = greedy_counts(kept, self.cost, target)
        for name, count in counts.items():
            among_kept = torch.where(self.masks[name], scores[name], torch.full_like(scores[name], -1.0))
            self.masks[name] = _largest(among_kept, count)
        self.prepared.set_masks(self.masks)
        self.importance.zero_()


def greedy_counts(kept: Mapping[str, Tensor], cost: NetworkCost, target: float) -> dict[str, int]:
    """Counts within ``target``, narrowed one permitted count at a time where least is lost for the cost saved.

    ``kept``: by group the importances of the units that are still there, [units], descending.
    """
    counts = {name: values.numel() for name, values in kept.items()}
    present = cost.cost(counts)
    while present > target:
        best: tuple[float, str, int, float] | None = None
        for name, values in kept.items():
            below = [count for count in cost.permitted[name] if count < counts[name]]
            if not below:
                continue
            lost = float(values[below[-1] : counts[name]].sum())
            then = cost.cost({**counts, name: below[-1]})
            ratio = lost / max(present - then, 1e-12 * present)
            if best is None or ratio < best[0]:
                best = ratio, name, below[-1], then
        if best is None:
            raise InfeasibleBudgetError(
                "no group can be narrowed any further; raise the target", smallest=present, budget=target
            )
        _, name, counts[name], present = best
    return counts


class TorchPruningTaylor:
    """Torch-Pruning's global pruner with its group Taylor importance, towards FLOPs.

    It prunes ``_EVENTS`` times during the ramp, each time to the target of the moment. Raises `ModuleNotFoundError`
    where Torch-Pruning is not installed.
    """

    def __init__(
        self, model: nn.Module, task: Task, schedule: smcp_fx.Schedule, target: float, seed: int
    ) -> None:
        self.library: ModuleType = importlib.import_module("torch_pruning")
        self.model, self.task, self.schedule, self.target = model, task, schedule, target
        self.pruner = self.library.pruner.BasePruner(
            model,
            task.example[:1],
            importance=self.library.importance.GroupTaylorImportance(),
            global_pruning=True,
            pruning_ratio=0.98,
            max_pruning_ratio=0.98,
            iterative_steps=400,
            ignored_layers=[model.get_submodule("head")],
        )
        self.full = self._flops()
        ramp = schedule.ramp_end - schedule.first_step
        self.events = {schedule.first_step + round(ramp * (i + 1) / _EVENTS) for i in range(_EVENTS)}
        self.batches = task.batches(_GRADIENT_BATCHES, seed=seed)

    def before_step(self, step: int) -> bool:
        """Prune if it is time to; tells whether it has."""
        if step not in self.events:
            return False
        self.model.zero_grad()
        for batch in self.batches:
            self.task.loss(self.model, batch).backward()
        wanted = self.schedule.target(step, self.full, self.target * self.full)
        while self._flops() > wanted:
            self.pruner.step()
        self.model.zero_grad()
        return True

    def _flops(self) -> float:
        return float(self.library.utils.count_ops_and_params(self.model, self.task.example[:1])[0])


def _add(totals: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values to the units that they belong to; those of pinned units (place -1) are left out."""
    free = places >= 0
    totals.index_add_(0, places[free], values[free].to(totals.dtype))


def _largest(scores: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` largest scores, [units] bool."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[torch.sort(scores, descending=True, stable=True).indices[:count]] = True
    return mask
