"""The fewest mask changes that reach a worth within a cost.

For given counts, the fewest changes are easy to find. Kept units stay as far as the count allows. Then the
best unit left out replaces the worst kept one, the most valuable swaps over all groups first, until the worth
is reached. The counts themselves are searched: from each start they move back towards the present ones, one
group or a pair of groups at a time, as long as that saves changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smcp_fx.cost_model import NetworkCost

Floats = NDArray[np.float64]

#: Most evaluations of counts in a search; more would cost more time than steadier masks are worth. Chosen, not
#: measured.
_EVALUATIONS = 400


@dataclass(frozen=True)
class Move:
    """Counts by group, further swaps by group, and the number of units that change in all."""

    counts: dict[str, int]
    swaps: dict[str, int]
    changes: int


class Settling:
    """Searches for counts that reach ``floor`` with few changes, at a cost between ``least`` and ``most``.

    ``scores`` and ``kept`` hold, for each group, its units' importances and whether they are kept now;
    ``worth`` gives the worth of keeping an amount of a group's importance (elementwise, increasing, concave);
    ``together`` lists groups that return to their present counts together (the groups of one branch).
    """

    def __init__(
        self,
        scores: Mapping[str, Floats],
        kept: Mapping[str, NDArray[np.bool_]],
        worth: Callable[[str, Floats], Floats],
        cost: NetworkCost,
        least: float,
        most: float,
        together: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.cost = cost
        self._worth = worth
        self._together = together
        self.least = least
        self.most = most
        self.present = {name: int(mask.sum()) for name, mask in kept.items()}
        self._inside = {name: np.sort(scores[name][kept[name]]) for name in scores}  # worst first
        self._outside = {name: np.sort(scores[name][~kept[name]])[::-1] for name in scores}  # best first
        self._terms: dict[str, list[int]] = {name: [] for name in cost.permitted}
        for index, term in enumerate(cost.terms):
            for group in term.groups:
                self._terms[group].append(index)
        self._cache: dict[tuple[str, int], tuple[float, Floats]] = {}
        self._left = 0

    def fewest(self, starts: list[Mapping[str, int]], floor: float) -> Move | None:
        """Return the move of fewest changes found from the starts; None if none reaches the floor."""
        self._left = _EVALUATIONS
        best: Move | None = None
        for start in starts:
            move = self._descend(dict(start), floor)
            if move is not None and (best is None or move.changes < best.changes):
                best = move
        return best

    def swaps(self, name: str, count: int, wanted: int) -> int:
        """Return the wanted number of swaps, but at most the number that gain at this count of the group."""
        return min(wanted, self._group(name, count)[1].size)

    def _descend(self, counts: dict[str, int], floor: float) -> Move | None:
        prices = [term.cost(counts) for term in self.cost.terms]
        total = self.cost.constant + sum(prices)
        current = self._move(counts, floor)
        if current is None or not self.least <= total <= self.most:
            return None
        improved = True
        while improved and self._left > 0:
            improved = False
            away = sorted(
                (name for name in counts if counts[name] != self.present[name]),
                key=lambda name: -abs(counts[name] - self.present[name]),
            )
            # Empty if masks set by hand keep a count that is not permitted, with no permitted one on the way.
            towards = {name: self._towards(name, counts[name]) for name in away}
            singles = [{name: count} for name in away for count in towards[name]]
            pairs = [
                {a: towards[a][0], b: towards[b][0]}
                for i, a in enumerate(away)
                for b in away[i + 1 :]
                if (counts[a] < self.present[a]) != (counts[b] < self.present[b])
                and towards[a]
                and towards[b]
            ]
            branches = [
                {name: self.present[name] for name in names if counts[name] != self.present[name]}
                for names in self._together
                if all(self.present[name] in self.cost.permitted[name] for name in names)
            ]
            for change in (*singles, *pairs, *(branch for branch in branches if len(branch) > 1)):
                if self._left <= 0:
                    break
                after = {**counts, **change}
                touched = {index for name in change for index in self._terms[name]}
                cost = total + sum(self.cost.terms[i].cost(after) - prices[i] for i in touched)
                if not self.least <= cost <= self.most:
                    continue
                move = self._move(after, floor)
                if move is not None and move.changes < current.changes:
                    current, counts = move, after
                    prices = [term.cost(counts) for term in self.cost.terms]
                    total = self.cost.constant + sum(prices)
                    improved = True
                    break
        return current

    def _towards(self, name: str, count: int) -> list[int]:
        """Return permitted counts between the present one and ``count``: the present one, halfway, then near."""
        low, high = sorted((count, self.present[name]))
        between = [c for c in self.cost.permitted[name] if low <= c <= high and c != count]
        if not between:
            return []
        between.sort(key=lambda c: abs(c - self.present[name]))
        return list(dict.fromkeys([between[0], between[len(between) // 2], between[-1]]))

    def _move(self, counts: Mapping[str, int], floor: float) -> Move | None:
        """Return the fewest changes at these counts that reach the floor."""
        self._left -= 1
        worth, gains, owners = 0.0, [], []
        changes = 0
        names = list(counts)
        for index, name in enumerate(names):
            kept, swaps = self._group(name, counts[name])
            worth += kept
            changes += abs(counts[name] - self.present[name])
            if swaps.size:
                gains.append(swaps)
                owners.append(np.full(swaps.size, index))
        missing = floor - worth
        made: dict[str, int] = {}
        if missing > 0:
            if not gains:
                return None
            all_gains, all_owners = np.concatenate(gains), np.concatenate(owners)
            order = np.argsort(-all_gains, kind="stable")
            reached = np.cumsum(all_gains[order])
            if reached[-1] < missing:
                return None
            needed = int(np.searchsorted(reached, missing)) + 1
            for index in all_owners[order[:needed]]:
                made[names[index]] = made.get(names[index], 0) + 1
            changes += 2 * needed
        return Move(dict(counts), made, changes)

    def _group(self, name: str, count: int) -> tuple[float, Floats]:
        """Return the worth of the units that stay at this count, and the gains of swaps, descending."""
        key = (name, count)
        if key not in self._cache:
            inside, outside = self._inside[name], self._outside[name]
            if count <= inside.size:
                stay, rest = inside[inside.size - count :], outside
            else:
                added = count - inside.size
                stay, rest = np.sort(np.concatenate([inside, outside[:added]])), outside[added:]
            pairs = min(stay.size, rest.size)
            gains = rest[:pairs] - stay[:pairs]
            after = stay.sum() + np.cumsum([0.0, *gains[gains > 0]])
            worth = self._worth(name, after)
            self._cache[key] = float(worth[0]), np.diff(worth)
        return self._cache[key]


def settled_mask(scores: Floats, kept: NDArray[np.bool_], count: int, swaps: int) -> NDArray[np.bool_]:
    """Return a group's mask after a move: ``count`` units, as few changed as possible, then ``swaps`` swaps."""
    rank = np.argsort(-scores, kind="stable")
    inside = [unit for unit in rank if kept[unit]]
    outside = [unit for unit in rank if not kept[unit]]
    stay = inside[:count] + outside[: max(0, count - len(inside))]
    rest = outside[max(0, count - len(inside)) :]
    stay.sort(key=lambda unit: scores[unit])
    mask = np.zeros_like(kept)
    mask[stay[swaps:]] = True
    mask[rest[:swaps]] = True
    return mask
