"""Pruning without training: importances from a few batches, one solve, and repair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smcp_fx.calibration.batches import Batch, again, device_of, each_batch, number_of, run_batch
from smcp_fx.calibration.elimination import Elimination
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.calibration.repair import repair
from smcp_fx.config import PruningConfig
from smcp_fx.costs.binding import CostModel
from smcp_fx.errors import InputError, SmcpError
from smcp_fx.outcomes import in_mode
from smcp_fx.prepare import ConvertedModule, convert, prepare, sliced_graph, trained_graph
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning.importance import TaylorImportance
from smcp_fx.pruning.ranks import require_whole
from smcp_fx.pruning.state import PruningState
from smcp_fx.pruning.worth import Floats
from smcp_fx.tracing.example_runs import first_line

Loss = Callable[[Any, Any], Tensor]
#: Shares of the time after which the first and the second of three parts of gathering are done. Estimates.
_SHARES = (0.3, 0.7)


def compress(
    model: nn.Module,
    batches: Any,
    *,
    target: float | str = 0.5,
    cost: str | CostModel = "flops",
    loss: Loss | None = None,
    config: PruningConfig | None = None,
    progress: Progress | None = None,
) -> ConvertedModule:
    """Return a smaller model that computes nearly the same, from a trained one and a few hundred images.

    `prepare`, `gather_importance`, `gather_halfway`, ``prepared.pruner.solve()``, `convert` and `repair` in one; call
    them yourself to see what each did.

    Args:
        model: trained; it stays as it was.
        batches: as for `recalibrate`; those that run once are read into memory.
        target: as for `prepare`.
        cost: as for `prepare`.
        loss: as for `gather_importance`.
        config: as for `prepare`.
        progress: as for `gather_importance`.

    Raises what these raise: `InputError` for batches that do not fit, `InfeasibleBudgetError` for a target out of
    reach, `TraceError` for a model that cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"compress needs an nn.Module, not {type(model).__name__}")
    batches = again(batches)
    first = next(each_batch(batches)).to(device_of(model)).for_model(model)
    example = first.kwargs or first.args
    prepared = prepare(model, example, target=target, cost=cost, config=config)
    whole, halfway, repairing = Stretch(progress).split(0.35, 0.8)
    gather_importance(prepared, batches, loss, progress=whole)
    gather_halfway(prepared, batches, loss, progress=halfway)
    prepared.pruner.solve()
    smaller = convert(prepared)
    repair(smaller, prepared, batches, progress=repairing)
    return smaller


def gather_importance(
    prepared: PreparedModel, batches: Any, loss: Loss | None = None, *, progress: Progress | None = None
) -> None:
    """Gather from batches what channels are worth, in eval mode, so that ``prepared.pruner.solve()`` can choose.

    In which order a group's channels go is what the layers that read them say: first those that the others make up
    for best when the weights are fitted anew, as `repair` does. What that raises the loss by is what the group is
    worth (`smcp_fx.calibration.elimination`). Where it is not known of a group (a layer is called as a function, or
    has more than 8,192 inputs an output), the first-order importances of its channels, the mean of those of each
    batch, stand in, on the scale of what is known; the largest is that of the channel that goes last.

    Memory does not grow with the images: 8 bytes for each pair of a layer's inputs (ResNet-50: 0.9 GiB in all).

    ``loss(outputs, labels)`` returns a scalar; cross entropy by default. Batches without labels get some that are
    drawn from the model's own predictions, so that the gradients are those of the Fisher information: gradients of a
    distance to the model itself would be zero. Frozen weights count like others. Weights, their gradients and
    statistics are left as they were.

    ``progress`` is called with the share that is done, 0 to 1, after each batch and each group.

    Raises `InputError` for batches and losses that do not fit, `TrainingError` where no channel is free.
    """
    state, batches = prepared.smcp, again(batches)
    first, gathering, ordering = Stretch(progress).split(*_SHARES)
    first_order(prepared, batches, loss, None if progress is None else first)
    if not bool((state.gathered > 0).any()) and state.gathered.numel():
        raise InputError(
            "no channel matters to the loss of these batches: are all inputs, or all outputs, zero?"
        )
    everything = torch.ones_like(state.keep)
    elimination = Elimination(prepared, trained_graph(prepared), everything, int(state.gathers))
    _gather(elimination, batches, loss, gathering)
    rises = _put_in_order(elimination, state, state.gathered, ordering)
    state.rises = _all_rises(state, rises) if rises else None


