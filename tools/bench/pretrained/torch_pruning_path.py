"""Torch-Pruning, along one path from the whole network downwards.

It goes by first-order importances over all calibration images, the gradients taken anew at some shares of the FLOPs,
or by norms of weights.
The path yields a network for every share that it passes, so that all targets are cut from one.

Not here: torch-kirigami 0.2.1. Its planner had not finished its first plan for a ResNet of 700 channels after half a
minute; its isomorphic and OSSCAR workflows are not in its package.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    model: nn.Module,
    example: Tensor,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    multiple: int,
    kind: str,
    head: str,
) -> Iterator[Step]:
    """Torch-Pruning's pruner; ``head``: the path of the layer that keeps its outputs.

    ``kind``: "Taylor", all groups compared by group Taylor importance; "isomorphic", like groups only; "uniform L2",
    the same share of every group by the L2 norm of its weights.
    """
    try:
        library = importlib.import_module("torch_pruning")
    except ModuleNotFoundError as error:
        raise UnavailableError("pip install torch-pruning==1.6.1 --no-deps") from error
    model, uniform = copy.deepcopy(model).eval(), kind == "uniform L2"
    importance = library.importance
    pruner = library.pruner.BasePruner(
        model, example,
        importance=importance.GroupMagnitudeImportance(p=2) if uniform else importance.GroupTaylorImportance(),
        global_pruning=not uniform, pruning_ratio=0.98, max_pruning_ratio=0.98, iterative_steps=_STEPS,
        isomorphic=kind == "isomorphic", round_to=multiple if multiple > 1 else None,
        ignored_layers=[model.get_submodule(head)],
    )  # fmt: skip
    yield from _path(model, example, () if uniform else batches, loss, pruner.step)


def _path(
    model: nn.Module,
    example: Tensor,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    step: Callable[[], Any],
) -> Iterator[Step]:
    """Yield the model after each step that made it smaller; gradients are of the batches, if there are any."""
    full = flops(model, example)
    share, told, events = 1.0, 1.0, list(_EVENTS)
    for _ in range(_STEPS):
        if events and share <= events[0]:
            events = [event for event in events if event < share]
            model.zero_grad()
            for images, labels in batches:
                loss(model(images), labels).backward()  # type: ignore[no-untyped-call]
        step()
        share = flops(model, example) / full
        if share < told:
            told = share
            smaller = copy.deepcopy(model)
            smaller.zero_grad()
            yield smaller, share
        if share < _END:
            return
