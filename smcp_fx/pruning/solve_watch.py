"""Warns of solves that show that training goes wrong."""

from __future__ import annotations

from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.pruning.loop_watch import tell
from smcp_fx.pruning.solve import Solve
from smcp_fx.schedule import Schedule
from smcp_fx.texts import amount

#: Masks oscillate when more than this share of the units changes back at a solve (chosen, not measured) ...
OSCILLATION = 0.05
#: ... this many solves in a row, with the target at rest. Chosen, not measured.
_IN_A_ROW = 5
#: Steps that may be skipped before a warning that a due solve cannot happen. Chosen, not measured.
_SKIPPED_FIRST = 5
#: A gradient scaler skips a step now and then to find its scale; more than this share is a fault. Chosen, not
#: measured.
_SKIPPED = 0.5


class SolveWatch:
    """Watches one pruner's solves, and gives each kind of warning once."""

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
        if gathers:  # solves without training between them answer other targets, as in a search for a latency
            oscillates = solve.reverted_share > OSCILLATION and not moving
            self._oscillating = self._oscillating + 1 if oscillates else 0
        if gathers and self._oscillating >= _IN_A_ROW:
            self._tell(
                "oscillation",
                f"masks oscillate: at each of the last {_IN_A_ROW} solves more than {OSCILLATION:.0%} of the units "
                f"changed back ({solve.reverted} of {solve.units} at step {solve.step}). Raise memory or tolerance "
                "in smcp_fx.config.MethodConfig, solve less often (every=), or lower the learning rate.",
            )
        if gathers and not any_importance:
            self._tell(
                "zero",
                f"all importances of the {gathers} steps before step {solve.step} are zero: no gradient reaches the "
                "masked layers. Check that the loss depends on them, and that step() comes before zero_grad().",
            )
        self._skipped(solve.step, gathers, solve.skipped, _SKIPPED if scaled else 0.0)

    def going_on(self, step: int, gathers: int, skipped: int) -> None:
        """Judge ``gathers`` counted and ``skipped`` steps, too few for a solve, before ``step``."""
        if skipped >= _SKIPPED_FIRST:
            self._skipped(step, gathers, skipped, _SKIPPED)

    def _skipped(self, step: int, gathers: int, skipped: int, allowed: float) -> None:
        if skipped > allowed * (gathers + skipped):
            self._tell(
                "not finite",
                f"{skipped} of the {gathers + skipped} steps before step {step} had gradients that are not finite; "
                "they were not counted. Lower the learning rate or clip gradients; with a GradScaler pass it, "
                "prepared.pruner.step(scaler), and start it lower (init_scale).",
            )

    def infeasible(self, error: InfeasibleBudgetError) -> None:
        """Warn early that a later solve will fail."""
        self._tell("infeasible", f"{error} Training goes on until the schedule asks for less than that.")

    def idle_target(self, target: float, full: float, unit: str) -> None:
        """Warn of a target above the full cost."""
        self._tell(
            "idle target",
            f"the target of {amount(target, unit)} is more than the whole network costs, {amount(full, unit)}: "
            'nothing is pruned for it. Ask for less, or for a share of the network\'s cost, as target=0.5 or "50%".',
        )

    def nothing_pruned(self, steps: int, full: float, target: float, unit: str) -> None:
        """Warn that a model was trained but never pruned."""
        self._tell(
            "nothing pruned",
            f"nothing was pruned: the network still costs {amount(full, unit)}, and the target is "
            f"{amount(target, unit)}. It was prepared without a schedule, and nothing solved for masks in {steps} "
            "counted steps. Pass schedule=smcp_fx.Schedule.scaled(epochs, steps_per_epoch) to prepare, or "
            "call prepared.pruner.solve() and train on before converting.",
        )

    def unfinished(self, steps: int, schedule: Schedule, cost: float, target: float, unit: str) -> None:
        """Warn that the target was not reached."""
        if steps >= schedule.last_step:
            self._tell(
                "unfinished",
                f"the schedule's last solve was due at step {schedule.last_step} of {steps}, and the network costs "
                f"{amount(cost, unit)}, not {amount(target, unit)}: masks were not solved for this target, as "
                "when a run is resumed with a shorter schedule or another target "
                "(call prepared.pruner.solve() and train on before converting), "
                "or where masks were averaged like weights (take the trained model's: "
                "average.smcp.load_state_dict(prepared.smcp.state_dict())).",
            )
            return
        coming = range(max(schedule.ramp_end, steps + 1), schedule.last_step + 1)
        arrives = next(step for step in coming if schedule.due(step))
        self._tell(
            "unfinished",
            f"the schedule brings the target after {arrives} steps, and only {steps} were counted: the "
            f"network costs {amount(cost, unit)}, not {amount(target, unit)}. The schedule is longer than "
            "the training, or prepared.pruner.step() was not called every step; "
            "Schedule.scaled(epochs, steps_per_epoch) fits one to a training.",
        )
