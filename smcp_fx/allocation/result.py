"""The result of an allocation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """Counts by group, their value and true cost, and a bound on how good any counts could be.

    ``bound`` is an upper bound on the value of any permitted counts within the budget, ``gap`` is
    ``(bound - value) / |bound|``. The paper's method proves none: its bound and gap are infinite.
    """

    counts: dict[str, int]
    value: float
    cost: float
    bound: float
    gap: float
    seconds: float
    method: str
