"""The coupled allocation problem: counts of greatest value within a budget of the true cost."""

from smcp_fx.allocation.result import Allocation
from smcp_fx.allocation.solve import allocate

__all__ = ["Allocation", "allocate"]
