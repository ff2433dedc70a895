"""Notices solves that show a training gone wrong, and says so."""

from __future__ import annotations

from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.loop_watch import tell
from smcp_fx.schedule import Schedule
from smcp_fx.solve import Solve

#: Masks oscillate when more than this share of the units changes back at a solve ...
OSCILLATION = 0.05
#: ... this many solves in a row, with the target at rest.
_IN_A_ROW = 5
#: A gradient scaler leaves out a step now and then to find its scale; more than this share is a fault.
_SKIPPED = 0.5


class SolveWatch:
    """Watches one pruner's solves; every kind of warning is given once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._oscillating = 0

    def _tell(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            tell(message)

    def solved(self, solve: Solve, gathers: int, any_importance: bool, scaled: bool, moving: bool) -> None:
        """Judge a solve that rests on ``gathers`` steps.

        ``scaled``: a gradient scaler is in use; ``moving``: the target is still falling, so that masks change.
        """
        oscillates = solve.reverted_share > OSCILLATION and not moving
        self._oscillating = self._oscillating + 1 if oscillates else 0
        if self._oscillating >= _IN_A_ROW:
            self._tell(
                "oscillation",
                f"masks oscillate: at each of the last {_IN_A_ROW} solves more than {OSCILLATION:.0%} of the units "
                f"changed back ({solve.reverted} of {solve.units} at step {solve.step}). Raise memory or tolerance "
                "in PruningConfig, solve less often (every=), or lower the learning rate.",
            )
        if gathers and not any_importance:
            self._tell(
                "zero",
                f"all importances of the {gathers} steps before step {solve.step} are zero: no gradient reaches the "
                "masked layers. Check that the loss depends on them, and that step() comes before zero_grad().",
            )
        allowed = _SKIPPED * (gathers + solve.skipped) if scaled else 0
        if solve.skipped > allowed:
            self._tell(
                "not finite",
                f"{solve.skipped} of the {gathers + solve.skipped} steps before step {solve.step} had gradients that "
                "are not finite; they were not counted. Lower the learning rate or clip gradients; with a GradScaler "
                "pass it: prepared.pruner.step(scaler).",
            )

    def infeasible(self, error: InfeasibleBudgetError) -> None:
        """Say early what a later solve will fail at."""
        self._tell("infeasible", f"{error} Training goes on until the schedule asks for less than that.")

    def unfinished(self, steps: int, schedule: Schedule, cost: float, target: float, trained: bool) -> None:
        """Say that the target has not arrived, where training has begun."""
        if steps >= schedule.ramp_end or not (steps or trained):
            return
        self._tell(
            "unfinished",
            f"the schedule brings the target after {schedule.ramp_end} steps, and only {steps} were counted: the "
            f"network costs {cost:.6g}, not {target:.6g}. The schedule is longer than the training, or "
            "prepared.pruner.step() was not called every step; Schedule.scaled(epochs, steps_per_epoch) fits one to "
            "a training.",
        )