def gather_halfway(
    prepared: PreparedModel, batches: Any, loss: Loss | None = None, *, progress: Progress | None = None
) -> None:
    """Gather again from a network halfway to the target, after `gather_importance` and before the solve.

    The fewer channels the others have left, the more each matters: rises of single groups do not add up. So masks are
    solved for halfway (the root of the share that is asked for), what they leave is repaired, and importances and
    rises are gathered from that. Of channels that are gone there, the order from before stays. Leaves the masks
    halfway, for `Pruner.solve` to end it. Does nothing where no rises are known, or nothing need go.

    Args:
        batches: as for `gather_importance`; those without labels get some that are drawn from the whole model's
            predictions.
        loss: as for `gather_importance`.
        progress: as for `gather_importance`.

    Raises what `gather_importance`, `repair` and `Pruner.solve` raise.
    """
    pruner, state, batches = prepared.pruner, prepared.smcp, again(batches)
    share, before = pruner.target / (pruner.correction * pruner.full_cost), state.rises
    if before is None or share >= 1:
        return
    pruner.check_target()
    pruner.solve(math.sqrt(share) * pruner.correction)
    network, there = sliced_graph(prepared), state.of_use()
    repairing, gathering, ordering = Stretch(progress).split(*_SHARES)
    repair(network[1], prepared, batches, progress=repairing)
    elimination = Elimination(prepared, network, there, number_of(batches))
    _gather(elimination, batches, loss, gathering, trained_graph(prepared)[1])
    found = _put_in_order(elimination, state, state.remembered, ordering)
    state.rises = _joined(before, found, {name: int(state.of_group(there, name).sum()) for name in before})


def _gather(
    elimination: Elimination,
    batches: Any,
    loss: Loss | None,
    progress: Progress,
    labelling: nn.Module | None = None,
) -> None:
    """Run the batches through. Those without labels get some that ``labelling`` predicts, or the network itself."""
    device = device_of(elimination.whole)
    with in_mode(elimination.whole, False):
        for parameter in elimination.whole.parameters():  # it is a copy
            parameter.requires_grad_(True)
        for batch in each_batch(batches):
            batch = batch.to(device)
            elimination.add(batch)
            if labelling is not None and batch.labels is None and loss is None:
                with torch.no_grad(), in_mode(labelling, False):
                    batch = replace(batch, labels=_drawn(run_batch(labelling, batch), batch))
            elimination.gradients(batch, partial(_loss_of, batch=batch, loss=loss))
            progress(min(batch.number / elimination.batches, 1.0))


def _put_in_order(
    elimination: Elimination, state: PruningState, importances: Tensor, progress: Progress
) -> dict[str, Floats]:
    """Order importances [units] as eliminated, the last one gone the largest; return the rises that are known."""
    rises, names = {}, list(state.free_masks())
    for done, name in enumerate(names, 1):
        order = elimination.order(name)
        progress(done / len(names))
        if order is None:
            continue
        mine, n = state.of_group(importances, name), order.units.numel()
        mine[order.units.to(mine.device)] = mine.sort().values[mine.numel() - n :]
        if order.rises is not None:
            rises[name] = order.rises
    return rises


def _joined(
    before: Mapping[str, Floats], found: Mapping[str, Floats], left: Mapping[str, int]
) -> dict[str, Floats]:
    """Join rises found with so many units ``left`` to those from before.

    Those were too small: by how much is told by half of what is left, and holds for the units that are gone, too.
    """
    factors = {}
    for name, rises in found.items():
        half = left[name] // 2
        expected = before[name][half] - before[name][left[name]]
        if expected > 0 and rises[half] > 0:
            factors[name] = float(rises[half] / expected)
    usual = float(np.median(list(factors.values()))) if factors else 1.0
    joined = {name: factors.get(name, usual) * rises for name, rises in before.items()}
    for name, rises in found.items():
        joined[name][: left[name]] = joined[name][left[name]] + rises[:-1]
    return joined


