"""Measures the worth of channels on a few hundred images: their order in a group, the cost of narrowing."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcp_fx.calibration.batches import (
    MEMORY,
    Batch,
    again,
    device_of,
    each_batch,
    number_of,
    require_finite_gradients,
    run_batch,
)
from smcp_fx.calibration.curvature import Curvature, corrected
from smcp_fx.calibration.elimination import Elimination, Order
from smcp_fx.calibration.objective import Loss, Objective
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.errors import InputError
from smcp_fx.interface.wrapping import require_whole
from smcp_fx.outcomes import in_mode
from smcp_fx.output_kinds import Kinds
from smcp_fx.prepared import PreparedModel, prepared_of
from smcp_fx.pruning.importance import TaylorImportance
from smcp_fx.pruning.state import PruningState
from smcp_fx.pruning.worth import Floats

_logger = logging.getLogger(__name__)

#: One image in this many is held out of the fits. Chosen, not measured.
FOLD = 4
#: Estimated shares of the time by which inputs are gathered, and channels ordered; rises take the rest.
_SHARES = (0.5, 0.7)


def gather_importance(
    prepared: PreparedModel,
    batches: Any,
    loss: Loss | None = None,
    *,
    outputs: Kinds | None = None,
    progress: Progress | None = None,
) -> None:
    """Gather the worth of channels from batches, in eval mode, so that ``prepared.pruner.solve()`` can choose.

    The layers that read a group decide the order of its channels: the channels that the others replace best
    after a refit, as by `repair`, go first (`smcp_fx.calibration.elimination`). The group's worth is the rise
    of the loss on a quarter of the images, held out of the fits (`smcp_fx.calibration.curvature`). If a layer
    that reads a group cannot be fitted (its weight depends on the images, or it has over 8,192 inputs per
    output), first-order importances replace the rises, scaled to other groups' rises, and the log says so.

    Memory: 8 bytes for each pair of a layer's inputs (ResNet-50: 0.9 GiB in all), plus the held-out images, 2
    GiB at most. It does not grow with the other images.

    By default the outputs decide the loss (`smcp_fx.calibration.objective`). For class scores and yes or no
    it is the cross entropy of the labels or, without labels, of labels drawn from the model's predictions;
    the gradients are then those of the Fisher information. For anything else it is the squared error relative
    to the outputs' variance; random signs estimate its Gauss-Newton matrix. If neither ``outputs`` nor labels
    decide, a warning says how each output is read. Frozen weights count like others. Weights, their gradients
    and statistics do not change.

    ``loss(outputs, labels)`` returns a scalar, and replaces this default.

    ``outputs`` gives the kind of the output: "classes" ("classes:2": along dimension 2), "binary" (yes or no,
    each number a score or a probability) or "values"; for nested outputs, a dict by name of those that count,
    such as ``{"boxes": "values", "0.logits": "classes"}``. Each counts relative to the best constant answer.

    ``progress`` is called with the share done, 0 to 1, after each batch and each group.

    Raises `InputError` for batches and losses that do not fit, `TrainingError` if no channel is free.
    """
    prepared = prepared_of("gather_importance", prepared)
    require_whole(prepared)
    TaylorImportance(prepared.channels, prepared.smcp, prepared.pruner.config.importance).require_layers()
    state, batches, objective = prepared.smcp, again(batches), Objective(prepared, loss, outputs)
    weighing, standing_in = Stretch(progress).split(0.999)
    elimination = Elimination(prepared, number_of(batches))
    orders = weigh(elimination, state, batches, objective, weighing)
    if orders and all(order.rises is not None and not order.rises.any() for order in orders.values()):
        raise InputError(
            "no channel matters to the loss of these batches: are all inputs, or all outputs, zero? Or are the "
            "labels the network's own outputs, so that the loss is at its minimum? Then leave them and loss= away"
        )
    rises = {name: order.rises for name, order in orders.items() if order.rises is not None}
    unknown = [name for name in state.free_masks() if name not in rises]
    if unknown:
        first_order(prepared, batches, objective, standing_in)
        rises = _all_rises(state, rises) if rises else {}
        _logger.warning(
            "%d of %d groups are valued by first-order importances, which may be far off, since not all layers that "
            "read them can be fitted: %s",
            len(unknown), len(state.free_masks()),
            ", ".join(f"{name} ({elimination.unknown(name) or 'read unevenly'})" for name in unknown),
        )  # fmt: skip
    else:
        state.forget()
        nothing = torch.zeros_like(state.gathered)
        state.gather(nothing, torch.ones((), dtype=torch.bool, device=nothing.device), 0.0)
    for name, order in orders.items():
        mine = state.of_group(state.gathered, name)
        values = mine.sort().values if order.rises is None else _steps(order.rises)
        mine[order.units.to(mine.device)] = values.to(mine)
    state.rises = rises or None


def weigh(
    elimination: Elimination,
    state: PruningState,
    batches: Any,
    objective: Objective,
    progress: Progress,
) -> dict[str, Order]:
    """Return the order of each group that some layer can order, with its rises on images held out of the fits."""
    device, held = device_of(elimination.whole), list[tuple[Batch, Tensor]]()
    gathering, ordering, rising = Stretch(progress).split(*_SHARES)

    with in_mode(elimination.whole, False):
        for parameter in elimination.whole.parameters():  # it is a copy; its activations' gradients suffice
            parameter.requires_grad_(False)
        for batch in each_batch(batches):
            out = _held_out(batch, elimination.batches)
            if bool(out.any()) and sum(kept.nbytes for kept, _ in held) < MEMORY:
                held.append((batch, out))
            if not bool(out.all()):
                batch = batch.to(device)
                # A third of the fitted batches weigh the outputs by gradients; all of them provide inputs.
                weighs = elimination.batches < FOLD or batch.number % FOLD == 1
                elimination.add(batch, partial(objective, batch=batch) if weighs else None, ~out)
            gathering(min(batch.number / elimination.batches, 1.0))
        names, orders = list(state.free_masks()), dict[str, Order]()
        for done, name in enumerate(names, 1):
            order = elimination.order(name)
            ordering(done / len(names))
            if order is not None:
                orders[name] = order
        elimination.forget()
        curvature = Curvature(elimination.whole, {name: order.refits for name, order in orders.items()})
        for done, (batch, out) in enumerate(held, 1):
            batch = batch.to(device)
            curvature.add(batch, partial(objective, batch=batch), out)
            rising(done / len(held))
    return {name: corrected(order, curvature.rises(name)) for name, order in orders.items()}


def _held_out(batch: Batch, batches: int) -> Tensor:
    """Return which of a batch's images are held out, [images]; whole batches if there are enough."""
    if batches >= FOLD:
        return torch.full((batch.images,), batch.number % FOLD == 0)
    return torch.arange(batch.images) % FOLD == FOLD - 1


