"""The two solvers the paper compares: a dynamic program over scaled costs, and plain meet-in-the-middle.

Both are here to be measured against, not to be used: the first is exact only to the digits it keeps, the
second forms every pair of partial choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BaselineAnswer:
    """The options taken, their value (float64 sum), and the pairs of partial choices looked at."""

    choices: tuple[int, ...]
    value: float
    pairs: int


def solve_scaled(
    values: Sequence[Floats], costs: Sequence[Floats], capacity: float, scale: float
) -> BaselineAnswer:
    """Maximise over integer costs floor(cost * scale), capacity floor(capacity * scale).

    The dynamic program of Dudzinski and Walukiewicz (1987), as the paper uses it ("Solving the
    multiple-choice knapsack problem"): O(options * scale * capacity) time, and O(groups * scale * capacity)
    memory to know the options. Rounding down may choose options that together exceed the capacity by
    groups / scale.
    """
    room = int(np.floor(capacity * scale))
    best = np.full(room + 1, -np.inf)
    best[0] = 0.0
    taken: list[NDArray[np.int16]] = []
    for v, c in zip(values, costs, strict=True):
        extended = np.full_like(best, -np.inf)
        option = np.full(room + 1, -1, np.int16)
        for i, (value, cost) in enumerate(zip(v, np.floor(c * scale).astype(np.int64), strict=True)):
            if cost > room:
                continue
            candidate = best[: room + 1 - cost] + value
            better = candidate > extended[cost:]
            extended[cost:][better] = candidate[better]
            option[cost:][better] = i
        taken.append(option)
        best = extended
    at = int(best.argmax())
    value = float(best[at])
    choices: list[int] = []
    for option, c in zip(reversed(taken), reversed(costs), strict=True):
        choices.append(int(option[at]))
        at -= int(np.floor(c[choices[-1]] * scale))
    return BaselineAnswer(tuple(reversed(choices)), value, sum(map(len, values)) * (room + 1))


#: Most pairs in one merge. Chosen, not measured.
_MOST_PAIRS = 1 << 27


def solve_by_merging(
    values: Sequence[Floats], costs: Sequence[Floats], capacity: float
) -> BaselineAnswer | None:
    """Merge the first group with the last, the second with the last but one, and so on, until one is left.

    The paper's Algorithm 2: a merge forms all pairs and condenses them to those that no cheaper one matches
    in value and that fit by themselves. None if one merge would form more than 2^27.
    """
    lists = [
        _condense(v, c, np.arange(len(v))[:, None], capacity) for v, c in zip(values, costs, strict=True)
    ]
    owners = [[g] for g in range(len(lists))]
    pairs = 0
    while len(lists) > 1:
        merged, merged_owners = [], []
        half = len(lists) // 2
        for a in range(half):
            b = len(lists) - 1 - a
            (v1, c1, u1), (v2, c2, u2) = lists[a], lists[b]
            if len(v1) * len(v2) > _MOST_PAIRS:
                return None
            pairs += len(v1) * len(v2)
            v, c = np.add.outer(v1, v2).ravel(), np.add.outer(c1, c2).ravel()
            v, c, u = _condense(v, c, np.arange(len(v))[:, None], capacity)
            i, j = np.divmod(u[:, 0], len(v2))
            merged.append((v, c, np.hstack([u1[i], u2[j]])))
            merged_owners.append(owners[a] + owners[b])
        if len(lists) % 2:
            merged.append(lists[half])
            merged_owners.append(owners[half])
        lists, owners = merged, merged_owners
    v, _, used = lists[0]
    choices = np.empty(len(values), np.int64)
    choices[owners[0]] = used[v.argmax()]
    return BaselineAnswer(tuple(choices.tolist()), float(v.max()), pairs)


def _condense(
    v: Floats, c: Floats, used: NDArray[np.int64], capacity: float
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Keep what fits and is worth more than everything that costs no more."""
    fits = np.flatnonzero(c <= capacity)
    order = fits[np.lexsort((-v[fits], c[fits]))]
    ranked = v[order]
    keep = np.ones(len(order), bool)
    keep[1:] = ranked[1:] > np.maximum.accumulate(ranked)[:-1]
    order = order[keep]
    return v[order], c[order], used[order]
