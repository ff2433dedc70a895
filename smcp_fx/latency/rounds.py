"""The rows that are needed to prune a network to a target, while its channels' importances are unknown.

A device that answers slowly is asked in rounds: first for the first rows of every block, then for those behind the
price of the network that would be chosen if all channels of a group were equally important, until none are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smcp_fx.allocation import allocate
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.config import PruningConfig
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.latency.network import SURE, NetworkLatency

#: Keeping a share s of a group of equal units is worth s to this power (`smcp_fx.pruning.worth`).
_POWER = 1 - PruningConfig().width_exponent
#: The most rounds. Chosen, not measured.
_ROUNDS = 8
#: How often a choice is priced again, until it is within this share below its target. Chosen, not measured.
_PRICINGS, _MISS = 5, 0.01


def rows_for_targets(
    latency: NetworkLatency, targets: Sequence[float]
) -> list[tuple[FusedBlock, tuple[int, ...]]]:
    """Return the rows to measure next for prunings to these fractions of the dense latency."""
    rows = {
        (block.signature, point): (block, point)
        for target in targets
        for block, point in latency.lacking(_counts_at(latency, target), SURE)
    }
    return list(rows.values())


def measure_for_targets(latency: NetworkLatency, targets: Sequence[float]) -> None:
    """Measure those rows, round by round, until none are missing or there were too many rounds."""
    for _ in range(_ROUNDS):
        if not latency.take(rows_for_targets(latency, targets)):
            return


def _counts_at(latency: NetworkLatency, target: float) -> dict[str, int]:
    counts = latency.full_counts
    budget = target * latency.latency(counts)
    for _ in range(_PRICINGS):
        cost = latency.around(counts)
        values = {
            name: allowed[-1] * (np.array(allowed) / allowed[-1]) ** _POWER
            for name, allowed in cost.permitted.items()
        }
        try:
            counts = allocate(values, cost, budget).counts
        except InfeasibleBudgetError:
            return cost.smallest_counts
        if -_MISS <= latency.latency(counts) / budget - 1 <= 0:
            break
    return counts