def _all_rises(state: PruningState, known: dict[str, Floats]) -> dict[str, Floats]:
    """Add the groups whose rises are not known: first-order importances, scaled to agree where half is kept."""
    lost = {}
    for name in state.free_masks():
        importances = state.of_group(state.gathered, name).double().cpu().sort().values.numpy()
        lost[name] = np.concatenate([np.cumsum(importances)[::-1], [0.0]])
    measured, assumed = (sum(float(of[name][of[name].size // 2]) for name in known) for of in (known, lost))
    return {
        name: known.get(name, lost[name] * measured / assumed if assumed else lost[name]) for name in lost
    }


def first_order(
    prepared: PreparedModel, batches: Any, loss: Loss | None = None, progress: Progress | None = None
) -> None:
    """Gather the first-order importances of channels alone; as `gather_importance` otherwise."""
    require_whole(prepared)
    state, importance = (
        prepared.smcp,
        TaylorImportance(prepared.channels, prepared.smcp, prepared.pruner.config.importance),
    )
    device, told = device_of(prepared), Stretch(progress)
    number = 1 if progress is None else number_of(batches)  # a loader without a length is gone through for it
    before = [(parameter, parameter.grad, parameter.requires_grad) for parameter in prepared.parameters()]
    state.forget()
    try:
        with in_mode(prepared, False), torch.enable_grad():
            for parameter, _, _ in before:  # also of a model that was frozen to be used
                parameter.requires_grad_(True)
            for batch in each_batch(batches):
                prepared.zero_grad(set_to_none=True)
                batch = batch.to(device)
                _loss_of(run_batch(prepared, batch), batch, loss).backward()  # type: ignore[no-untyped-call]
                units = importance(prepared)
                # The mean of all so far; one that is not finite is told, instead of left out.
                if not bool(torch.isfinite(units).all()):
                    raise InputError(
                        f"{batch} gives gradients that are not finite: look for NaN in the activations"
                    )
                state.gather(
                    units, torch.ones((), dtype=torch.bool, device=units.device), 1 - 1 / batch.number
                )
                told(min(batch.number / number, 1.0))
    finally:
        for parameter, gradient, learns in before:
            parameter.requires_grad_(learns)
            parameter.grad = gradient


def _loss_of(outputs: Any, batch: Batch, loss: Loss | None) -> Tensor:
    labels = batch.labels
    if loss is None and not (isinstance(outputs, Tensor) and outputs.dim() >= 2):
        told = (
            f"of shape {tuple(outputs.shape)}"
            if isinstance(outputs, Tensor)
            else f"a {type(outputs).__name__}"
        )
        raise InputError(
            f"the model's output is {told}, not classes' scores [images, classes, ...]: give loss=, a function of "
            "(outputs, labels)"
        )
    if loss is None and labels is None:
        labels = _drawn(outputs, batch)
    try:
        value = F.cross_entropy(outputs.float(), labels) if loss is None else loss(outputs, labels)
    except SmcpError:
        raise
    except Exception as error:
        raise InputError(f"the loss of {batch} fails: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value).all()):
        shown = (
            f"of shape {tuple(value.shape)}"
            if isinstance(value, Tensor) and value.numel() != 1
            else f"{value}"
        )
        raise InputError(f"the loss of {batch} is {shown}; it must be one finite number, as a tensor")
    if not value.requires_grad:
        raise InputError(
            f"the loss of {batch} has no gradient: it must be computed from the outputs, by torch"
        )
    return value


def _drawn(outputs: Tensor, batch: Batch) -> Tensor:
    """Return labels that are drawn by the scores that a model gives its classes, [images, ...]."""
    scores = outputs.detach().float().movedim(1, -1)
    if not bool(torch.isfinite(scores).all()):
        raise InputError(f"the model's outputs for {batch} are NaN or infinite: look at its activations")
    return torch.multinomial(scores.softmax(-1).flatten(0, -2), 1).reshape(scores.shape[:-1])
