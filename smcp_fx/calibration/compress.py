"""Pruning without training: importances from a few batches, one solve, and repair."""

from __future__ import annotations

from typing import Any

from torch import nn

from smcp_fx.calibration.batches import again, device_of, each_batch
from smcp_fx.calibration.candidates import solve_best
from smcp_fx.calibration.gathering import gather_importance
from smcp_fx.calibration.objective import Loss
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.calibration.repair import repair
from smcp_fx.config import PruningConfig
from smcp_fx.costs.binding import CostModel
from smcp_fx.errors import InputError
from smcp_fx.interface.wrapping import unwrapped
from smcp_fx.output_kinds import Kinds
from smcp_fx.prepare import ConvertedModule, convert, prepare


def compress(
    model: nn.Module,
    batches: Any,
    *,
    target: float | str = 0.5,
    cost: str | CostModel = "flops",
    loss: Loss | None = None,
    outputs: Kinds | None = None,
    config: PruningConfig | None = None,
    progress: Progress | None = None,
) -> ConvertedModule:
    """Return a smaller model that computes nearly the same, from a trained one and a few hundred images.

    Runs `prepare`, `gather_importance`, `solve_best`, `convert` and `repair`; call them yourself to see each
    result. Estimated worths count by half, or fully or not at all where held-out images are clearly for it
    (`smcp_fx.calibration.candidates`).

    Args:
        model: trained; it stays as it was.
        batches: as for `recalibrate`; an iterator is read into memory, 2 GiB at most.
        target: as for `prepare`.
        cost: as for `prepare`.
        loss: as for `gather_importance`.
        outputs: as for `gather_importance`.
        config: as for `prepare`.
        progress: as for `gather_importance`.

    Raises the errors of these functions: `InputError` for batches that do not fit, `InfeasibleBudgetError`
    for a target out of reach, `TraceError` for a model that cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"compress needs an nn.Module, not {type(model).__name__}")
    model, batches = unwrapped(model), again(batches)
    first = next(each_batch(batches)).to(device_of(model)).for_model(model)
    example = first.kwargs or first.args
    prepared = prepare(model, example, target=target, cost=cost, config=config)
    weighing, solving, repairing = Stretch(progress).split(0.26, 0.72)  # their measured shares
    gather_importance(prepared, batches, loss, outputs=outputs, progress=weighing)
    solve_best(prepared, batches, loss, outputs=outputs, progress=solving)
    smaller = convert(prepared)
    repair(smaller, prepared, batches, progress=repairing)
    return smaller
