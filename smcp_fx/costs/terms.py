"""Terms of a network's cost: some scale with widths, some go with a branch."""

from __future__ import annotations

from collections.abc import Collection

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
    return NetworkCost(unit, permitted, tuple(kept), constant + sum(fixed.values()), fixed=fixed)


def proportional(factor: float) -> Price:
    """Return ``factor`` times the product of the widths."""

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        result = np.asarray(float(factor))
        for width in widths:
            result = result * width
        return result

    return price


def without_branch(channels: ChannelGraph, nodes: Collection[str], term: CostTerm) -> CostTerm:
    """Return the term, made 0 where a group keeps nothing and these nodes become useless (layer pruning).

    A term of two free widths, or one that is 0 by its own width then, stays as it is.
    """
    free = tuple(width for width in term.widths if width.groups)
    if channels.branches is None or len(free) > 1:
        return term
    own = [width.groups[0][0] for width in free if len(width.groups) == 1 and not width.constant]
    remover = channels.branches.remover(nodes, own)
    if remover is None:
        return term

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        given = iter(widths[:-1])
        every = [next(given) if width.groups else np.asarray(width.constant) for width in term.widths]
        return np.where(widths[-1] > 0, term.price(*every), 0.0)

    return CostTerm(term.name, (*free, Width(groups=((remover, 1),))), price)
