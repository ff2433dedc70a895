"""The worth of keeping part of a group's importance: the more channels stay, the less a further one adds.

Gradients grow as a group narrows: importances gathered at a share r are about r ** -e times those of the whole group
(docs/explanations/method.md). So the fewer channels are left, the more each matters. In a group of total importance
I, a share s is worth the integral

    worth = I * s ** (1 - e) / (1 - e).

The paper adds up importances (e = 0): a layer's last channel then counts no more than its gradient shows
while all the other channels are there.
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
    """The worth of kept units, for importances ``scores`` ([units] float32, scaled to whole groups)."""

    def __init__(self, scores: Tensor, state: PruningState, exponent: float) -> None:
        self._power = 1 - exponent
        here = scores.double().cpu()  # one transfer for all groups
        self._totals = {name: float(state.of_group(here, name).sum()) for name in state.free_masks()}

    def of(self, group: str, importance: Floats) -> Floats:
        """Return the worth of keeping this importance of a group, elementwise."""
        total = self._totals[group]
        if self._power == 1 or total <= 0:
            return importance
        return np.asarray(total * (importance / total) ** self._power / self._power)

    def of_units(self, scores: Tensor, keep: Tensor, state: PruningState) -> float:
        """Return the worth of the kept units ([units] bool), over all groups."""
        kept = torch.where(keep, scores, torch.zeros_like(scores)).double().cpu()
        sums = {name: state.of_group(kept, name).sum().numpy() for name in self._totals}
        return float(sum(self.of(name, total) for name, total in sums.items()))


class KnownWorth(Worth):
    """The worth according to known rises of the loss.

    ``rises``: by group, the rise of the loss by number of best units kept, [size + 1], falling; interpolated in
    between.
    """

    def __init__(self, scores: Tensor, state: PruningState, rises: Mapping[str, Floats]) -> None:
        super().__init__(scores, state, 0.0)
        self._rises = rises
        self._sums = {}
        for name in self._totals:
            best = state.of_group(scores, name).double().cpu().sort(descending=True).values.numpy()
            # Units without importance count a little, so that sums distinguish counts.
            self._sums[name] = np.concatenate(
                [[0.0], np.cumsum(np.maximum(best, 1e-12 * max(best[0], 1e-30)))]
            )

    def of(self, group: str, importance: Floats) -> Floats:
        return -np.interp(importance, self._sums[group], self._rises[group])
