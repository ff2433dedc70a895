"""What a network costs as a function of the channels it keeps.

A `NetworkCost` is a cost bound to one network: a sum of terms, one a layer (or fused block), each a function
of its widths (an allocator takes one or two: see `NetworkCost.at`), and each width an affine function of the groups'
counts:

    T(p) = constant + sum over terms of  price(c_in(p), c_out(p)),      c(p) = constant + sum of a_k * p_k

(SMCP, "Derivation of the cost-constrained optimization problem"; a concat's c_in is a sum over several
groups.) The allocator sees nothing else of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smcp_fx.errors import InputError

#: Widths (int arrays that broadcast against each other, channels) to costs (float64, the broadcast shape).
Price = Callable[..., NDArray[np.float64]]


@dataclass(frozen=True)
class Width:
    """Channels on one axis of a layer: ``constant + sum(per_unit * count of group)``."""

    constant: int = 0
    groups: tuple[tuple[str, int], ...] = ()

    def channels(self, counts: Mapping[str, int]) -> int:
        """Return the channels left when group ``k`` keeps ``counts[k]`` units."""
        return self.constant + sum(per_unit * counts[group] for group, per_unit in self.groups)


@dataclass(frozen=True)
class CostTerm:
    """The cost of one layer or fused block: ``price(*widths)``, widths in channels."""

    name: str
    widths: tuple[Width, ...]
    price: Price = field(compare=False, repr=False)

    def cost(self, counts: Mapping[str, int]) -> float:
        """Return the cost at these counts, in the unit of the `NetworkCost` it belongs to."""
        return float(self.price(*(np.asarray(width.channels(counts)) for width in self.widths)))

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups this term depends on, each once, in order of first use."""
        return tuple(dict.fromkeys(group for width in self.widths for group, _ in width.groups))


class CostSource(Protocol):
    """A network's true cost, which a sum of terms can only follow near some counts."""

    def around(self, counts: Mapping[str, int]) -> NetworkCost:
        """Return the cost as a sum of terms that is exact at these counts."""
        ...

    def learn(self, counts: Mapping[str, int], doubt: float) -> bool:
        """Find out the cost at these counts to within this share of it; return whether prices changed."""
        ...

    @property
    def as_of(self) -> float:
        """The time of the last result that the cost rests on (seconds)."""
        ...

    def price_as_of(self, as_of: float) -> bool:
        """Use only the results found up to then; return whether that was possible."""
        ...


@dataclass(frozen=True)
class NetworkCost:
    """Cost of one network for any permitted counts.

    ``permitted[k]`` holds group k's permitted counts, ascending; the last is its full size. Groups without
    a choice (pinned) are not listed: they are in the widths' constants. ``fixed``: what is known, by name, of the
    ``constant``. ``source``: the true cost, if this sum of terms is exact at some counts only; see `at`.
    """

    unit: str
    permitted: Mapping[str, tuple[int, ...]]
    terms: tuple[CostTerm, ...]
    constant: float = 0.0
    source: CostSource | None = field(default=None, compare=False, repr=False)
    fixed: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for term in self.terms:
            for group in term.groups:
                if group not in self.permitted:
                    raise InputError(
                        f"cost term {term.name!r} depends on group {group!r}, which has no permitted counts"
                    )

    def cost(self, counts: Mapping[str, int]) -> float:
        """Return T(p), all counts taken together, in ``unit``."""
        return self.constant + sum(term.cost(counts) for term in self.terms)

    def by_name(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Return the cost of each layer, block or parameter at these counts, as far as it is known by name."""
        costs = dict(self.fixed)
        for term in self.terms:
            costs[term.name] = costs.get(term.name, 0.0) + term.cost(counts)
        return costs

    @property
    def rest(self) -> float:
        """The part of the constant cost that belongs to no name."""
        return self.constant - sum(self.fixed.values())

    def at(self, counts: Mapping[str, int]) -> NetworkCost:
        """Return the cost as a sum that is exact at these counts: this one, unless there is a ``source``."""
        return self if self.source is None else self.source.around(counts)

    def learn(self, counts: Mapping[str, int], doubt: float) -> bool:
        """Find out the cost at these counts to within the share ``doubt`` of it; return whether prices changed.

        `at` then returns the cost at the new prices. Exactly known costs never change.
        """
        return self.source is not None and self.source.learn(counts, doubt)

    @property
    def full_counts(self) -> dict[str, int]:
        """Every group at its full size."""
        return {group: counts[-1] for group, counts in self.permitted.items()}

    @property
    def smallest_counts(self) -> dict[str, int]:
        """Every group at its least permitted count."""
        return {group: counts[0] for group, counts in self.permitted.items()}
