"""Rivals from other libraries: Torch-Pruning and torch-kirigami, along one path from the whole network downwards.

Both go by first-order importances over all calibration images, the gradients taken anew at some shares of the FLOPs.
A path is kept as a network for every share that it passed, so that all targets are cut from one.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretrained.command import UnavailableError

#: A network, and its share of the dense FLOPs.
Step = tuple[nn.Module, float]
#: Where gradients are taken anew; and the end of a path.
_EVENTS, _END = (1.0, 0.7, 0.45, 0.25, 0.12), 0.04
#: Steps of Torch-Pruning on its way to an empty network; steps of torch-kirigami to the end of its own.
_STEPS, _ROUNDS = 200, 40


def flops(model: nn.Module, example: Tensor) -> int:
    """Count the floating point operations of the model's convolutions and matrix products."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(example)
    return counter.get_total_flops()


def torch_pruning(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], multiple: int, isomorphic: bool
) -> Iterator[Step]:
    """Torch-Pruning's global pruner with group Taylor importance; ``isomorphic``: it compares like groups only."""
    library = _library("torch_pruning", "pip install torch-pruning==1.6.1 --no-deps")
    model, example = copy.deepcopy(model).eval(), batches[0][0][:2]
    pruner = library.pruner.BasePruner(
        model, example, importance=library.importance.GroupTaylorImportance(), global_pruning=True,
        pruning_ratio=0.98, max_pruning_ratio=0.98, iterative_steps=_STEPS, isomorphic=isomorphic,
        round_to=multiple if multiple > 1 else None, ignored_layers=[model.get_submodule("head")],
    )  # fmt: skip
    yield from _path(model, batches, pruner.step, _STEPS)


def kirigami(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], multiple: int) -> Iterator[Step]:
    """torch-kirigami's greedy pruner with Taylor importance, by a falling number of parameters."""
    library = _library("torch_kirigami", "pip install torch-kirigami --no-deps")
    pruning = importlib.import_module("torch_kirigami.pruning")
    model, example = copy.deepcopy(model).eval(), batches[0][0][:2]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shares = iter(1 - (k + 1) / _ROUNDS for k in range(_ROUNDS - 1))

    def step() -> None:
        graph = library.DependencyGraph.build(model, args=(example,))
        pruner = pruning.Pruner(model, graph=graph, granularity=pruning.Granularity(multiple))
        budget = pruning.ParameterBudget(max_params=round(next(shares) * parameters))
        pruner.prune(
            pruner.discover_candidates(), budget=budget, strategy=pruning.Greedy(pruning.WeightTaylor())
        )

    yield from _path(model, batches, step, _ROUNDS - 1, always=True)


def _path(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    step: Callable[[], Any],
    steps: int,
    always: bool = False,
) -> Iterator[Step]:
    """Yield the model after each step that made it smaller; gradients anew at the events, or ``always``."""
    example = batches[0][0][:2]
    full = flops(model, example)
    share, told, events = 1.0, 1.0, list(_EVENTS)
    for _ in range(steps):
        if always or (events and share <= events[0]):
            events = [event for event in events if event < share]
            model.zero_grad()
            for images, labels in batches:
                F.cross_entropy(model(images), labels).backward()
        step()
        share = flops(model, example) / full
        if share < told:
            told = share
            smaller = copy.deepcopy(model)
            smaller.zero_grad()
            yield smaller, share
        if share < _END:
            return


def _library(name: str, advice: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnavailableError(advice) from error
