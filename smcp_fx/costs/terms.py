"""Terms of a network's cost: some scale with widths, some go with a branch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width


def network_cost(unit: str, channels: ChannelGraph, terms: list[CostTerm], constant: float) -> NetworkCost:
    """Return the sum of terms; those that no choice changes join the constant."""
    permitted = {group.name: group.permitted for group in channels.groups if group.free}
    kept: list[CostTerm] = []
    fixed: dict[str, float] = {}
    for term in terms:
        if term.groups:
            kept.append(term)
        else:
            fixed[term.name] = fixed.get(term.name, 0.0) + term.cost({})
    cost = NetworkCost(unit, permitted, tuple(kept), constant + sum(fixed.values()), fixed=fixed)
    if all(len(term.widths) <= 2 for term in kept):
        return cost
    return replace(cost, source=ManyWidths(cost))


@dataclass(frozen=True)
class ManyWidths:
    """A known cost with terms of more than two widths (bilinear layers): an allocator gets it to first order.

    Implements `smcp_fx.cost_model.CostSource`.
    """

    whole: NetworkCost
    as_of: float = 0.0

    def around(self, counts: Mapping[str, int]) -> NetworkCost:
        """Return the cost as a sum of terms that is exact at these counts, and wherever two of the widths change."""
        terms: list[CostTerm] = []
        constant = self.whole.constant
        for term in self.whole.terms:
            if len(term.widths) <= 2:
                terms.append(term)
                continue
            present = [width.channels(counts) for width in term.widths]
            terms.append(CostTerm(term.name, term.widths[:2], _with(term.price, present, (0, 1))))
            for place in range(2, len(present)):
                terms.append(CostTerm(term.name, (term.widths[place],), _with(term.price, present, (place,))))
                constant -= term.cost(counts)
        return replace(self.whole, terms=tuple(terms), constant=constant, source=self)

    def learn(self, counts: Mapping[str, int], doubt: float) -> bool:
        """Return False: all prices are known."""
        return False

    def price_as_of(self, as_of: float) -> bool:
        """Return True: prices never change."""
        return True


def _with(price: Price, present: Sequence[int], places: Sequence[int]) -> Price:
    """Return the price as a function of the widths at these places, with the others unchanged."""

    def partial(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        every: list[Any] = [np.asarray(width) for width in present]
        for place, width in zip(places, widths, strict=True):
            every[place] = width
        return price(*every)

    return partial


def proportional(factor: float) -> Price:
    """Return ``factor`` times the product of the widths."""

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        result = np.asarray(float(factor))
        for width in widths:
            result = result * width
        return result

    return price


def without_branch(channels: ChannelGraph, nodes: Collection[str], term: CostTerm) -> CostTerm:
    """Return the term, made 0 if a group keeps nothing and these nodes become useless (layer pruning).

    A term of two free widths, or one whose own width makes it 0 then, stays unchanged.
    """
    free = tuple(width for width in term.widths if width.groups)
    if channels.branches is None or len(free) > 1:
        return term
    own = [width.groups[0][0] for width in free if len(width.groups) == 1 and not width.constant]
    remover = channels.branches.remover(nodes, own)
    if remover is None:
        return term

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        sizes = iter(widths[:-1])
        every = [next(sizes) if width.groups else np.asarray(width.constant) for width in term.widths]
        return np.where(widths[-1] > 0, term.price(*every), 0.0)

    return CostTerm(term.name, (*free, Width(groups=((remover, 1),))), price)
