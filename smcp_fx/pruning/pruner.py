"""The pruner: gathers importances while a model trains, and solves for its masks when they are due."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import PruningConfig, is_number
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs.binding import absolute_target
from smcp_fx.errors import CheckpointError, InfeasibleBudgetError, InputError
from smcp_fx.interface.wrapping import require_whole
from smcp_fx.pruning import ranks
from smcp_fx.pruning.agreeing import agree
from smcp_fx.pruning.explanations import no_importance, out_of_reach
from smcp_fx.pruning.gradients import all_finite, loss_scale, norm
from smcp_fx.pruning.importance import TaylorImportance
from smcp_fx.pruning.loop_watch import LoopWatch
from smcp_fx.pruning.observers import Observer
from smcp_fx.pruning.repricing import LASTING, MISS, OVER, choose_at_price
from smcp_fx.pruning.scores import scores
from smcp_fx.pruning.selection import Choice, Selector
from smcp_fx.pruning.solve import Solve, table_of
from smcp_fx.pruning.solve_watch import SolveWatch
from smcp_fx.pruning.state import PruningState
from smcp_fx.pruning.worth import Floats, KnownWorth, Worth
from smcp_fx.schedule import Schedule
from smcp_fx.texts import amount

__all__ = ["Pruner", "Solve"]


@functools.cache
def _run_eagerly() -> None:
    """Keep `torch.compile` out of the pruner's methods.

    Not at import: it loads torch's compiler, as the first optimiser does, and takes as long as all the rest.
    """
    for method in (Pruner.step, Pruner.solve):
        setattr(Pruner, method.__name__, torch.compiler.disable(method))  # type: ignore[no-untyped-call]


class Pruner:
    """The pruner of a prepared model; call `step` once per optimiser step.

    ``cost`` is the network's cost, ``target`` the final one in its unit; ``history`` lists the solves;
    ``observers`` hear of every step and solve. ``asked``: the user gave the target.
    """

    def __init__(
        self,
        model: nn.Module,
        channels: ChannelGraph,
        state: PruningState,
        cost: NetworkCost,
        target: float | str,
        config: PruningConfig,
        schedule: Schedule | None,
        asked: bool = True,
    ) -> None:
        _run_eagerly()
        self._model = model
        self.cost = cost
        self.full_cost = cost.cost(cost.full_counts)
        self._wanted = target
        self.target = absolute_target(target, self.full_cost, cost.unit)
        self.config = config
        self.schedule = schedule
        self._asked = asked
        self.history: list[Solve] = []
        self.observers: list[Observer] = []
        self._channels = channels
        self._state = state
        self._selector = Selector(state, config, channels.branches)
        self._importance = TaylorImportance(channels, state, config.importance)
        self._watch = LoopWatch(model, self._importance.parameters(model))
        self._watch.active = schedule is not None
        self._solve_watch = SolveWatch()
        # Calls of `step`, counted here to avoid asking the device; never below the state's own count.
        self._calls = 0
        self._loads = -1
        state.listener = weakref.ref(self)
        self._note_prices()

    def __repr__(self) -> str:
        unit, solves = self.cost.unit, len(self.history)
        return (
            f"<Pruner: {amount(self.present_cost, unit)} now, {amount(self.target, unit)} asked, "
            f"{amount(self.full_cost, unit)} unpruned; {solves} solve{'s' * (solves != 1)}>"
        )

    def summary(self) -> str:
        """Return a table of the solves so far: step, target, cost, and how much of the importance was kept."""
        return f"{self!r}\n\n{table_of(self.history, self.cost.unit)}"

    @property
    def correction(self) -> float:
        """Measured over predicted cost, 1 until measured; targets are divided by it."""
        return float(self._state.correction)

    @correction.setter
    def correction(self, value: float) -> None:
        if not is_number(value) or not 0 < value <= sys.float_info.max:
            raise InputError(f"correction must be a positive, finite number, not {value!r}")
        self._state.correction.fill_(value)

    # ---- in the training loop ---------------------------------------------------------------------------

    def step(self, scaler: Any = None) -> Solve | None:
        """Gather importance, and solve for the masks when the schedule says so.

        Call once per optimiser step, after its last ``backward()`` and before clipping and
        ``optimizer.step()``. ``scaler``: the `GradScaler` in use, whether it has unscaled the gradients or
        not. Steps with gradients that are not finite are neither gathered nor counted. Returns the solve, if
        there was one. Values are read from the device only when a solve is due.

        Raises `TrainingError` if there are no gradients, or none since the last call, and under FSDP;
        `InputError` for a ``scaler`` of another type; and the errors of `solve`.
        """
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise InputError(f"scaler must be the GradScaler in use or None, not {scaler!r}")
        if not self._calls:
            require_whole(self._model)
        state = self._state
        state.rises = None
        self._watch.before_step(self._model.training, scaler is not None)
        scale = loss_scale(scaler)
        units = self._importance(self._model, 1.0 if scale is None else scale)
        finite = torch.isfinite(units).all()
        if scale is not None:  # the scaler skips the step if any gradient is not finite
            finite = finite & all_finite(self._model.parameters())
        state.gather(units, finite, self.config.momentum)
        state.trained.copy_(state.keep)
        step = self._counted()
        total = None if self.schedule is None else self.schedule.total_steps
        for observer in self.observers:
            observer.stepped(step, total)
        if self.schedule is None or not self.schedule.due(step):
            return None
        step = self._calls = int(ranks.broadcast(state.steps))
        gathers = int(ranks.broadcast(state.gathers))
        # After skipped steps, the due step is still to come, or has already been solved.
        if not (gathers and self.schedule.due(step)):
            self._solve_watch.going_on(step + 1, gathers, int(state.skipped))
            return None
        target = self.schedule.target(step, self.full_cost, self.target / self.correction)
        return self._solve(target, step, scale)

    def _counted(self) -> int:
        """Count this call; the count exceeds the step's number if steps were skipped since the last solve."""
        if self._loads != self._state.loads:  # new, or a checkpoint was loaded
            self._loads = self._state.loads
            self._calls = int(self._state.steps) + int(self._state.skipped)  # on all ranks the same
            if self._calls <= 1 and self.schedule is not None:
                self._warn_of_infeasible()
        else:
            self._calls += 1
        self._watch.active = self.schedule is not None and self._calls < self.schedule.last_step
        return self._calls

    def solve(self, target: float | str | None = None) -> Solve:
        """Solve for masks now, from the importances gathered so far.

        ``target``: a fraction of the unpruned cost, an absolute cost with its unit, or None for the model's
        own target. Without a schedule, the best choice is taken, not a near one that changes the masks least.
        Raises `InfeasibleBudgetError` if no permitted choice reaches the target, `TrainingError` if no
        importance is known or another rank has died. On several ranks, all must call it.
        """
        wanted = self.target if target is None else absolute_target(target, self.full_cost, self.cost.unit)
        self.warn_of_idle_target(wanted)
        return self._solve(wanted / self.correction, int(self._state.steps))

    def check_target(self) -> None:
        """Raise `InfeasibleBudgetError` now if no permitted choice reaches the final target."""
        cost = self.cost
        smallest = self._selector.within_limits(cost).smallest_counts
        if cost.cost(smallest) <= self.target:
            return  # good enough: with equal importances, searching for the best choice would take long
        if self._learn(smallest, LASTING):
            cost = cost.at(smallest)
        flat = torch.ones_like(self._state.gathered)
        try:
            self._selector.best(flat, cost, self.target)
        except InfeasibleBudgetError as error:
            raise self._out_of_reach(error) from error

    def warn_of_idle_target(self, target: float) -> None:
        """Warn when the unpruned network already meets the target, so that nothing would be pruned."""
        if target > (1 + OVER) * self.full_cost:
            self._solve_watch.idle_target(target, self.full_cost, self.cost.unit)

    def check_finished(self) -> None:
        """Warn if a model with a target is unpruned, or if its schedule has not reached the target."""
        # The correction may have been measured after the last solve.
        steps, target = int(self._state.steps), self.target / min(self.correction, 1.0)
        whole = bool(self._state.keep.all())
        asked = whole and self._asked
        if not (asked or steps or self._watch.backwards):  # freshly prepared, or masks set by hand
            return
        if self.schedule is None:
            if not int(self._state.solves) and whole and target < self.full_cost:
                self._solve_watch.nothing_pruned(steps, self.full_cost, target, self.cost.unit)
            return
        cost = self.present_cost
        solved_for = self.history[-1].target if self.history else math.inf
        if cost > (1 + MISS) * target and solved_for > (1 + OVER) * target:
            self._solve_watch.unfinished(steps, self.schedule, cost, target, self.cost.unit)

    def go_on_from(self, other: Pruner) -> None:
        """Copy from ``other`` what a copy of its model lacks: history, count of calls, target and prices."""
        self.history = list(other.history)
        self._calls, self._loads = other._calls, other._loads
        self.full_cost, self.target = other.full_cost, other.target
        self.cost = dataclasses.replace(other.cost, source=copy.copy(other.cost.source))
        self._note_prices()

    def loaded(self) -> None:
        """Restore the prices that the loaded state was made with."""
        source, full = self.cost.source, float(self._state.full_cost)
        if source is not None and source.price_as_of(float(self._state.as_of)):
            if self.target == absolute_target(self._wanted, self.full_cost, self.cost.unit):
                self.target = absolute_target(self._wanted, full, self.cost.unit)
            self.full_cost = full
        self._note_prices()

    def _learn(self, counts: Mapping[str, int], doubt: float) -> bool:
        """Call `NetworkCost.learn`, and note the prices in the state."""
        learned = self.cost.learn(counts, doubt)
        self._note_prices()
        return learned

    def _note_prices(self) -> None:
        self._state.full_cost.fill_(self.full_cost)
        self._state.as_of.fill_(0.0 if self.cost.source is None else self.cost.source.as_of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pruner:
        """Copy the whole model, and return the copy's pruner."""
        return cast(Pruner, copy.deepcopy(self._model, memo).pruner)

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "a pruner is not pickled: save the prepared model's state_dict(), or the run with smcp_fx.save_checkpoint"
        )

    def retire(self) -> None:
        """Stop watching the training: the weights go on without the pruner."""
        self._watch.close()

    def smallest_cost(self) -> float:
        """Return the smallest cost that permitted counts reach, priced around the present ones."""
        flat = torch.ones_like(self._state.gathered)
        try:
            return self._selector.best(flat, self.cost.at(self.counts), 0.0).allocation.cost
        except InfeasibleBudgetError as error:
            return error.smallest

    def _warn_of_infeasible(self) -> None:
        try:
            self.check_target()
        except InfeasibleBudgetError as error:
            self._solve_watch.infeasible(error)

    # ---- what a solve rests on --------------------------------------------------------------------------

    @property
    def importance(self) -> dict[str, Tensor]:
        """Importances of every free group's units, [size], as the next solve would see them."""
        vector = self._scores()
        return {g.name: self._state.of_group(vector, g.name) for g in self._channels.groups if g.free}

    @property
    def rises(self) -> Mapping[str, Floats] | None:
        """By free group, the rise of the loss by number of units kept, [size + 1], part of the model's state.

        None before `smcp_fx.gather_importance`, and again once training goes on.
        """
        return self._state.rises

    def _scores(self) -> Tensor:
        arrived = self.schedule is not None and int(self._state.steps) >= self.schedule.ramp_end
        return scores(self._state, self.config, arrived)

    @property
    def counts(self) -> dict[str, int]:
        """Units kept, by free group."""
        return self._selector.counts()

    @property
    def present_cost(self) -> float:
        """The network's cost with the present masks, in the unit of ``cost``."""
        counts = self.counts
        return self.cost.at(counts).cost(counts)

    def _solve(self, target: float, step: int, scale: Tensor | float | None = None) -> Solve:
        began = time.perf_counter()
        state = self._state
        importance = ranks.broadcast(self._scores())
        before = state.keep.clone()
        result = agree(state.keep, importance, lambda: self._choose(importance, target, step))
        if self.cost.source is not None:  # only rank 0 has learnt prices
            self.cost.source.price_as_of(float(ranks.broadcast(state.as_of)))
        state.refresh()
        if self._permanent:
            self._zero_pruned()
        masks = ranks.digest(self._importance.masks)
        ranks.check_same(masks, "masks", state.keep.device)
        total = float(importance.sum())
        changed = before != state.keep
        record = Solve(
            step=step,
            target=target,
            cost=result["cost"],
            importance_kept=result["importance"] / total,
            bound=min(result["bound"] / total, 1.0),
            changed={name: int(state.of_group(changed, name).sum()) for name in self.cost.permitted},
            returned=int((state.keep & ~before).sum()),
            units=state.keep.numel(),
            seconds=time.perf_counter() - began,
            reverted=int((changed & state.flipped).sum()),
            gradient_norm=norm(self._model.parameters(), scale),
            skipped=int(state.skipped),
            scales={name: float(value.float().mean()) for name, value in state.scales.items()},
            masks=masks,
        )
        any_importance = bool((state.gathered > 0).any())
        gathers, moving = int(state.gathers), self._moving(step)
        self._solve_watch.solved(record, gathers, any_importance, scale is not None, moving)
        self.history.append(record)
        state.flipped.copy_(changed)
        state.remembered.copy_(importance)
        state.forget()
        state.solves += 1
        for observer in self.observers:
            observer.solved(record)
        return record

    def _choose(self, importance: Tensor, target: float, step: int) -> Choice:
        if not bool((importance > 0).any()):
            self._importance.require_layers()
            raise no_importance(int(self._state.skipped), int(self._state.gathers))
        rises = self._state.rises
        worth = (
            Worth(importance, self._state, self.config.width_exponent)
            if rises is None
            else KnownWorth(importance, self._state, rises)
        )
        permanent = self._permanent
        if permanent:
            importance = torch.where(self._state.keep, importance, torch.zeros_like(importance))
        moving, scheduled = self._moving(step), self.schedule is not None

        def select(cost: NetworkCost) -> Choice:
            if permanent:
                cost = dataclasses.replace(cost, permitted=self._remaining(cost.permitted))
            return self._selector.settled(importance, cost, target, moving, worth, scheduled)

        try:
            return choose_at_price(self.cost, self.counts, target, select, self._learn, moving)
        except InfeasibleBudgetError as error:
            raise self._out_of_reach(error) from error

    def _out_of_reach(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        return out_of_reach(error, self._channels, self.cost.unit, self.full_cost, self.config.multiple)

    @property
    def _permanent(self) -> bool:
        """Whether pruned weights go for good. Not without training, where the repair needs them."""
        return self.config.mask == "permanent" and self._state.rises is None

    def _moving(self, step: int) -> bool:
        """Whether the target is still falling."""
        return self.schedule is not None and step < self.schedule.ramp_end

    def _remaining(self, permitted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return permitted counts up to the present ones: permanently pruned channels do not return."""
        counts = self.counts
        return {n: tuple(c for c in cs if c <= counts[n]) or (counts[n],) for n, cs in permitted.items()}

    @torch.no_grad()
    def _zero_pruned(self) -> None:
        for layer in self._importance.layers:
            if not layer.computed:  # the mask alone prunes a computed weight
                layer.tensor(self._model).mul_(self._state.layer_mask(layer))
