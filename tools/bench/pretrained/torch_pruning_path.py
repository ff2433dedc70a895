"""Torch-Pruning, along one path from the whole network downwards.

It goes by first-order importances over all calibration images, the gradients taken anew at some shares of the FLOPs.
The path yields a network for every share that it passes, so that all targets are cut from one.

Not here: torch-kirigami 0.2.1. Its planner had not finished its first plan for a ResNet of 700 channels after half a
minute; its isomorphic and OSSCAR workflows are not in its package.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretrained.command import UnavailableError

#: A network, and its share of the dense FLOPs.
Step = tuple[nn.Module, float]
#: Where gradients are taken anew; and the end of a path.
_EVENTS, _END = (1.0, 0.7, 0.45, 0.25, 0.12), 0.04
#: Steps on the way to an empty network.
_STEPS = 200


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
    try:
        library = importlib.import_module("torch_pruning")
    except ModuleNotFoundError as error:
        raise UnavailableError("pip install torch-pruning==1.6.1 --no-deps") from error
    model, example = copy.deepcopy(model).eval(), batches[0][0][:2]
    pruner = library.pruner.BasePruner(
        model, example, importance=library.importance.GroupTaylorImportance(), global_pruning=True,
        pruning_ratio=0.98, max_pruning_ratio=0.98, iterative_steps=_STEPS, isomorphic=isomorphic,
        round_to=multiple if multiple > 1 else None, ignored_layers=[model.get_submodule("head")],
    )  # fmt: skip
    yield from _path(model, batches, pruner.step)


def _path(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], step: Callable[[], Any]
) -> Iterator[Step]:
    """Yield the model after each step that made it smaller."""
    example = batches[0][0][:2]
    full = flops(model, example)
    share, told, events = 1.0, 1.0, list(_EVENTS)
    for _ in range(_STEPS):
        if events and share <= events[0]:
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
