"""Errors of solves that find no masks: they name the obstacle and the remedy."""

from __future__ import annotations

from smcp_fx.channels import ChannelGraph
from smcp_fx.errors import InfeasibleBudgetError, TrainingError
from smcp_fx.texts import amount


def out_of_reach(
    error: InfeasibleBudgetError, channels: ChannelGraph, unit: str, full_cost: float, multiple: int
) -> InfeasibleBudgetError:
    """Return the error with costs in words and the groups that must stay whole."""
    pinned = [f"{group.name} ({group.pinned[0]})" for group in channels.groups if not group.free]
    shown = ", ".join(pinned[:5]) + (f" and {len(pinned) - 5} more" if len(pinned) > 5 else "")
    limits = dict.fromkeys(text for group in channels.groups for text in group.limits)
    held = f" Limits on widths: {', '.join(map(repr, limits))}." if limits else ""
    return InfeasibleBudgetError(
        f"the target of {amount(error.budget, unit)} cannot be reached: the smallest reachable cost is "
        f"{amount(error.smallest, unit)} ({error.smallest:.6g} {unit}), {error.smallest / full_cost:.1%} of the "
        f"unpruned {amount(full_cost, unit)}. These groups must stay whole: {shown or 'none'}.{held} Raise the "
        f"target, or let fewer channels be kept (multiple={multiple}).",
        smallest=error.smallest,
        budget=error.budget,
    )


def no_importance(skipped: int, gathers: int) -> TrainingError:
    """Return the error for a solve without importances; ``skipped``: steps that were not counted."""
    if skipped and not gathers:
        return TrainingError(
            f"no importance is known: all {skipped} steps so far had gradients that are not finite, and were "
            "not counted. Check the loss for NaN and infinite values, lower the learning rate or clip "
            "gradients; with a GradScaler pass it, prepared.pruner.step(scaler)"
        )
    return TrainingError(
        "every importance is zero, so nothing tells which channels matter: train with "
        "prepared.pruner.step() for some steps before solving, and check that gradients reach the weights"
    )
