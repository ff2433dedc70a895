"""The pruner: gathers importances while a model trains, and solves for its masks when they are due."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smcp_fx.config import PruningConfig
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs import absolute_target
from smcp_fx.errors import InfeasibleBudgetError, TrainingError
from smcp_fx.importance import TaylorImportance
from smcp_fx.schedule import Schedule
from smcp_fx.selection import Selector

if TYPE_CHECKING:
    from smcp_fx.prepare import PreparedModel


@dataclass(frozen=True)
class Solve:
    """One solve: what was aimed at, what it costs, what it keeps, and what it changed.

    Costs are in the cost model's unit; ``importance_kept`` is the share of all importance that is kept,
    ``bound`` the most any choice within the target could keep; ``changed`` counts units whose mask changed, by
    group, ``returned`` those that came back.
    """

    step: int
    target: float
    cost: float
    importance_kept: float
    bound: float
    changed: dict[str, int]
    returned: int
    units: int
    seconds: float

    @property
    def changed_share(self) -> float:
        """Share of the free units whose mask changed."""
        return sum(self.changed.values()) / self.units if self.units else 0.0


class Pruner:
    """Belongs to a prepared model; call `step` once an optimiser step.

    ``cost`` is the network's cost, ``target`` the final one in its unit; ``correction`` is how many times the
    predicted cost the measured one is (1 until somebody measures), by which every target is divided.
    ``history`` lists the solves.
    """

    def __init__(
        self,
        model: PreparedModel,
        cost: NetworkCost,
        target: float,
        config: PruningConfig,
        schedule: Schedule | None,
    ) -> None:
        self._model = model
        self.cost = cost
        self.target = target
        self.config = config
        self.schedule = schedule
        self.correction = 1.0
        self.history: list[Solve] = []
        self._state = model.smcp
        self._selector = Selector(model.smcp, config)
        self._importance = TaylorImportance(model.channels, model.smcp, config.importance)
        self.full_cost = cost.cost(cost.full_counts)

    # ---- in the training loop ---------------------------------------------------------------------------

    def step(self, scaler: Any = None) -> Solve | None:
        """Gather importance, and solve for the masks when the schedule says so.

        Call after the last ``backward()`` of an optimiser step and before clipping and
        ``optimizer.step()``. ``scaler``: the `GradScaler` in use, unless it has unscaled the gradients
        already. Steps with gradients that are not finite are neither gathered nor counted. Returns the
        solve, if there was one.
        """
        state = self._state
        scale = float(scaler.get_scale()) if scaler is not None else 1.0
        units = self._importance(self._model, scale)
        if not bool(torch.isfinite(units).all()):
            return None
        momentum = self.config.momentum
        state.gathered.mul_(momentum).add_(units, alpha=1 - momentum)
        state.gathers += 1
        state.steps += 1
        step = int(state.steps)
        if self.schedule is None or not self.schedule.due(step):
            return None
        target = self.schedule.target(step, self.full_cost, self.target / self.correction)
        return self._solve(target, step)

    def solve(self, target: float | str | None = None) -> Solve:
        """Solve for masks now, from the importances gathered so far.

        ``target``: a fraction of the unpruned cost, an absolute cost with its unit, or None for the model's
        own target. Raises `InfeasibleBudgetError` when no permitted choice reaches it.
        """
        wanted = self.target if target is None else absolute_target(target, self.full_cost, self.cost.unit)
        return self._solve(wanted / self.correction, int(self._state.steps))

    def check_target(self) -> None:
        """Raise `InfeasibleBudgetError` now if no permitted choice reaches the final target."""
        state = self._state
        flat = torch.ones_like(state.gathered)
        try:
            self._selector.best(flat, self.cost, self.target)
        except InfeasibleBudgetError as error:
            raise self._explained(error) from error

    # ---- what a solve rests on --------------------------------------------------------------------------

    @property
    def importance(self) -> dict[str, Tensor]:
        """Importances of every free group's units, [size], as the next solve would see them."""
        vector = self._scores()
        return {g.name: self._state.of_group(vector, g.name) for g in self._model.channels.groups if g.free}

    @property
    def counts(self) -> dict[str, int]:
        """Units kept, by free group."""
        return self._selector.counts()

    def _scores(self) -> Tensor:
        """Momentum average since the last solve, blended with what was known before it.

        Each is a share of its sum, so that solves count alike whatever the loss (and its gradients) were.
        """
        state = self._state
        gathers = int(state.gathers)
        if gathers == 0:
            return state.remembered.clone()
        fresh = state.gathered / state.gathered.sum().clamp(min=torch.finfo(torch.float32).tiny)
        solves = int(state.solves)
        memory = min(self.config.memory, solves / (solves + 1))  # a plain mean until the memory is full,
        if self.schedule is not None and int(state.steps) >= self.schedule.ramp_end and solves:
            memory = self.config.memory  # or until the target has arrived
        return memory * state.remembered + (1 - memory) * fresh

    def _solve(self, target: float, step: int) -> Solve:
        began = time.perf_counter()
        state, config = self._state, self.config
        scores = self._scores()
        _broadcast(scores)
        if not bool((scores > 0).any()):
            raise TrainingError(
                "every importance is zero, so nothing tells which channels matter: train with "
                "prepared.pruner.step() for some steps before solving, and check that gradients reach the weights"
            )
        cost = self.cost
        if config.mask == "permanent":
            scores = torch.where(state.keep, scores, torch.zeros_like(scores))
            cost = dataclasses.replace(cost, permitted=self._remaining(cost.permitted))
        try:
            moving = self.schedule is not None and step < self.schedule.ramp_end
            choice = self._selector.settled(scores, cost, target, moving)
        except InfeasibleBudgetError as error:
            raise self._explained(error) from error
        before = state.keep.clone()
        state.keep.copy_(choice.keep)
        state.refresh()
        if config.mask == "permanent":
            self._zero_pruned()
        total = float(scores.sum())
        record = Solve(
            step=step,
            target=target,
            cost=choice.allocation.cost,
            importance_kept=choice.importance / total,
            bound=min(choice.allocation.bound / total, 1.0),
            changed={name: int(state.of_group(before != state.keep, name).sum()) for name in cost.permitted},
            returned=int((state.keep & ~before).sum()),
            units=state.keep.numel(),
            seconds=time.perf_counter() - began,
        )
        self.history.append(record)
        state.remembered.copy_(scores)
        state.gathered.zero_()
        state.gathers.zero_()
        state.solves += 1
        return record

    def _remaining(self, permitted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Permitted counts no larger than what is kept: permanently pruned channels do not return."""
        counts = self.counts
        return {
            name: tuple(c for c in allowed if c <= counts[name]) or (counts[name],)
            for name, allowed in permitted.items()
        }

    def _zero_pruned(self) -> None:
        for layer in self._importance.layers:
            weight = self._model.get_parameter(layer.weight)
            mask = getattr(self._state, f"mask_{layer.node}")
            with torch.no_grad():
                weight.mul_(mask)

    def _explained(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        pinned = [f"{g.name} ({g.pinned[0]})" for g in self._model.channels.groups if not g.free]
        shown = ", ".join(pinned[:5]) + (f" and {len(pinned) - 5} more" if len(pinned) > 5 else "")
        return InfeasibleBudgetError(
            f"the target of {error.budget:.6g} {self.cost.unit} cannot be reached: the smallest reachable cost is "
            f"{error.smallest:.6g} {self.cost.unit}, {error.smallest / self.full_cost:.1%} of the unpruned "
            f"{self.full_cost:.6g}. These groups must stay whole: {shown or 'none'}. Raise the target, or let "
            f"fewer channels be kept (multiple={self.config.multiple}).",
            smallest=error.smallest,
            budget=error.budget,
        )


def _broadcast(scores: Tensor) -> None:
    """All ranks solve the same: rank 0's importances, where training is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(scores, src=0)
