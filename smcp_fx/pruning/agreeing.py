"""One choice for all ranks: rank 0 makes it, and the others adopt it, or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from smcp_fx.errors import InfeasibleBudgetError, TrainingError
from smcp_fx.pruning import ranks
from smcp_fx.pruning.selection import Choice


def agree(keep: Tensor, scores: Tensor, choose: Callable[[], Choice]) -> dict[str, float]:
    """Let rank 0 ``choose``, and write the units it keeps into ``keep`` ([units] bool) on every rank.

    Returns the choice's cost, the importance it keeps, and the bound on that. Raises the error of rank 0 on
    all ranks: `InfeasibleBudgetError` as it is, any other as a `TrainingError` on the other ranks.
    """
    failure: Exception | None = None
    message: dict[str, Any] = {}
    if ranks.rank() == 0:
        try:
            choice = choose()
            keep.copy_(choice.keep)
            allocation = choice.allocation
            kept = float(scores[choice.keep].sum())
            beyond = max(allocation.bound - choice.worth, 0.0)
            message = {"cost": allocation.cost, "importance": kept, "bound": kept + beyond}
        except Exception as error:
            failure = error
            message = {"error": str(error)}
            if isinstance(error, InfeasibleBudgetError):
                message |= {"smallest": error.smallest, "budget": error.budget}
    message = ranks.broadcast_json(message, keep.device)
    if failure is not None:
        raise failure
    if "smallest" in message:
        smallest, budget = message["smallest"], message["budget"]
        raise InfeasibleBudgetError(message["error"], smallest=smallest, budget=budget)
    if "error" in message:
        raise TrainingError(f"rank 0 could not solve for the masks: {message['error']}")
    ranks.broadcast(keep)
    return message
