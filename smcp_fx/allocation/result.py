"""What an allocation says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """Counts a group, their value and true cost, and how good they are known to be.

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
