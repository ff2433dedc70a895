"""Methods that reduce a network's FLOPs without training: ours, parts of it, and rivals.

Rivals take whole channels; ours keeps multiples of eight. All see the same images. A method takes a `Setting` and a
target, and returns the network and the share of the FLOPs that it has.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from pretrained.command import UnavailableError
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InfeasibleBudgetError

_BATCH = 64
#: Steps of Torch-Pruning on its way to an empty network, stopped at the target; and how often gradients are renewed.
_STEPS, _EVENTS = 200, 5


class Setting:
    """A trained network and calibration images, and what is gathered from them once for all targets."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor | None, seed: int) -> None:
        self.model, self.seed = model, seed
        self.images = list(images.split(_BATCH))
        self.batches = (
            self.images if labels is None else list(zip(self.images, labels.split(_BATCH), strict=True))
        )

    @cached_property
    def ours(self) -> smcp_fx.PreparedModel:
        """Prepared, with importances gathered."""
        torch.manual_seed(self.seed)
        prepared = smcp_fx.prepare(self.model, self.images[0][:2], target=0.5)
        smcp_fx.gather_importance(prepared, self.batches)
        return prepared

    @cached_property
    def free(self) -> smcp_fx.PreparedModel:
        """Prepared, with any number of channels permitted."""
        return smcp_fx.prepare(self.model, self.images[0][:2], config=smcp_fx.PruningConfig(multiple=1))


Found = tuple[nn.Module, float]


def ours(setting: Setting, target: float) -> Found:
    """What `smcp_fx.compress` does."""
    return _finished(setting, _solved(setting, target), repair=True)


def without_repair(setting: Setting, target: float) -> Found:
    """The same channels, with batch norms re-estimated only."""
    return _finished(setting, _solved(setting, target), repair=False)


def uniform_l2(setting: Setting, target: float) -> Found:
    """The same share of every group, the filters of the largest L2 norm; batch norms re-estimated."""
    return _finished(setting, _uniform(setting, target, _norms(setting.free)), repair=False)


def uniform_l2_repaired(setting: Setting, target: float) -> Found:
    """The same with our repair."""
    return _finished(setting, _uniform(setting, target, _norms(setting.free)), repair=True)


def random(setting: Setting, target: float) -> Found:
    """The same share of every group, at random; batch norms re-estimated."""
    return _finished(setting, _uniform(setting, target, _noise(setting)), repair=False)


def random_repaired(setting: Setting, target: float) -> Found:
    """The same with our repair."""
    return _finished(setting, _uniform(setting, target, _noise(setting)), repair=True)


def torch_pruning(setting: Setting, target: float) -> Found:
    """Torch-Pruning's global pruner with group Taylor importance over all the images; batch norms re-estimated."""
    try:
        library = importlib.import_module("torch_pruning")
    except ModuleNotFoundError as error:
        raise UnavailableError("pip install torch-pruning==1.6.1") from error
    model, example = copy.deepcopy(setting.model).eval(), setting.images[0][:2]
    pruner = library.pruner.BasePruner(
        model, example, importance=library.importance.GroupTaylorImportance(), global_pruning=True,
        pruning_ratio=0.98, max_pruning_ratio=0.98, iterative_steps=_STEPS,
        ignored_layers=[model.get_submodule("head")],
    )  # fmt: skip
    full = library.utils.count_ops_and_params(model, example)[0]
    for event in range(1, _EVENTS + 1):
        model.zero_grad()
        for images, labels in setting.batches:
            F.cross_entropy(model(images), labels).backward()
        wanted = 1 - (1 - target) * event / _EVENTS
        while library.utils.count_ops_and_params(model, example)[0] > wanted * full:
            pruner.step()
    model.zero_grad()
    smcp_fx.recalibrate(model, setting.images)
    return model, library.utils.count_ops_and_params(model, example)[0] / full


METHODS: dict[str, Callable[[Setting, float], Found]] = {
    "ours": ours,
    "ours without repair": without_repair,
    "Torch-Pruning": torch_pruning,
    "uniform L2": uniform_l2,
    "random": random,
    "uniform L2, our repair": uniform_l2_repaired,
    "random, our repair": random_repaired,
}


def _solved(setting: Setting, target: float) -> smcp_fx.PreparedModel:
    prepared = copy.deepcopy(setting.ours)  # a solve remembers the one before
    prepared.pruner.solve(target)
    return prepared


def _finished(setting: Setting, prepared: smcp_fx.PreparedModel, repair: bool) -> Found:
    smaller = smcp_fx.convert(prepared, check=False).eval()
    if repair:
        smcp_fx.repair(smaller, prepared, setting.images)
    else:
        smcp_fx.recalibrate(smaller, setting.images)
    return smaller, prepared.pruner.present_cost / prepared.pruner.full_cost


def _uniform(setting: Setting, target: float, scores: Tensor) -> smcp_fx.PreparedModel:
    """Masks of the same share of every group, as large as the target lets it be; whole channels, at least one."""
    prepared, cost = setting.free, setting.free.pruner.cost
    for permille in range(1000, 0, -1):
        counts = {name: max(1, round(size * permille / 1000)) for name, size in cost.full_counts.items()}
        if cost.cost(counts) <= target * prepared.pruner.full_cost:
            break
    else:
        raise InfeasibleBudgetError("even a channel a group costs too much", smallest=0.0, budget=target)
    masks = {}
    for name, count in counts.items():
        mine = prepared.smcp.of_group(scores, name)
        masks[name] = torch.zeros(mine.numel(), dtype=torch.bool)
        masks[name][mine.sort(descending=True, stable=True).indices[:count]] = True
    prepared.set_masks(masks)
    return prepared


def _norms(prepared: smcp_fx.PreparedModel) -> Tensor:
    """For each unit, the L2 norm of the filters that write it."""
    squares = torch.zeros_like(prepared.smcp.gathered)
    for layer in prepared.channels.layers:
        weight = prepared.get_parameter(layer.weight).detach().movedim(layer.out_dim, 0)
        places = prepared.smcp.places(layer.output_channels)
        free = places >= 0
        squares.index_add_(0, places[free], weight.square().flatten(1).sum(1)[free])
    return squares.sqrt()


def _noise(setting: Setting) -> Tensor:
    generator = torch.Generator().manual_seed(setting.seed)
    return torch.rand(setting.free.smcp.gathered.shape, generator=generator)
