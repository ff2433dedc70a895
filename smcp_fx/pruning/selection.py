"""Which units to keep: the best within a target, or a choice near it that changes few masks.

Importances are noisy, and very different choices can be worth the same. Masks that follow every new optimum
keep the network from learning; masks that never move ignore importance. So the selector takes the choice that
moves the fewest units among all choices worth nearly as much as the best.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcp_fx.allocation import Allocation, allocate
from smcp_fx.allocation.rounding import grow_for_free
from smcp_fx.channels.branches import Branches
from smcp_fx.config import PruningConfig
from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.pruning.settling import Settling, settled_mask
from smcp_fx.pruning.state import PruningState
from smcp_fx.pruning.worth import Worth

#: Bonuses for kept units, in mean importances: each gives an allocation to start from. Chosen, like all
#: constants here: together they settle the masks (docs: experiments.md); each alone was not measured.
_BONUSES = (0.25, 2.0)
#: Further starts: how many permitted counts a group may move from the present one.
_WINDOWS = (1, 2, 4)
#: A choice that leaves more than this share of the target unspent cannot replace the best one.
_UNSPENT = 0.01
#: Shares of the tolerance that a choice which moves masks may use up, tried in this order (the first ones only
#: while the target is still moving) ...
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 1.0)
_SHARES_MOVING = 2
#: ... until one changes no more than this share of the units.
_FEW = 0.01


@dataclass(frozen=True)
class Choice:
    """Units to keep ([units] bool), their allocation, and their worth."""

    keep: Tensor
    allocation: Allocation
    worth: float


class Selector:
    """Chooses units for importances ``scores`` ([units] float32, of the free groups) within a target cost.

    ``branches``: with layer pruning, the groups that may keep nothing. If a group is useless without an empty
    one, it keeps nothing either: its importances belong to a removed branch.
    """

    def __init__(self, state: PruningState, config: PruningConfig, branches: Branches | None = None) -> None:
        self.state = state
        self.config = config
        self.branches = branches

    def best(self, scores: Tensor, cost: NetworkCost, target: float) -> Choice:
        """Return the choice of greatest worth; `InfeasibleBudgetError` if no permitted one is in budget."""
        return self._choose(scores, scores, self._worth(scores), self._coupled(cost), target)

    def settled(
        self,
        scores: Tensor,
        cost: NetworkCost,
        target: float,
        moving: bool = False,
        worth: Worth | None = None,
        scheduled: bool = True,
    ) -> Choice:
        """Return a choice within ``tolerance`` of the best that changes fewest masks: none, if they fit.

        The tolerance is a share of the importance that the best choice keeps. ``worth``: used if ``scores``
        are not those of whole groups. Without a schedule, changes disturb no training, and the best choice is
        returned. While the target is ``moving``, masks must change anyway. They then stay closer to the best,
        which leaves tolerance for standing still once the target has arrived.
        """
        cost = self._coupled(cost)
        worth = worth or self._worth(scores)
        best = self._choose(scores, scores, worth, cost, target)
        if not (self.config.tolerance and scheduled):
            return best
        slack = self.config.tolerance * float(scores[best.keep].sum())
        present = self._present(scores, worth, cost)
        if present is not None and self._fits(present, best, slack, target):
            return _bounded(present, best)
        names = list(cost.permitted)
        values = {name: self.state.of_group(scores, name).double().cpu().numpy() for name in names}
        kept = {name: self.state.of_group(self.state.keep, name).cpu().numpy() for name in names}
        least = min(best.allocation.cost, (1 - _UNSPENT) * target)
        together = () if self.branches is None else self.branches.sets()
        search = Settling(values, kept, worth.of, cost, least, target, together)
        starts: list[Mapping[str, int]] = [best.allocation.counts]
        if present is not None:
            starts.append(present.allocation.counts)  # swaps alone may suffice
        for bonus in _BONUSES:
            favoured = scores + bonus * scores.mean() * self.state.keep
            starts.append(self._choose(favoured, scores, worth, cost, target).allocation.counts)
        for window in _WINDOWS:
            near = dataclasses.replace(cost, permitted=self._near(cost.permitted, window))
            with contextlib.suppress(InfeasibleBudgetError):
                starts.append(self._choose(scores, scores, worth, near, target).allocation.counts)
        # If masks must move, move them closer to the best than necessary, unless that takes many changes:
        # otherwise every solve would move them.
        move = None
        for share in _SHARES[:_SHARES_MOVING] if moving else _SHARES:
            move = search.fewest(starts, best.worth - share * slack)
            if move is not None and move.changes <= _FEW * self.state.keep.numel():
                break
        if move is None:
            return best
        counts = grow_for_free(cost, move.counts)
        keep = self.state.keep.clone()
        for name in names:
            swaps = search.swaps(name, counts[name], move.swaps.get(name, 0))
            mask = settled_mask(values[name], kept[name], counts[name], swaps)
            self.state.of_group(keep, name).copy_(torch.from_numpy(mask))
        value = worth.of_units(scores, keep, self.state)
        moved = Allocation(counts, value, cost.cost(counts), 0.0, 0.0, 0.0, "settled")
        return _bounded(Choice(keep, moved, value), best)

    def _fits(self, choice: Choice, best: Choice, slack: float, target: float) -> bool:
        """Whether the choice is worth enough and uses up the budget."""
        cost = choice.allocation.cost
        return (
            choice.worth >= best.worth - slack
            and min(best.allocation.cost, (1 - _UNSPENT) * target) <= cost <= target
        )

    def _present(self, scores: Tensor, worth: Worth, cost: NetworkCost) -> Choice | None:
        """Return the present masks as a choice, if their counts are permitted."""
        counts = self.counts()
        if any(counts[name] not in permitted for name, permitted in cost.permitted.items()):
            return None
        value = worth.of_units(scores, self.state.keep, self.state)
        as_is = Allocation(counts, value, cost.cost(counts), value, 0.0, 0.0, "as is")
        return Choice(self.state.keep.clone(), as_is, value)

    def counts(self) -> dict[str, int]:
        """Return the number of units kept now, by free group."""
        return {name: int(mask.sum()) for name, mask in self.state.free_masks().items()}

    def _worth(self, scores: Tensor) -> Worth:
        return Worth(scores, self.state, self.config.width_exponent)

    def _choose(
        self, ranking: Tensor, scores: Tensor, worth: Worth, cost: NetworkCost, target: float
    ) -> Choice:
        """Return the best counts for ``ranking``, with each group's best units, judged by ``scores``."""
        state, present = self.state, self.counts()
        values, ranked = {}, {}
        for name, permitted in cost.permitted.items():
            ordered, ranked[name] = torch.sort(state.of_group(ranking, name), descending=True, stable=True)
            total = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumsum(ordered.double().cpu(), 0)])
            values[name] = worth.of(name, total[torch.tensor(permitted)].numpy())
        allowed = all(present[name] in permitted for name, permitted in cost.permitted.items())
        allocation = allocate(
            values, cost, target, self.config.allocation, current=present, start=present if allowed else None
        )
        if self.branches is not None:
            counts = self.branches.closed(allocation.counts)
            if counts != allocation.counts:
                allocation = dataclasses.replace(allocation, counts=counts, cost=cost.cost(counts))
        keep = torch.zeros_like(state.keep)
        for name, count in allocation.counts.items():
            state.of_group(keep, name)[ranked[name][:count]] = True
        return Choice(keep, allocation, worth.of_units(scores, keep, state))

    def _coupled(self, cost: NetworkCost) -> NetworkCost:
        """Return the cost with the counts that limits allow, and prohibitive prices for useless units.

        (The paper's linearisation gets no prohibitive prices: it would ascribe them to single groups.)
        """
        cost = self.within_limits(cost)
        if self.branches is None or self.config.allocation == "paper":
            return cost
        beyond = 2.0 * (abs(cost.constant) + sum(abs(term.cost(cost.full_counts)) for term in cost.terms))
        paired = {frozenset(term.groups) for term in cost.terms}
        terms = [
            CostTerm(f"{b} without {a}", (_count_of(a), _count_of(b)), _prohibitive(beyond))
            for a, b in self.branches.couplings(paired)
            if 0 in cost.permitted[a] and 0 in cost.permitted[b]
        ]
        return dataclasses.replace(cost, terms=(*cost.terms, *terms))

    def within_limits(self, cost: NetworkCost) -> NetworkCost:
        """Return the cost with only the permitted counts that satisfy the user's limits on widths."""
        limited = self.state.limited
        if not limited:
            return cost
        allowed = {
            name: tuple(count for count in counts if count in limited[name]) or limited[name]
            for name, counts in cost.permitted.items()
            if name in limited
        }
        return dataclasses.replace(cost, permitted={**cost.permitted, **allowed})

    def _near(self, permitted: Mapping[str, tuple[int, ...]], window: int) -> dict[str, tuple[int, ...]]:
        """Return permitted counts at most ``window`` steps from the present one (or the nearest below it)."""
        present = self.counts()
        near = {}
        for name, allowed in permitted.items():
            at = max((i for i, count in enumerate(allowed) if count <= present[name]), default=0)
            near[name] = allowed[max(0, at - window) : at + window + 1]
        return near


def _count_of(group: str) -> Width:
    return Width(groups=((group, 1),))


def _prohibitive(price: float) -> Price:
    def priced(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.where((a == 0) & (b > 0), price, 0.0)

    return priced


def _bounded(choice: Choice, best: Choice) -> Choice:
    """Return the choice with the bound proved for the best one."""
    allocation = dataclasses.replace(choice.allocation, bound=best.allocation.bound)
    return dataclasses.replace(choice, allocation=allocation)
