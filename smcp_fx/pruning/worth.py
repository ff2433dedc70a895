"""What it is worth to keep some of a group's importance: the more is left, the less a further channel adds.

Gradients grow in a group that is narrowed: importances gathered while a share r of it is kept are about r ** -e times
those of the whole group (docs/explanations/method.md). So a channel matters more, the fewer are left. Of a group
whose importance is I as a whole, a share s is worth the integral of that:

    worth = I * s ** (1 - e) / (1 - e).

The paper adds importances up (e = 0): it takes a layer's last channel to be worth what its gradient says while all
the others are there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcp_fx.pruning.state import PruningState

Floats = NDArray[np.float64]


class Worth:
    """The worth of what groups keep, for importances ``scores`` ([units] float32, as those of whole groups)."""

    def __init__(self, scores: Tensor, state: PruningState, exponent: float) -> None:
        self._power = 1 - exponent
        here = scores.double().cpu()  # one transfer, not one a group
        self._totals = {name: float(state.of_group(here, name).sum()) for name in state.free_masks()}

    def of(self, group: str, importance: Floats) -> Floats:
        """Worth of keeping this importance of a group, elementwise."""
        total = self._totals[group]
        if self._power == 1 or total <= 0:
            return importance
        return np.asarray(total * (importance / total) ** self._power / self._power)

    def of_units(self, scores: Tensor, keep: Tensor, state: PruningState) -> float:
        """Worth of the units that are kept ([units] bool), all groups together."""
        kept = torch.where(keep, scores, torch.zeros_like(scores)).double().cpu()
        sums = {name: state.of_group(kept, name).sum().numpy() for name in self._totals}
        return float(sum(self.of(name, total) for name, total in sums.items()))


class KnownWorth(Worth):
    """The worth of groups whose loss is known by how many of their best units are kept.

    ``rises``: by group the rise of the loss, [size + 1], falling. Between counts of best units it is interpolated.
    """

    def __init__(self, scores: Tensor, state: PruningState, rises: Mapping[str, Floats]) -> None:
        super().__init__(scores, state, 0.0)
        self._rises = rises
        self._sums = {}
        for name in self._totals:
            best = state.of_group(scores, name).double().cpu().sort(descending=True).values.numpy()
            # Units that nothing is known of count a little, so that sums tell counts apart.
            self._sums[name] = np.concatenate(
                [[0.0], np.cumsum(np.maximum(best, 1e-12 * max(best[0], 1e-30)))]
            )

    def of(self, group: str, importance: Floats) -> Floats:
        """Worth of keeping this importance of a group, elementwise."""
        return -np.interp(importance, self._sums[group], self._rises[group])
