"""How far to trust what groups are said to be worth: candidates, repaired and judged by images held out.

A rise of the loss is estimated for one group alone, its readers refitted. On some networks that is right within a
factor of two; on others, certain of their answers, it is ten times too large for first layers, whose errors later
layers make up for once all are repaired. So each group's rise r is drawn, in logarithms, to the one by which uniform
widths are the best choice,

    r^t u^(1 - t),    u = (1 - s)^2 / s  times what halving the group saves, where a share s is kept,

with t = 0, 1/2, 1; what is solved for is repaired by half of the batches, and judged by a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from smcp_fx.calibration.batches import (
    MEMORY,
    Batch,
    again,
    device_of,
    each_batch,
    number_of,
    run_batch,
)
from smcp_fx.calibration.objective import Loss, Objective
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.calibration.repair import repair
from smcp_fx.cost_model import NetworkCost
from smcp_fx.outcomes import in_mode
from smcp_fx.output_kinds import Kinds
from smcp_fx.prepare import convert, trained_graph
from smcp_fx.prepared import PreparedModel, prepared_of
from smcp_fx.pruning.worth import Floats

#: One image in so many is held out of fits, to judge by. Chosen, not measured.
FOLD = 4
#: The exponents t, and by which share the divergence must fall for a larger one. Docs: experiments.md.
_TRUST, _CLEARLY = (0.0, 0.5, 1.0), 0.9
#: Rises below this share of the largest count as it: a group that seems free is not emptied. Chosen.
_LEAST = 1e-9


def solve_best(
    prepared: PreparedModel,
    batches: Any,
    loss: Loss | None = None,
    *,
    outputs: Kinds | None = None,
    progress: Progress | None = None,
) -> float:
    """Solve for masks by worths trusted wholly, by half or not at all, and return which (1, 1/2, 0).

    Leaves the rises that were taken as the model's own, so that a further solve goes by them, too. Solves once where
    no rises are known, or nothing need go.

    Args:
        batches: as for `gather_importance`; fewer than four are judged by what they are repaired with.
        loss: as for `gather_importance`.
        outputs: as for `gather_importance`.
        progress: as for `gather_importance`.

    Raises what `repair` and `Pruner.solve` raise.
    """
    prepared = prepared_of("solve_best", prepared)
    pruner, state, batches = prepared.pruner, prepared.smcp, again(batches)
    objective, rises = Objective(prepared, loss, outputs, quiet=True), state.rises
    if rises is None or pruner.target >= pruner.full_cost * pruner.correction:
        pruner.solve()
        return 1.0
    judge, best, solves = _Judge(prepared, batches, objective), None, len(pruner.history)
    for trust, told in zip(_TRUST, Stretch(progress).split(1 / 3, 2 / 3), strict=True):
        state.rises = drawn(rises, pruner.cost, trust)
        pruner.solve()
        masks = prepared.masks
        if best is not None and all(torch.equal(mask, best[1][name]) for name, mask in masks.items()):
            continue
        found = judge.distance(told)
        if best is None or found < _CLEARLY * best[0]:
            best = found, masks, state.rises, trust
    assert best is not None
    state.rises = best[2]
    pruner.solve()
    del pruner.history[solves:-1]  # those of the tries
    return best[3]


def drawn(rises: Mapping[str, Floats], cost: NetworkCost, trust: float) -> dict[str, Floats]:
    """Return the rises to the power of ``trust``, times those of uniform widths to the power of what is left.

    Their sum where half of each group is kept stays as it was.
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


class _Judge:
    """Repairs what the present masks leave, and tells how far its outputs are from the whole network's."""

    def __init__(self, prepared: PreparedModel, batches: Any, objective: Objective) -> None:
        self._prepared, self._objective = prepared, objective
        enough = number_of(batches) >= FOLD
        # Kept, since a loader that shuffles gives others each time.
        self._fit, self._held = list[Batch](), list[Batch]()
        for batch in each_batch(batches):
            for part, mine in ((self._fit, batch.number % 2 == 1), (self._held, batch.number % FOLD == 0)):
                if (mine or not enough) and sum(one.nbytes for one in part) < MEMORY:
                    part.append(batch)

    @torch.no_grad()
    def distance(self, progress: Progress) -> float:
        """Return the mean over images; of a loss of the user's, what it is more than the whole network's."""
        network = convert(self._prepared)
        repair(network, self._prepared, self._fit, progress=progress)
        whole, device, total, images = trained_graph(self._prepared)[1], device_of(network), 0.0, 0
        with in_mode(network, False), in_mode(whole, False):
            for batch in self._held:
                batch = batch.to(device)
                wanted = run_batch(whole, batch)
                away = self._apart(network, batch, wanted) - self._objective.distance(wanted, wanted, batch)
                total, images = total + away * batch.images, images + batch.images
        return total / images

    def _apart(self, network: nn.Module, batch: Batch, wanted: Any) -> float:
        return self._objective.distance(run_batch(network, batch), wanted, batch)