def _steps(rises: Floats) -> Tensor:
    """Return the rise that removing each channel adds, in the order of removal, [n]; strictly increasing."""
    steps = np.maximum.accumulate(np.maximum(-np.diff(rises)[::-1], 1e-6 * float(rises[0])))
    return torch.from_numpy(steps * (1 + 1e-6 * np.arange(steps.size)))


def _all_rises(state: PruningState, rises: dict[str, Floats]) -> dict[str, Floats]:
    """Fill in unknown rises by first-order importances, scaled to match the known rises at half width."""
    lost = {}
    for name in state.free_masks():
        importances = state.of_group(state.gathered, name).double().cpu().sort().values.numpy()
        lost[name] = np.concatenate([np.cumsum(importances)[::-1], [0.0]])
    measured, assumed = (sum(float(of[name][of[name].size // 2]) for name in rises) for of in (rises, lost))
    return {
        name: rises.get(name, lost[name] * measured / assumed if assumed else lost[name]) for name in lost
    }


def first_order(
    prepared: PreparedModel, batches: Any, objective: Objective, progress: Progress | None = None
) -> None:
    """Gather only the first-order importances of channels; otherwise as `gather_importance`."""
    state, importance = (
        prepared.smcp,
        TaylorImportance(prepared.channels, prepared.smcp, prepared.pruner.config.importance),
    )
    device, progressed = device_of(prepared), Stretch(progress)
    number = 1 if progress is None else number_of(batches)  # iterates over a loader without a length
    before = [(parameter, parameter.grad, parameter.requires_grad) for parameter in prepared.parameters()]
    state.forget()
    try:
        with in_mode(prepared, False), torch.enable_grad():
            for parameter, _, _ in before:  # the model may be frozen for inference
                parameter.requires_grad_(True)
            for batch in each_batch(batches):
                prepared.zero_grad(set_to_none=True)
                batch = batch.to(device)
                objective(run_batch(prepared, batch), batch).backward()  # type: ignore[no-untyped-call]
                units = importance(prepared)
                # Average over all batches so far; a value that is not finite raises instead of being skipped.
                require_finite_gradients(batch, [units])
                state.gather(
                    units, torch.ones((), dtype=torch.bool, device=units.device), 1 - 1 / batch.number
                )
                progressed(min(batch.number / number, 1.0))
    finally:
        for parameter, gradient, learns in before:
            parameter.requires_grad_(learns)
            parameter.grad = gradient
