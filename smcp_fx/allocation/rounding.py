"""Avoid counts at which more channels would cost no more.

Runtimes work in steps of several channels, and some counts are slower than larger ones. A count is *dominated* when a
larger permitted one of its group is as fast or faster whatever the other groups keep: no allocation needs it. Counts
that are dominated only at the other groups' present counts are left to `grow_for_free`. Rows are accurate to a few
percent, so a count that is hardly faster than a larger one is left out as well: it may be slower.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smcp_fx.cost_model import CostTerm, NetworkCost, Width


def without_dominated(cost: NetworkCost, least_saving: float = 0.0) -> NetworkCost:
    """Return the cost without permitted counts that save nothing compared with a larger one of their group.

    ``least_saving``: also drop counts that save at most this share of the cost of the group's blocks, compared with
    the next larger one left and averaged over what the other groups may keep.
    """
    terms = _terms_of(cost)
    permitted = {group: _undominated(group, terms[group], cost, least_saving) for group in cost.permitted}
    return dataclasses.replace(cost, permitted=permitted)


def grow_for_free(cost: NetworkCost, counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts grown wherever that is free: no group is smaller, and the network costs no more.

    The costs of a group's terms never rise, so neither does the network's. Groups that keep nothing stay so.
    """
    terms, grown_counts = _terms_of(cost), dict(counts)
    grown = True
    while grown:
        grown = False
        for group, allowed in cost.permitted.items():
            upwards = np.asarray([c for c in allowed if c >= grown_counts[group] > 0], dtype=np.int64)
            if len(upwards) > 1:
                prices = sum(_along(term, group, upwards, grown_counts) for term in terms[group])
                free = np.flatnonzero(np.broadcast_to(prices, upwards.shape) <= np.ravel(prices)[0])
                if free[-1] > 0:
                    grown_counts[group], grown = int(upwards[free[-1]]), True
    return grown_counts


def _along(
    term: CostTerm, group: str, values: NDArray[np.int64], counts: Mapping[str, int]
) -> NDArray[np.float64]:
    """Return the term's costs, [values], with the group at each value and the other groups unchanged."""
    kept: dict[str, Any] = {**counts, group: values}
    axes = [
        np.asarray(width.constant + sum(per_unit * kept[g] for g, per_unit in width.groups)) + 0 * values
        for width in term.widths
    ]
    return np.asarray(term.price(*axes), dtype=np.float64)


def _terms_of(cost: NetworkCost) -> dict[str, list[CostTerm]]:
    terms: dict[str, list[CostTerm]] = defaultdict(list)
    for term in cost.terms:
        for group in term.groups:
            terms[group].append(term)
    return terms


def _undominated(
    group: str, terms: list[CostTerm], cost: NetworkCost, least_saving: float
) -> tuple[int, ...]:
    counts = cost.permitted[group]
    if not terms:
        return counts
    # Rows are counts, columns contexts: the terms' cost for every choice of the other groups.
    tables = [_contexts(group, term, cost) for term in terms]
    table = np.concatenate(tables, axis=1)
    means = np.sum([of_term.mean(axis=1) for of_term in tables], axis=0)
    kept = [len(counts) - 1]
    for index in reversed(range(len(counts) - 1)):
        dominated = (table[index + 1 :] <= table[index]).all(axis=1).any()
        saves = means[index] < (1 - least_saving) * means[kept[-1]]
        if not dominated and (saves or not least_saving):
            kept.append(index)
    return tuple(counts[index] for index in reversed(kept))


def _contexts(group: str, term: CostTerm, cost: NetworkCost) -> NDArray[np.float64]:
    """Return the term's prices, [counts of the group, contexts]."""
    own = np.asarray(cost.permitted[group], dtype=np.int64)
    axes = []
    for position, width in enumerate(term.widths):
        rest = _values(width, group, cost)
        shape = [len(own), *(len(rest) if other == position else 1 for other in range(len(term.widths)))]
        slope = dict(width.groups).get(group, 0)
        axes.append(
            (slope * own).reshape(len(own), *(1 for _ in term.widths))
            + rest.reshape(1, *shape[1:])
        )  # fmt: skip
    shape = list(np.broadcast_shapes(*(axis.shape for axis in axes)))
    prices = np.broadcast_to(term.price(*np.broadcast_arrays(*axes)), shape)
    flat: NDArray[np.float64] = np.asarray(prices, dtype=np.float64).reshape(len(own), -1)
    return flat


def _values(width: Width, group: str, cost: NetworkCost) -> NDArray[np.int64]:
    """Return every value that the width's part without ``group`` can take."""
    sums = {width.constant}
    for other, per_unit in width.groups:
        if other != group:
            sums = {total + per_unit * count for total in sums for count in cost.permitted[other]}
    return np.asarray(sorted(sums), dtype=np.int64)
