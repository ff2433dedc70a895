"""Pruning without training: importances from a few batches, one solve, and repair."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.calibration.batches import again, device_of, each_batch, number_of, run_batch
from smcp_fx.calibration.gathering import FOLD, gather_halfway, gather_importance
from smcp_fx.calibration.objective import Loss, Objective
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.calibration.repair import repair
from smcp_fx.config import PruningConfig
from smcp_fx.costs.binding import CostModel
from smcp_fx.errors import InputError
from smcp_fx.outcomes import in_mode
from smcp_fx.output_kinds import Kinds
from smcp_fx.prepare import ConvertedModule, convert, prepare, trained_graph
from smcp_fx.prepared import PreparedModel


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

    `prepare`, `gather_importance`, `gather_halfway`, ``prepared.pruner.solve()``, `convert` and `repair` in one; call
    them yourself to see what each did. Uniform widths are repaired, too, and taken where their outputs are nearer to
    the whole network's.

    Args:
        model: trained; it stays as it was.
        batches: as for `recalibrate`; those that run once are read into memory.
        target: as for `prepare`.
        cost: as for `prepare`.
        loss: as for `gather_importance`.
        outputs: as for `gather_importance`.
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
    whole, halfway, repairing = Stretch(progress).split(0.3, 0.6)
    gather_importance(prepared, batches, loss, outputs=outputs, progress=whole)
    gather_halfway(prepared, batches, loss, outputs=outputs, progress=halfway)
    prepared.pruner.solve()
    ours, uniform = repairing.split(0.5)
    smaller = convert(prepared)
    repair(smaller, prepared, batches, progress=ours)
    masks = uniform_masks(prepared)
    if masks is None:
        return smaller
    prepared.set_masks(masks)
    other = convert(prepared)
    repair(other, prepared, batches, progress=uniform)
    objective = Objective(prepared, loss, outputs, quiet=True)
    return min((smaller, other), key=lambda network: _distance(network, prepared, batches, objective))


def uniform_masks(prepared: PreparedModel) -> dict[str, Tensor] | None:
    """Return masks that keep one share of each group, its best channels, the largest share within the target.

    None where nothing need go, or the narrowest permitted widths cost more.
    """
    pruner = prepared.pruner
    cost, target, importance = pruner.cost, pruner.target / pruner.correction, pruner.importance

    allowed = {name: [count for count in counts if count] for name, counts in cost.permitted.items()}

    def counts_at(share: float) -> dict[str, int]:
        return {
            name: max((count for count in counts if count <= share * counts[-1]), default=counts[0])
            for name, counts in allowed.items()
        }

    def fits(counts: dict[str, int]) -> bool:
        return cost.at(counts).cost(counts) <= target

    shares = sorted({count / counts[-1] for counts in allowed.values() for count in counts})
    if not shares or fits(counts_at(1.0)):
        return None
    place = bisect_left(shares, True, key=lambda share: not fits(counts_at(share)))
    if not place:
        return None
    masks = {}
    for name, count in counts_at(shares[place - 1]).items():
        mask = torch.zeros_like(importance[name], dtype=torch.bool)
        mask[importance[name].argsort(descending=True)[:count]] = True
        masks[name] = mask
    return masks


@torch.no_grad()
def _distance(network: nn.Module, prepared: PreparedModel, batches: Any, objective: Objective) -> float:
    """Return how far the network's outputs are from the whole one's, over every fourth batch."""
    whole, device, total = trained_graph(prepared)[1], device_of(network), 0.0
    every = min(FOLD, number_of(batches))
    with in_mode(network, False), in_mode(whole, False):
        for batch in each_batch(batches):
            if batch.number % every == 0:
                batch = batch.to(device)
                found, wanted = run_batch(network, batch), run_batch(whole, batch)
                total += objective.distance(found, wanted, batch) * batch.images
    return total
