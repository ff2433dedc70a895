"""The result of an allocation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from smcp_fx.allocation.problem import Array

#: A gap is measured against at least this share of the most that choices can differ by. Chosen, not measured.
_LEAST = 1e-6


@dataclass(frozen=True)
class Allocation:
    """Counts by group, their value and true cost, and a bound on how good any counts could be.

    ``bound`` is an upper bound on the value of any permitted counts within the budget, ``gap`` is
    the distance as a share of `gap_unit`. The paper's method proves none: its bound and gap are infinite.
    """

    counts: dict[str, int]
    value: float
    cost: float
    bound: float
    gap: float
    seconds: float
    method: str


def gap_unit(bound: float, values: Iterable[Array]) -> float:
    """Return the unit of gaps: the bound or, if that is next to nothing, 1e-6 of the values' total range.

    Values may be losses, and the best choice may lose nothing: then any gap is large beside the bound.
    """
    return max(abs(bound), _LEAST * float(sum(np.ptp(value) for value in values)))
