"""How far to trust the estimated worth of groups: candidates are repaired, and judged on held-out images.

The rise of the loss is estimated for each group alone, with its readers refitted. On some networks the
estimate is right within a factor of two. On networks that are certain of their answers, it is ten times too
large for the first layers: later layers make up for their errors once all are repaired. So each group's rise
r is drawn, in logarithms, towards the rise u that makes uniform widths the best choice,

    r^t u^(1 - t),    u = (1 - s)^2 / s  times the saving of halving the group, where a share s is kept,

with t = 1/2, 0, 1. Each solution is repaired on every second batch, with half of a repair's rows, and judged
on the others. The first serves best on most networks, so another must be clearly better. Where files are
measured, the first solution is, and the aim corrected, before the others are solved: all are judged at the
cost that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.calibration.batches import (
    MEMORY,
    Batch,
    again,
    device_of,
    each_batch,
    number_of,
    run_batch,
)
from smcp_fx.calibration.gathering import FOLD
from smcp_fx.calibration.objective import Loss, Objective
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.calibration.repair import fit, narrowed
from smcp_fx.calibration.side_by_side import Narrowed
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.outcomes import in_mode
from smcp_fx.output_kinds import Kinds
from smcp_fx.prepare import trained_graph
from smcp_fx.prepared import PreparedModel, prepared_of
from smcp_fx.pruning import ranks
from smcp_fx.pruning.solve import Solve
from smcp_fx.pruning.worth import Floats

#: The exponents t; another than the first wins if it lowers the divergence to this share. Docs: experiments.md.
_TRUST, _CLEARLY = (0.5, 0.0, 1.0), 0.9
#: Rises count as at least this share of the largest, so that a group that seems free is not emptied. Chosen.
_LEAST = 1e-9


def solve_best(
    prepared: PreparedModel,
    batches: Any,
    loss: Loss | None = None,
    *,
    outputs: Kinds | None = None,
    correct: Callable[[], object] | None = None,
    progress: Progress | None = None,
) -> float:
    """Solve for masks with the worths trusted by half, not at all or fully; return the best trust (1/2, 0, 1).

    The chosen rises replace the model's, so that later solves use them, too. Solves once if no rises are
    known, or if nothing need be pruned.

    Args:
        batches: as for `gather_importance`; fewer than four batches both repair and judge.
        loss: as for `gather_importance`.
        outputs: as for `gather_importance`.
        correct: measures the network of the present masks, sets ``pruner.correction`` and solves again until it
            costs what is asked; called before the candidates are judged, and after another than 1/2 is taken.
        progress: as for `gather_importance`.

    Raises the errors of `repair` and `Pruner.solve`.
    """
    prepared = prepared_of("solve_best", prepared)
    pruner, state, batches = prepared.pruner, prepared.smcp, again(batches)
    objective, rises = Objective(prepared, loss, outputs, quiet=True), state.rises
    correct = correct or (lambda: None)
    if rises is None or pruner.target >= pruner.full_cost * pruner.correction:
        pruner.solve()
        correct()
        return 1.0
    with ExitStack() as undo:
        undo.callback(setattr, state, "rises", rises)  # if anything fails
        start, tries = len(pruner.history), list(_tries(prepared, rises, correct))
        fitting, judging = Stretch(progress).split(0.8)
        networks, (fitted, held), best = [one.network for one in tries], _parts(batches), 0
        if len(tries) > 1:
            fit(networks, prepared, fitted, fitting, rows=0.5)
            away = _distances([network.module for network in networks], prepared, held, objective, judging)
            least = min(range(len(tries)), key=away.__getitem__)
            best = least if away[least] < _CLEARLY * away[0] else 0
        best = int(ranks.broadcast(torch.tensor(best, device=state.keep.device)))
        state.rises, pruner.history[start:] = tries[best].rises, tries[best].solves
        prepared.set_masks(tries[best].masks)
        if best:
            correct()
        undo.pop_all()
    return tries[best].trust


@dataclass(frozen=True)
class _Try:
    """What solves by rises drawn to a trust came to, and its network, to be repaired."""

    trust: float
    rises: dict[str, Floats]
    masks: dict[str, Tensor]
    solves: list[Solve]
    network: Narrowed


def _tries(
    prepared: PreparedModel, rises: Mapping[str, Floats], correct: Callable[[], object]
) -> Iterator[_Try]:
    """Solve by each trust, the first until what is measured fits; leave out equal and impossible solutions."""
    pruner, seen = prepared.pruner, list[dict[str, Tensor]]()
    for trust in _TRUST:
        before = len(pruner.history)
        prepared.smcp.rises = mine = drawn(rises, pruner.cost, trust)
        try:
            pruner.solve()
        except InfeasibleBudgetError:
            if not seen:
                raise
            continue
        if not seen:
            correct()
        masks = prepared.masks
        if not any(_same(masks, others) for others in seen):
            seen.append(masks)
            yield _Try(trust, mine, masks, pruner.history[before:], narrowed(prepared))


def drawn(rises: Mapping[str, Floats], cost: NetworkCost, trust: float) -> dict[str, Floats]:
    """Return the rises to the power of ``trust``, times those of uniform widths to the power of 1 - ``trust``.

    The sum of all groups' rises at half their channels stays the same.
    """
    full = {name: counts[-1] for name, counts in cost.permitted.items()}
    whole, uniform = cost.cost(full), dict[str, Floats]()
    for name, curve in rises.items():
        counts = [count for count in cost.permitted.get(name, ()) if count]
        half = min(counts, key=lambda count: abs(count - full[name] / 2), default=None)
        saved = 0.0 if half is None else (whole - cost.cost(full | {name: half})) / whole
        share = np.maximum(np.arange(curve.size), 1) / (curve.size - 1)
        uniform[name] = max(saved, _LEAST) * (1 - share) ** 2 / share
    least = [_LEAST * max(float(curve[0]) for curve in of.values()) for of in (rises, uniform)]
    mixed = {
        name: (curve + least[0]) ** trust * (uniform[name] + least[1]) ** (1 - trust)
        for name, curve in rises.items()
    }
    mixed = {name: curve - curve[-1] for name, curve in mixed.items()}
    before, after = (sum(float(curve[curve.size // 2]) for curve in of.values()) for of in (rises, mixed))
    return {name: curve * (before / after) if after else curve for name, curve in mixed.items()}


def _same(masks: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(mask, others[name]) for name, mask in masks.items())


def _parts(batches: Any) -> tuple[list[Batch], list[Batch]]:
    """Return the batches to fit by and those to judge by; the same ones if there are few.

    Lists are needed, since a shuffling loader gives other batches each time.
    """
    enough, fitted, held = number_of(batches) >= FOLD, list[Batch](), list[Batch]()
    for batch in each_batch(batches):
        for part, mine in ((fitted, batch.number % 2 == 1), (held, batch.number % 2 == 0)):
            if (mine or not enough) and sum(one.nbytes for one in part) < MEMORY:
                part.append(batch)
    return fitted, held


@torch.no_grad()
def _distances(
    networks: Sequence[nn.Module],
    prepared: PreparedModel,
    held: Sequence[Batch],
    objective: Objective,
    progress: Progress,
) -> list[float]:
    """Return each network's distance from the whole one's outputs, the mean over images.

    With the user's loss, the distance is the excess over the whole network's loss.
    """
    whole, totals = trained_graph(prepared)[1], [0.0] * len(networks)
    with ExitStack() as stack:
        for network in (whole, *networks):
            stack.enter_context(in_mode(network, False))
        for done, batch in enumerate(held, 1):
            batch = batch.to(device_of(whole))
            wanted = run_batch(whole, batch)
            least = objective.distance(wanted, wanted, batch)
            for index, network in enumerate(networks):
                away = objective.distance(run_batch(network, batch), wanted, batch) - least
                totals[index] += away * batch.images
            progress(done / len(held))
    return [total / sum(batch.images for batch in held) for total in totals]
